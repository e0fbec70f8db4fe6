"""How fast is this tree against another one? Both train in turns on one machine, and the ratio of their medians counts.

    python -m benchmarks.against TREE [--rounds 5] [--seconds 10] [--only pong] [--write FILE]

TREE is a checkout of the other commit. A first run of each tree is not counted: in it Numba compiles its kernels and keeps them.
Numbers of actors are fixed, so that neither side calibrates; there are no evaluations. Env steps per second of processor time are
measured too: they hold beside other work, where those per second do not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shoal.bench import machine

__all__ = ["CASES", "main"]

ROOT = Path(__file__).resolve().parents[1]
WARM_SECONDS = 25.0  # of a first run, in which Numba compiles and keeps what it has compiled
CASES = {
    "impala_throughput CartPole-v1": ("impala_throughput", "CartPole-v1", "--actors", "2", "--architecture.batch-slots", "2"),
    "ppo_throughput CartPole-v1": ("ppo_throughput", "CartPole-v1", "--actors", "2"),
    "impala Pong": ("impala", "ALE/Pong-v5", "--actors", "{cores}"),
    "ppo Pong": ("ppo", "ALE/Pong-v5", "--actors", "{cores}"),
    "apex CartPole-v1": ("apex", "CartPole-v1", "--actors", "2"),
    "seed Pong": ("seed", "ALE/Pong-v5", "--actors", "{cores}"),
}


def rates_of(tree: Path, words: tuple[str, ...], seconds: float) -> tuple[float, float]:
    """Env steps per second, and per second of processor time, of a run from this tree."""
    cores = str(max(2, len(os.sched_getaffinity(0)) // 2))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "shoal.cli", "train", *(word.replace("{cores}", cores) for word in words),
                   "--run-dir", str(run), "--max-seconds", f"{seconds:g}", "--console.mode", "none", "--no-tensorboard",
                   "--no-eval.enabled", "--device", "cpu"]
        extra = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path and not path.startswith(str(ROOT))]
        env = {**os.environ, "PYTHONPATH": ":".join([str(tree / "src"), *extra])}
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, check=False, timeout=seconds + 240)
        if done.returncode:
            raise RuntimeError(done.stderr[-800:])
        summary = json.loads((run / "summary.json").read_text())
        return float(summary["env_steps_per_second"]), summary["env_steps"] / summary["cpu_seconds"]


def measure(name: str, before: Path, rounds: int, seconds: float) -> dict[str, Any]:
    found: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}
    for tree in (before, ROOT):
        rates_of(tree, CASES[name], WARM_SECONDS)
    for number in range(rounds):
        turns = [("before", before), ("after", ROOT)]
        for side, tree in turns if number % 2 == 0 else reversed(turns):
            found[side].append(rates_of(tree, CASES[name], seconds))
    row: dict[str, Any] = {"case": name}
    for kind, prefix in enumerate(("", "cpu_")):
        rates = {side: [pair[kind] for pair in pairs] for side, pairs in found.items()}
        row[f"{prefix}ratio"] = round(statistics.median(rates["after"]) / statistics.median(rates["before"]), 3)
        row |= {f"{prefix}{side}": [round(one, 1) for one in numbers] for side, numbers in rates.items()}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    rows = []
    for name in CASES:
        if options.only.lower() in name.lower():
            rows.append(measure(name, options.tree.resolve(), options.rounds, options.seconds))
            print(rows[-1], flush=True)
            if options.write:
                found = {"machine": machine.describe(), "seconds": options.seconds, "rows": rows}
                options.write.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
