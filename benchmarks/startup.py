"""How long a run takes to begin, and how much memory its actors hold: `python -m benchmarks.startup`.

    start-up    from the command to the first environment step: `shoal train impala CartPole-v1` with 2 and with 16 actors, in
                turn. The supervisor looks ten times a second, so up to 0.1 s too late and never too early
    as shipped  the same for commands with nothing typed but preset and environment: on a machine that shoal has never seen, and
                where --actors auto finds what `shoal calibrate` has kept
    memory      proportional set size of each actor (shared pages divided among those who share them), once all of them act
    parts       what the interpreters that start one after the other spend their time on, each alone

Written to docs/results/startup.json.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import parser_for, save, say, where
from shoal.bench import machine
from shoal.bench.rates import Spread, snapshots
from shoal.bench.text_tables import markdown, spread

__all__ = ["GOALS", "main", "start"]

GOALS = {"seconds": 4.0, "ratio": 2.0, "actor_mb": 150.0}
"""First step with 2 actors; 16 actors against 2; memory of each of 16 actors."""
SHIPPED = {"impala ALE/Pong-v5": False, "impala_throughput CartPole-v1": True, "ppo_throughput CartPole-v1": True}
"""Preset and environment, and whether it has --actors auto, so that there is something to calibrate."""
SHIPPED_GOALS = {"first": 15.0, "calibrated": 5.0}
"""First step where nothing is known of the machine, and where everything is."""
ACTORS = (2, 16)
SHOAL = (sys.executable, "-m", "shoal.cli")
PATIENCE_SECONDS = 120.0
SETTLE_SECONDS = 3.0  # after the first step; by then every actor has made many
PARTS = {
    "the command's imports and configuration":
        "from shoal.experiment.parse import parse_train; parse_train(['impala', 'CartPole-v1'])",
    "of these, torch": "import torch",
    "the fork server's imports":
        "import importlib; from shoal.experiment.preload import PRELOAD; [importlib.import_module(name) for name in PRELOAD]",
}


def start(actors: int) -> dict[str, Any]:
    """One run: seconds to its first step, and its actors' memory a moment later."""
    return {"actors": actors, **started(["impala", "CartPole-v1", "--actors", str(actors)])}


def shipped(case: str, calibrates: bool) -> list[dict[str, Any]]:
    """Two runs with nothing typed but preset and environment: the first one here, and one after `shoal calibrate`."""
    preset, env = case.split()
    with tempfile.TemporaryDirectory(prefix="shoal-startup-cache-") as cache:
        there = {**os.environ, "SHOAL_CACHE": cache}
        rows = [{"case": case, "when": "first", **started([preset, env], there)}]
        if calibrates:
            subprocess.run([*SHOAL, "calibrate", env, preset], env=there, check=True, stdout=subprocess.DEVNULL)
        return [*rows, {"case": case, "when": "calibrated", **started([preset, env], there)}]


