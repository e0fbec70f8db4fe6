"""Speed of learning from recordings (issue 21): td3_bc and iql beside d3rlpy and beside the bare update loop, in turns.

The same recording of Hopper-v5, networks of 256-256, batches of 256, no evaluation. A turn is one run of each, one after the other,
so that a machine that is slower for a while is slower for all; the medians of the turns are compared.

    shoal        `shoal train PRESET FILE`: the reader and the learner in processes of their own, the learner with one thread
    two threads  the same with --learner-threads 2
    d3rlpy       its fitter, with one thread and with two: the faster counts. SHOAL_D3RLPY names the Python that has it
    bare         whole updates on one batch that never moves, with one thread and with two
    streaming    shoal with a quarter of the memory that the recording takes: how much of the time the learner waits
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.install import DRIVERS, driver_environment
from evidence.lines import ROOT, Line, shoal
from shoal.bench.rates import snapshots

__all__ = ["LINES"]

ENV, HIDDEN, BATCH, STEPS = "Hopper-v5", (256, 256), 256, 80_000
TURNS, SECONDS, WARM_SECONDS = 5, 5.0, 1.5
FASTER, SHARE, IDLE = 1.3, 0.85, 0.02
PYTHON = "SHOAL_D3RLPY"  # the environment variable
QUIET = ("--console.mode", "none", "--no-tensorboard", "--console.every-seconds", "0.5")


def recorded(folder: str) -> str:
    """A folder of files, and the same as one file for d3rlpy."""
    for words in (("record", "random", ENV, "--episodes", "1000000", "--steps", str(STEPS), "--out", f"{folder}/logs"),
                  ("convert", f"{folder}/logs", f"{folder}/steps.npz"), ("convert", f"{folder}/logs", f"{folder}/steps.hdf5")):
        done = shoal("data", *words)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
    return folder


def ours(preset: str, data: str, seed: int, *more: str, device: str = "cpu", seconds: float = SECONDS) -> dict[str, float]:
    """Updates/s of shoal, and how much of the time the learner waited."""
    with tempfile.TemporaryDirectory() as folder:
        done = shoal("train", preset, data, "--run-dir", f"{folder}/run", "--max-learner-steps", "100000000", "--max-seconds",
                     f"{WARM_SECONDS + seconds:g}", "--seed", str(seed), "--net.hidden", *map(str, HIDDEN), "--replay.batch-size",
                     str(BATCH), "--device", device, *QUIET, *more)
        shots = snapshots(Path(folder, "run", "metrics.jsonl"))
    learning = [shot for shot in shots if shot["learner_steps"] and not shot.get("last")]
    begun = [shot for shot in learning if shot["time"] - learning[0]["time"] >= WARM_SECONDS]
    if done.returncode or len(begun) < 2:
        raise RuntimeError(f"{preset}: {done.stderr[-2000:] or 'the run was too slow to have a rate'}")
    first, last = begun[0], begun[-1]
    return {"rate": (last["learner_steps"] - first["learner_steps"]) / (last["time"] - first["time"]), "idle": last["learner_idle"]}


def theirs(preset: str, data: str, seed: int, threads: int) -> float:
    """Updates/s of d3rlpy."""
    order = {"algorithm": preset, "data": data, "batch": BATCH, "hidden": HIDDEN, "threads": threads, "seconds": SECONDS,
             "seed": seed}
    done = subprocess.run([os.environ[PYTHON], str(DRIVERS / "drive_d3rlpy.py"), json.dumps(order)], check=True, text=True,
                          capture_output=True, cwd=DRIVERS, env=driver_environment(), timeout=300)
    (began, first), (ended, last) = json.loads(done.stdout.splitlines()[-1])["marks"]
    return (last - first) / (ended - began)


def bare(preset: str, threads: int) -> float:
    """Updates/s without anything around them."""
    code = f"from evidence.offline_speed import bare_here; print(bare_here({preset!r}, {threads}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT, timeout=300)
    return float(done.stdout.split()[-1])


def bare_here(preset: str, threads: int) -> float:
    import torch

    from benchmarks.gpu_sac import BareUpdates
    from shoal.device.placement import Hardware

    torch.set_num_threads(threads)
    return BareUpdates(algorithm_of(preset), Hardware(), BATCH, graphs=False, whole=False).rate(SECONDS / 2)


def algorithm_of(preset: str) -> Any:
    from shoal import algorithms, envs
    from shoal.algorithms import iql, td3_bc
    from shoal.nets import NetConfig

    config = iql.Config() if preset == "iql" else td3_bc.Config(normalise_observations=True)
    return algorithms.make(config, envs.describe(ENV), NetConfig(hidden=HIDDEN, activation="relu"), 1)


def compared(preset: str) -> dict[str, Any]:
    if not os.environ.get(PYTHON):
        raise RuntimeError(f"set {PYTHON} to a Python that has d3rlpy")
    with tempfile.TemporaryDirectory() as folder:
        recorded(folder)
        data, table = f"{folder}/logs", f"{folder}/steps.npz"
        ways: dict[str, Callable[[int], float]] = {
            "shoal": lambda seed: ours(preset, data, seed)["rate"],
            "shoal, two threads": lambda seed: ours(preset, data, seed, "--learner-threads", "2")["rate"],
            "d3rlpy, 1 thread": lambda seed: theirs(preset, table, seed, 1),
            "d3rlpy, 2 threads": lambda seed: theirs(preset, table, seed, 2),
            "bare": lambda seed: bare(preset, 1), "bare, two threads": lambda seed: bare(preset, 2)}
        turns = [{name: round(run(seed), 1) for name, run in ways.items()} for seed in range(1, TURNS + 1)]
        streamed = ours(preset, f"{folder}/steps.hdf5", 1, "--data.memory-mb", f"{STEPS * 120 / 4 / 1e6:g}")
    middle = {name: statistics.median(turn[name] for turn in turns) for name in ways}
    faster = max(middle["shoal"], middle["shoal, two threads"]) / max(middle["d3rlpy, 1 thread"], middle["d3rlpy, 2 threads"])
    share = max(middle["shoal"] / middle["bare"], middle["shoal, two threads"] / middle["bare, two threads"])
    return {"met": faster >= FASTER and share >= SHARE and streamed["idle"] < IDLE, "times as fast as d3rlpy": round(faster, 3),
            "share of the bare loop": round(share, 3), "streaming": streamed, "medians": middle, "turns": turns}


def line(preset: str) -> Line:
    words = f"{preset} on a recording of {ENV}, {'-'.join(map(str, HIDDEN))}, batches of {BATCH}, two cores, medians of {TURNS} " \
            f"turns: at least {FASTER:g} times the updates/s of d3rlpy, {SHARE:.0%} of the bare loop, and a learner that waits " \
            f"less than {IDLE:.0%} of the time while it streams from an HDF5 file four times as large as its memory"
    return Line(f"speed-{preset}", 21, words, lambda _: compared(preset), seeds=(0,))


LINES = [line("td3_bc"), line("iql")]
