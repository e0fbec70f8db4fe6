"""a3c with its workers' gradients on the CPU and on a GPU, in turns.

    python -m benchmarks.gpu_a3c --out FILE.json [--turns 2] [--seconds 20] [--actors N] [--only CartPole-v1] [--set A=JSON]

Three sides take turns, each a whole run without evaluations:

    cpu         everything on the cores
    cuda        gradients on the GPU, policies on the cores
    cuda act    gradients and policies on the GPU (--gpu.actors)

With --mode master a parameter server takes the place of the shared memory. By default there is a worker for every core but one. A
rate is env steps/s from WARM_SECONDS after the first step on; a share is a side's rate over the cpu's of the same turn, and the
median over the turns is reported. With the defaults it takes about 7 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.bench import machine
from shoal.bench.child_processes import ChildProcesses
from shoal.bench.rates import marks_of, rate, snapshots, tail

__all__ = ["main"]

CORES = len(os.sched_getaffinity(0))
ENVS = ("ALE/Pong-v5", "CartPole-v1")
SIDES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "cuda": {"device": "cuda"},
    "cuda act": {"device": "cuda", "gpu.actors": True},
}
WARM_SECONDS = 6.0     # CUDA contexts, one for each worker, and the choice of kernels
START_SECONDS = 120.0  # for a run to begin and to end


def measured(children: ChildProcesses, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One run: its rates once it is warm."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        run = Path(folder) / "run"
        told = {**arguments, "max_seconds": WARM_SECONDS + seconds, "run_dir": str(run)}
        done = children.run([sys.executable, "-m", "shoal.bench.training", json.dumps(told)], told["max_seconds"] + START_SECONDS)
        shots = snapshots(run / "metrics.jsonl")
    found = rate(marks_of(shots), WARM_SECONDS, looked=True)
    if done.returncode or not math.isfinite(found):
        return {"env_steps_per_second": None, "error": tail(done.stderr or done.stdout or "no rate", 5)}
    warm, last = next(shot for shot in shots if shot["seconds"] >= WARM_SECONDS), shots[-1]
    updates = (last["learner_steps"] - warm["learner_steps"]) / max(1e-9, last["seconds"] - warm["seconds"])
    return {"env_steps_per_second": round(found), "updates_per_second": round(updates, 1), "policy_lag": last.get("policy_lag"),
            "phases": {role: times.get("phases") for role, times in (last.get("roles") or {}).items()}}


def compared(children: ChildProcesses, env: str, options: argparse.Namespace, more: dict[str, Any]) -> dict[str, Any]:
    """All sides on one environment, in turns."""
    common = {"preset": "a3c", "env": env, "actors": options.actors, "architecture.mode": options.mode, "eval.enabled": False,
              "console.mode": "none", "tensorboard": False, **more}
    turns: list[dict[str, Any]] = []
    for number in range(options.turns):
        turns.append({})
        for side in options.sides.split(","):
            found = measured(children, {**common, **SIDES[side], "seed": number + 1}, options.seconds)
            turns[-1][side] = found
            sys.stderr.write(json.dumps({"env": env, "side": side, **found}) + "\n")
    medians = {side: middle([turn[side]["env_steps_per_second"] for turn in turns]) for side in turns[0]}
    shares = {side: middle([share(turn, side) for turn in turns]) for side in turns[0] if side != "cpu"}
    return {"env": env, "arguments": common, "env_steps_per_second": medians, "share_of_cpu": shares, "turns": turns}


def share(turn: dict[str, Any], side: str) -> float | None:
    """Of the cpu's rate in the same turn; None where one of the two failed."""
    one, other = turn[side]["env_steps_per_second"], turn.get("cpu", {}).get("env_steps_per_second")
    return None if one is None or not other else round(one / other, 3)


def middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run, once it is warm")
    parser.add_argument("--actors", type=int, default=max(1, CORES - 1), help="workers")
    parser.add_argument("--mode", default="hogwild", choices=("hogwild", "master"))
    parser.add_argument("--only", default=",".join(ENVS), metavar="ENVS", help="environments, with commas")
    parser.add_argument("--sides", default=",".join(SIDES), help="with commas")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="further settings of all runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    unknown = [side for side in options.sides.split(",") if side not in SIDES]
    if unknown:
        parser.error(f"--sides has {unknown[0]!r}; there are {', '.join(SIDES)}")
    more = {name: json.loads(value) for name, _, value in (word.partition("=") for word in options.set)}
    command = shlex.join(["python", "-m", "benchmarks.gpu_a3c", *(sys.argv[1:] if words is None else words)])
    children, results = ChildProcesses(), {**machine.describe(), "command": command}
    results["envs"] = [compared(children, env, options, more) for env in options.only.split(",")]
    text = json.dumps(results, indent=1) + "\n"
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
