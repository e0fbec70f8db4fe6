"""SAC's speed (issue 18): shoal beside Stable-Baselines3 and beside the bare update loop, in turns on the same two cores.

One environment, one update per env step, no evaluation. A turn is one run of each, one after the other, so that a machine that is
slower for a while is slower for all; rates are env steps/s once updates have begun, and the medians of the turns are compared.

    shoal    `shoal train sac ENV`: actor, table and learner take turns in one process
    apart    `shoal train sac_throughput ENV`: in processes of their own, at work at the same time; the table's limiter keeps one
             update per step
    sb3      its SAC, with one thread and with two: the faster counts. It runs from a folder that SHOAL_SB3 names (pip install
             --target, beside shoal's own packages: for machines without a network), else in an environment of its own under .peers/
    bare     whole updates on one batch that never moves: no environment, no table, nothing is published
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_sac import LAYOUTS
from benchmarks.peers.install import DRIVERS, PeerLibrary, driver_environment, install
from evidence.lines import ROOT, Line
from shoal.bench.rates import marks_of, rate, snapshots
from shoal.bench.run_folders import temporary_run_folder

__all__ = ["LINES"]

SB3 = PeerLibrary("sb3_sac", "stable-baselines3", ("stable-baselines3>=2.7", "gymnasium[mujoco]==1.4.0", "mujoco<4"),
                  beside=("torch", "gymnasium", "numpy", "mujoco"))
TURNS, SECONDS, WARM_SECONDS, START = 5, 4.0, 2.0, 300
FOLDER = "SHOAL_SB3"  # the environment variable


@dataclass(frozen=True)
class UpdateCase:
    """The same networks and batches for all."""

    env: str
    hidden: tuple[int, ...]
    batch: int
    lr: float
    faster: float
    """Than SB3, at least."""
    share: float = 0.0
    """Of the bare loop, at least."""


PENDULUM = UpdateCase("Pendulum-v1", (64, 64), 128, 1e-3, faster=2.0)
CHEETAH = UpdateCase("HalfCheetah-v5", (256, 256), 256, 3e-4, faster=1.2, share=0.85)


def ours(case: UpdateCase, seed: int, apart: bool) -> float:
    """Env steps/s of shoal. A run in which too little was reported for a rate is made again, four times as long."""
    found = once(case, seed, apart, SECONDS)
    if not found > 0:
        found = once(case, seed, apart, 4 * SECONDS)
    if not found > 0:
        raise RuntimeError(f"{case.env}: the run was too slow to have a rate")
    return found


def once(case: UpdateCase, seed: int, apart: bool, seconds: float) -> float:
    """The same of one run; nan where there is no rate."""
    values = {"net.hidden": case.hidden, "replay.batch_size": case.batch,
              "replay.samples_per_insert": float(case.batch), "replay.min_size": START, "algorithm.random_steps": START,
              "eval.enabled": False, "console.mode": "none", "tensorboard": False}
    with temporary_run_folder() as folder:
        arguments = {"preset": LAYOUTS["apart" if apart else "turns"], "env": case.env, "seed": seed,
                     "max_seconds": WARM_SECONDS + seconds,
                     "run_dir": str(folder / "run"), **values}
        subprocess.run([sys.executable, "-m", "shoal.bench.training", json.dumps(arguments)], check=True, capture_output=True,
                       cwd=ROOT, timeout=300)
        return rate(marks_of(snapshots(folder / "run" / "metrics.jsonl")), WARM_SECONDS, looked=True)


def theirs(case: UpdateCase, seed: int, threads: int) -> float:
    """Env steps/s of SB3."""
    order = {"env": case.env, "hidden": case.hidden, "batch": case.batch, "lr": case.lr, "seed": seed, "threads": threads,
             "seconds": SECONDS}
    command, environment = SB3.command(order), driver_environment()
    if folder := os.environ.get(FOLDER):
        command[0], environment["PYTHONPATH"] = sys.executable, f"{DRIVERS}{os.pathsep}{Path(folder).resolve()}"
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=DRIVERS, env=environment, timeout=300)
    (began, first), (ended, last) = json.loads(done.stdout.splitlines()[-1])["marks"]
    return (last - first) / (ended - began)


def bare(case: UpdateCase) -> float:
    """Updates/s without anything around them."""
    given = case.env, case.hidden, case.batch, SECONDS / 2
    code = f"from evidence.sac_speed import bare_here; print(bare_here(*{given!r}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT, timeout=300)
    return float(done.stdout.split()[-1])


def bare_here(env: str, hidden: tuple[int, ...], batch: int, seconds: float) -> float:
    import torch

    from benchmarks.gpu_sac import BareUpdates, algorithm_of
    from shoal.device.placement import Hardware

    torch.set_num_threads(1)
    return BareUpdates(algorithm_of(env, hidden), Hardware(), batch, graphs=False, whole=0).rate(seconds)


def compared(case: UpdateCase) -> dict[str, Any]:
    words = f"Stable-Baselines3 from {FOLDER}"
    if not os.environ.get(FOLDER):
        able, words = install(SB3, print)
        if not able:
            raise RuntimeError(words)
    ways: dict[str, Callable[[int], float]] = {
        "shoal": lambda seed: ours(case, seed, False), "apart": lambda seed: ours(case, seed, True),
        "sb3, 1 thread": lambda seed: theirs(case, seed, 1), "sb3, 2 threads": lambda seed: theirs(case, seed, 2),
        "bare": lambda seed: bare(case)}
    turns = [{name: round(run(seed), 1) for name, run in ways.items()} for seed in range(1, TURNS + 1)]
    middle = {name: statistics.median(turn[name] for turn in turns) for name in ways}
    mine = max(middle["shoal"], middle["apart"])
    faster = mine / max(middle["sb3, 1 thread"], middle["sb3, 2 threads"])
    share = mine / middle["bare"]
    return {"met": faster >= case.faster and share >= case.share, "times as fast as SB3": round(faster, 3),
            "share of the bare loop": round(share, 3), "medians": middle, "turns": turns, "packages": words}


def line(name: str, case: UpdateCase) -> Line:
    words = f"sac on {case.env}, {'-'.join(map(str, case.hidden))}, batches of {case.batch}, one update per env step, two cores, " \
            f"medians of {TURNS} turns: at least {case.faster:g} times the env steps/s of SB3's SAC, in the faster of two layouts"
    if case.share:
        words += f" and {case.share:.0%} of the bare update loop"
    return Line(f"speed-sac-{name}", 18, words, lambda _: compared(case), seeds=(0,))


LINES = [line("pendulum", PENDULUM), line("halfcheetah", CHEETAH)]
