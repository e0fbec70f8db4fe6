"""How long a run takes to begin, and how much memory its actors hold: `python -m shoal.bench.startup`.

    start-up    from the command to the first environment step: `shoal train impala CartPole-v1` with 2 and with 16 actors, in
                turn. The supervisor looks ten times a second, so up to 0.1 s too late and never too early
    memory      proportional set size of each actor (shared pages divided among those who share them), once all of them act
    parts       what the interpreters that start one after the other spend their time on, each alone

Written to docs/results/startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.bench import machine
from shoal.bench.__main__ import say
from shoal.bench.tables import startup_tables

__all__ = ["GOALS", "main", "start"]

GOALS = {"seconds": 4.0, "ratio": 2.0, "actor_mb": 150.0}
"""First step with 2 actors; 16 actors against 2; memory of each of 16 actors."""
ACTORS = (2, 16)
PATIENCE_SECONDS = 120.0
SETTLE_SECONDS = 3.0  # after the first step; by then every actor has made many
PARTS = {
    "the command's imports and configuration":
        "from shoal.experiment.parse import parse_train; parse_train(['impala', 'CartPole-v1'])",
    "of these, torch": "import torch",
    "the fork server's imports":
        "import importlib; from shoal.runtime.nursery import PRELOAD; [importlib.import_module(name) for name in PRELOAD]",
}


def start(actors: int) -> dict[str, Any]:
    """One run: seconds to its first step, and its actors' memory a moment later."""
    with tempfile.TemporaryDirectory(prefix="shoal-startup-") as folder:
        directory = Path(folder) / "run"
        command = [str(Path(sys.executable).parent / "shoal"), "train", "impala", "CartPole-v1", "--actors", str(actors),
                   "--run-dir", str(directory), "--console.mode", "none", "--no-eval.enabled",
                   "--max-seconds", str(PATIENCE_SECONDS)]
        began = time.time()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            first = _first_step(directory / "metrics.jsonl", run)
            time.sleep(SETTLE_SECONDS)
            memory = _memory(run.pid) if run.poll() is None else []
        finally:
            run.send_signal(signal.SIGINT)  # nothing happens where it has ended
            _, words = run.communicate()
    if first is None:
        return {"actors": actors, "seconds": None, "error": words.decode()[-500:]}
    return {"actors": actors, "seconds": round(first - began, 3), "error": None, "load": round(os.getloadavg()[0], 2),
            "actor_mb": memory}


def _first_step(metrics: Path, run: subprocess.Popen[bytes]) -> float | None:
    """The time of day of the first step; the run's own clock counts from there."""
    from shoal.telemetry.sinks import read_lines

    while run.poll() is None:
        rows = read_lines(metrics) if metrics.exists() else []
        for row in rows:
            if row.get("kind") == "snapshot" and row["seconds"]:
                return float(row["time"]) - float(row["seconds"])
        time.sleep(0.2)
    return None


def _memory(pid: int) -> list[float]:
    """Of every actor below a process, in MB."""
    import psutil

    from shoal.experiment.memory import proportional_mb

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


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.bench.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-save", action="store_true", help="do not write docs/results/startup.json")
    given = parser.parse_args(words)
    results: dict[str, Any] = {**machine.describe(), "goals": GOALS, "runs": [], "parts": {name: [] for name in PARTS}}
    part("import torch")  # a warm disk
    for number in range(given.rounds):
        for actors in ACTORS:
            results["runs"].append(start(actors))
            say(f"  round {number + 1}  {json.dumps(results['runs'][-1])}")
        for name, code in PARTS.items():
            results["parts"][name].append(part(code))
    say("\n" + startup_tables(results))
    if not given.no_save:
        say(f"wrote {machine.save('startup.json', results)}; `python -m shoal.bench.report` puts it into docs/performance.md")
    return int(any(run["error"] for run in results["runs"]))


if __name__ == "__main__":
    sys.exit(main())
