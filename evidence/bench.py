"""The suites of `shoal bench` (issue 8) on a quiet machine with two cores: the quick table in ten minutes, all presets, the curve.

Raw results go to docs/results/<suite>/; the quick table also into docs/benchmark.md.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import quick_table, replay_targets
from evidence.lines import RESULTS, Line
from shoal.bench import machine
from shoal.bench.result_columns import failed, missed
from shoal.bench.results_folder import ResultsFolder
from shoal.experiment.presets import preset_names

__all__ = ["LINES"]

HOURS = 3600.0
SHIPPED = {"impala ALE/Pong-v5": 0.85, "seed ALE/Pong-v5": 0.85, "ppo ALE/Pong-v5": 0.8, "dqn CartPole-v1": 0.7,
           "apex CartPole-v1": 0.7, "dqn ALE/Pong-v5": 0.7, "apex ALE/Pong-v5": 0.7}
"""Shares of the composed limit that presets as they are shipped shall reach on two cores."""
TIMES_SB3 = 1.5
"""ppo on Pong, at equal epochs."""


def measured(name: str, suite: str, *more: str, judge: Callable[[ResultsFolder, float], dict[str, Any]],
             whole: bool = False) -> Callable[[int], dict[str, Any]]:
    """Run a suite into a folder of its own: from the beginning where another commit began it, or where it counts as a `whole`."""

    def run(seed: int) -> dict[str, Any]:
        folder = RESULTS / name
        if whole or {session["commit"] for session in ResultsFolder(folder).sessions()} != {machine.describe()["commit"]}:
            shutil.rmtree(folder, ignore_errors=True)
        words = ["bench", suite, *more, "--out", str(folder)]
        started = time.monotonic()
        program = str(Path(sys.executable).parent / "shoal")
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=2 * HOURS, check=False)
        if not (folder / "results.jsonl").exists():
            raise RuntimeError(done.stderr[-2000:])
        seconds = time.monotonic() - started
        broken = [f"{row['group']}, seed {row['seed']}: {row['error']}" for row in ResultsFolder(folder).rows() if row["error"]]
        return {"command": f"shoal bench {suite} {' '.join(more)}".strip(), "seconds": round(seconds, 1), "failed": broken,
                **judge(ResultsFolder(folder), seconds)}

    return run


def quick(results: ResultsFolder, seconds: float) -> dict[str, Any]:
    quick_table.write()
    return {"met": seconds < 600 and not failed(results.rows()), "cases": len(results.groups())}


def learning(results: ResultsFolder, seconds: float) -> dict[str, Any]:
    rows = results.rows()
    seeds = {preset: len({row["seed"] for row in rows if row["preset"] == preset}) for preset in preset_names()}
    marked = "🔴" in (results.folder / "results.md").read_text(encoding="utf-8")
    gone = [f"{row['group']}, seed {row['seed']}: {row.get('final_return')} of {row['until_return']}" for row in missed(rows)]
    return {"met": all(count >= 3 for count in seeds.values()) and marked == bool(gone), "presets": len(seeds), "missed": gone}


def scaling(results: ResultsFolder, seconds: float) -> dict[str, Any]:
    groups = {name: [row.get("env_steps_per_second") for row in rows] for name, rows in results.groups().items()}
    counts = {row["asked_actors"] for row in results.rows() if not row["error"]}
    drawn = (results.folder / "report.html").read_text(encoding="utf-8").count(">model<")
    return {"met": counts == {1, 2, 4, 8} and drawn > 0, "env_steps_per_second": groups}


def peers(results: ResultsFolder, seconds: float) -> dict[str, Any]:
    """Every library was measured, and peers fill the columns that they report."""
    told = ("env_steps_per_second", "cpu_seconds_per_million", "peak_memory_mb", "startup_seconds")
    rows = [row for row in results.rows() if row["peer"]]
    gaps = [f"{row['group']}, seed {row['seed']}: no {name}" for row in rows for name in told if row.get(name) is None]
    names = sorted({row["peer"] for row in rows})
    return {"met": not failed(results.rows()) and not gaps and len(names) == 6, "peers": names, "gaps": gaps}


def faults(results: ResultsFolder, seconds: float) -> dict[str, Any]:
    rows = results.rows()
    restarts = {name: [row.get("restarts") for row in group] for name, group in results.groups().items()}
    return {"met": not failed(rows) and not missed(rows), "restarts": restarts,
            "missed": [f"{row['group']}, seed {row['seed']}: {row.get('final_return')}" for row in missed(rows)]}


def replay(results: ResultsFolder, seconds: float) -> dict[str, Any]:
    return {"met": not failed(results.rows()), "groups": sorted(results.groups()),
            "targets": replay_targets.target_table(results.groups()).splitlines()}


def shipped(results: ResultsFolder, seconds: float) -> dict[str, Any]:
    groups = results.groups()

    def median(group: str, value: str) -> float | None:
        found = [row[value] for row in groups.get(group, []) if row.get(value) is not None]
        return round(statistics.median(found), 3) if found else None

    shares = {group: median(group, "efficiency") for group in SHIPPED}
    ours, theirs = median("ppo ALE/Pong-v5", "env_steps_per_second"), median("sb3 ALE/Pong-v5", "env_steps_per_second")
    times = round(ours / theirs, 3) if ours and theirs else 0.0
    below = [group for group, goal in SHIPPED.items() if (shares[group] or 0.0) < goal]
    return {"met": not failed(results.rows()) and not below and times >= TIMES_SB3, "shares of the limit": shares, "goals": SHIPPED,
            "below": below, "ppo, times SB3": times}


LINES = [
    Line("as-shipped-two-cores", 16, "two cores, presets as they are shipped, five alternating runs, medians of shares of the "
         "composed limit: impala and seed on Pong >= 0.85, ppo >= 0.8 and >= 1.5 times SB3 at equal epochs, dqn and apex on "
         "CartPole and Pong >= 0.7", measured("as-shipped-suite", "evidence/as_shipped.toml", judge=shipped), seeds=(0,)),
    Line("bench-throughput", 8, "shoal bench throughput: presets beside their limits; peers and a plain loop in the same columns",
         measured("throughput-suite", "throughput", judge=peers), seeds=(0,)),
    Line("bench-faults", 8, "shoal bench faults: processes are killed, and every run still reaches its threshold",
         measured("faults-suite", "faults", "--jobs", "2", judge=faults), seeds=(0,)),
    Line("bench-replay", 8, "shoal bench replay: buffers at the same work, peers in environments of their own",
         measured("replay-suite", "replay", judge=replay), seeds=(0,)),
    Line("bench-throughput-quick", 8, "shoal bench throughput --suite quick ends within 10 minutes, every case measured",
         measured("throughput-quick", "throughput", "--suite", "quick", judge=quick, whole=True), seeds=(0,)),
    Line("bench-learning", 8, "the learning suite covers every preset that exists with 3 seeds and marks misses in red",
         measured("learning-suite", "learning", "--jobs", "2", judge=learning), seeds=(0,)),
    Line("bench-scaling", 8, "the scaling suite runs 1, 2, 4 and 8 actors and draws the curve beside the model's",
         measured("scaling-suite", "scaling", judge=scaling), seeds=(0,)),
]
