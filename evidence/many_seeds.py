"""impala_throughput over many seeds, in the layout where its data are two versions old: learning must not collapse.

The layout is fixed, because `--actors auto` chooses by speed and the lag depends on the layout. Every run has two cores, as on the
machine that the preset is for; runs are side by side where there are more (`--jobs`, at most one for two cores).
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evidence.lines import KEPT, ROOT, Line, side_by_side

__all__ = ["LINES"]

SEEDS, GOAL, BUDGET = 20, 475, 20_000_000
LAGGED = ("--actors", "1", "--architecture.envs-per-actor", "1024", "--architecture.batch-slots", "1")


def pairs_of_cores() -> queue.SimpleQueue[set[int]]:
    """Two cores for each run, of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    pairs: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    for first in range(0, max(1, len(cores) - 1), 2):
        pairs.put(set(cores[first : first + 2]))
    return pairs


def reach(seed: int, cores: set[int]) -> dict[str, Any]:
    """One run until its return is reached or its budget is spent."""
    arguments = ["train", "impala_throughput", "CartPole-v1", *LAGGED, "--until-return", str(GOAL), "--max-env-steps", str(BUDGET),
                 "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "shoal.cli", *arguments, "--run-dir", str(run), "--console.mode", "none"]
        done = subprocess.run(["taskset", "-c", ",".join(map(str, sorted(cores))), *command], cwd=ROOT, capture_output=True,
                              text=True, check=False)
        if not (run / "summary.json").exists():
            raise RuntimeError(done.stderr[-2000:] or done.stdout[-2000:])
        summary = json.loads((run / "summary.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    returns = [row["train_return"] for row in rows if row["kind"] == "snapshot" and row.get("train_return") is not None]
    return {"seed": seed, "met": summary["stopped_by"] == "return", "command": "shoal " + " ".join(arguments),
            "exit_code": done.returncode, "train_returns": [round(value, 1) for value in returns],
            **{key: summary.get(key) for key in KEPT}}


def all_seeds(first: int) -> dict[str, Any]:
    """Every seed is a run of its own; all are written down."""
    pairs = pairs_of_cores()

    def one(seed: int) -> dict[str, Any]:
        cores = pairs.get()
        try:
            return reach(seed, cores)
        finally:
            pairs.put(cores)

    runs = side_by_side(one, range(first, first + SEEDS))
    return {"met": all(run["met"] for run in runs), "reached": sum(run["met"] for run in runs), "all": runs}


LINES = [Line(f"learning-impala_throughput-{SEEDS}-seeds", 15,
              f"impala_throughput on CartPole-v1 with data two versions old: {SEEDS} of {SEEDS} seeds reach {GOAL} within "
              f"{BUDGET:,} env steps", all_seeds, seeds=(0,))]