def started(words: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A run of `shoal train`."""
    with tempfile.TemporaryDirectory(prefix="shoal-startup-") as folder:
        directory = Path(folder) / "run"
        command = [*SHOAL, "train", *words, "--run-dir", str(directory), "--console.mode", "none", "--no-eval.enabled",
                   "--max-seconds", str(PATIENCE_SECONDS)]
        began = time.time()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ)
        try:
            first = _first_step(directory / "metrics.jsonl", run)
            time.sleep(SETTLE_SECONDS)
            memory = _memory(run.pid) if run.poll() is None else []
        finally:
            run.send_signal(signal.SIGINT)  # nothing happens where it has ended
            _, said = run.communicate()
    if first is None:
        return {"seconds": None, "error": said.decode()[-500:]}
    return {"seconds": round(first - began, 3), "error": None, "load": round(os.getloadavg()[0], 2), "actor_mb": memory}


def _first_step(metrics: Path, run: subprocess.Popen[bytes]) -> float | None:
    """The time of day of the first step; the run's own clock counts from there."""
    while run.poll() is None:
        for shot in snapshots(metrics):
            if shot["seconds"]:
                return float(shot["time"]) - float(shot["seconds"])
        time.sleep(0.2)
    return None


def _memory(pid: int) -> list[float]:
    """Of every actor below a process, in MB."""
    import psutil

    from shoal.experiment.process_usage import proportional_mb

    found = []
    for process in psutil.Process(pid).children(recursive=True):
        if re.fullmatch(r"shoal: actor \d+", " ".join(process.cmdline()).strip()):
            found.append(round(proportional_mb(process.pid), 1))
    return found


def part(code: str) -> float:
    """Seconds of a fresh interpreter that does this and ends."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return round(time.perf_counter() - began, 3)


def startup_tables(results: Mapping[str, Any]) -> str:
    """First step with few and with many actors, their memory, and where the time goes."""
    good = [run for run in results["runs"] if not run["error"]]
    few, many = ([run for run in good if run["actors"] == actors] for actors in (2, 16))
    first, second = (median([run["seconds"] for run in runs]) for runs in (few, many))
    most = Spread.of([max(run["actor_mb"]) for run in many if run["actor_mb"]])
    goals = results["goals"]
    rows = [["first environment step, 2 actors (s)", _each(few), f"< {goals['seconds']:g}", _met(first < goals["seconds"])],
            ["first environment step, 16 actors (s)", _each(many), "-", "-"],
            ["16 actors / 2 actors, medians", f"{second / first:.2f}" if first else "-", f"<= {goals['ratio']:g}",
             _met(second <= goals["ratio"] * first)],
            ["largest of 16 actors, MB (PSS)", f"{most.median:.0f} ({most.low:.0f} - {most.high:.0f})" if most.count else "-",
             f"< {goals['actor_mb']:g}", _met(most.high < goals["actor_mb"])]]
    rows += [shipped_row(results["shipped"], case, when) for case in SHIPPED for when in SHIPPED_GOALS if "shipped" in results]
    parts = [[name, spread(values)] for name, values in results["parts"].items()]
    broken = "\n".join(f"- {run['actors']} actors: failed: {run['error']}" for run in results["runs"] if run["error"])
    loads = "Load average during the runs: " + ", ".join(f"{run['load']:g}" for run in good) + "."
    return "\n\n".join(part for part in (where(results), markdown(("what", "median (all runs)", "goal", "met"), rows), loads,
                                         markdown(("alone, in a fresh interpreter", "s"), parts), broken) if part)


def shipped_row(runs: Sequence[Mapping[str, Any]], case: str, when: str) -> list[str]:
    """A command as it is shipped."""
    mine = [run for run in runs if (run["case"], run["when"]) == (case, when)]
    good, goal = [run for run in mine if not run["error"]], SHIPPED_GOALS[when]
    words = {"first": "nothing known of the machine", "calibrated": "calibrated before" if SHIPPED[case] else "once more"}[when]
    return [f"first environment step, `shoal train {case}`, {words} (s)", _each(good), f"< {goal:g}",
            _met(len(good) == len(mine) and median([run["seconds"] for run in good]) < goal)]


def _each(runs: Sequence[Mapping[str, Any]]) -> str:
    values = [run["seconds"] for run in runs]
    return f"{median(values):.2f} (" + ", ".join(f"{value:.2f}" for value in values) + ")" if values else "-"


def _met(yes: bool) -> str:
    return "yes" if yes else "no"


def median(values: Sequence[float]) -> float:
    return Spread.of(values).median


def main(words: Sequence[str] | None = None) -> int:
    given = parser_for("startup", __doc__, "startup.json", rounds=5).parse_args(words)
    results: dict[str, Any] = {**machine.describe(), "goals": GOALS, "runs": [], "shipped": [],
                               "parts": {name: [] for name in PARTS}}
    part("import torch")  # a warm disk
    for number in range(given.rounds):
        for actors in ACTORS:
            results["runs"].append(start(actors))
            say(f"  round {number + 1}  {json.dumps(results['runs'][-1])}")
        for case, calibrates in SHIPPED.items():
            results["shipped"] += shipped(case, calibrates)
            say(f"  round {number + 1}  {json.dumps(results['shipped'][-2:])}")
        for name, code in PARTS.items():
            results["parts"][name].append(part(code))
    say("\n" + startup_tables(results))
    if not given.no_save:
        say(f"wrote {save('startup.json', results)}; `python -m benchmarks.performance_page` puts it into docs/performance.md")
    return int(any(run["error"] for run in (*results["runs"], *results["shipped"])))


if __name__ == "__main__":
    sys.exit(main())
