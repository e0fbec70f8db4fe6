"""Population-based training of issue 20, and values that change while a run goes on. Ranges and budgets were fixed before the first
run of each line (specs/policy.md 12d, 15)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from evidence.lines import Line
from shoal.experiment.mailbox import Mailbox
from shoal.tuning.searches import SearchRule
from shoal.tuning.study import Study
from tests.coordination.test_population import toy

__all__ = ["LINES"]

SEEDS = (1, 2, 3, 4, 5)
CATCH = {"algorithm.lr": shoal.loguniform(1e-5, 1e-1), "algorithm.entropy": shoal.loguniform(1e-3, 1.0)}
CARTPOLE = {"algorithm.lr": shoal.loguniform(1e-6, 1e-1), "algorithm.entropy": shoal.loguniform(1e-4, 1.0)}
SETS, TRAINED, TURNS = 1000, 4_000_000, 5  # about a minute of training


def papers_toy(seed: int) -> dict[str, Any]:
    """Medians of 20 seeds: copying and exploring, exploring alone, neither."""
    medians = {name: float(np.median([toy(one, *rules) for one in range(20)]))
               for name, rules in {"pbt": (True, True), "explore only": (False, True), "neither": (False, False)}.items()}
    return {"met": medians["pbt"] >= 1.17 and medians["explore only"] <= 1.13 and abs(medians["neither"] - 0.3897) < 5e-4,
            "medians": medians}


def searched(preset: str, env: str, vary: dict[str, Any], seed: int, interval: int, budget: int) -> dict[str, Any]:
    """What PBT and random search find with eight members of the same budget each and the same first values."""
    found: dict[str, Any] = {"ranges": {name: str(prior) for name, prior in vary.items()}, "max_env_steps": budget}
    searches: tuple[SearchRule, ...] = ("population", "random")
    for search in searches:
        began = time.time()
        with tempfile.TemporaryDirectory() as folder:
            study = shoal.tune(preset, env, vary=vary, search=search, population=8, seed=1000 * seed, max_env_steps=budget,
                               every_env_steps=interval if search == "population" else None, study=f"{folder}/study",
                               tensorboard=False)
            found[search] = {**outcome(study), "seconds": round(time.time() - began, 1)}
    return found


def outcome(study: Study) -> dict[str, Any]:
    members = study.members()
    fitness = [float(one.fitness) for one in members if one.fitness is not None]
    return {"mean": float(np.mean(fitness)), "best": max(fitness), "fitness": fitness,
            "env_steps": sum(one.env_steps for one in members), "ancestors": len({one.ancestor for one in members}),
            "values": [one.values for one in members],
            "copies": sum(row["event"] == "copy" for row in study.lineage())}


def catch(seed: int) -> dict[str, Any]:
    found = searched("a2c", "shoal/Catch-v0", CATCH, seed, 8_000, 96_000)
    mean = found["population"]["mean"]
    return {"met": mean >= 0.9 and mean - found["random"]["mean"] >= 0.4, **found}


def cartpole(seed: int) -> dict[str, Any]:
    found = searched("impala", "CartPole-v1", CARTPOLE, seed, 15_000, 150_000)
    return {"met": found["population"]["mean"] >= 300 > found["random"]["mean"], **found}


# ---------------------------------------------------------------------------------------------- live values
def thousand_sets(seed: int) -> dict[str, Any]:
    """Processor seconds of the same training without and with 1,000 changes of the learning rate, in turns: other work on the
    machine does not count. Every change sets the value that the run began with, so both learn the same."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(TURNS):
        for name, found in seconds.items():
            found.append(_trained(seed, SETS if name == "with" else 0))
    slower = float(np.median(seconds["with"]) / np.median(seconds["without"])) - 1
    return {"met": slower <= 0.01, "slower": round(slower, 4), "cpu_seconds": seconds}


def _trained(seed: int, sets: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["train", "a2c", "shoal/Catch-v0", "--runtime", "inline", "--seed", str(seed), "--run-dir", str(run),
                 "--no-tensorboard", "--max-env-steps", str(TRAINED),
                 "--algorithm.lr", "0.002", "--no-eval.enabled", "--console.mode", "none"]
        process = subprocess.Popen([sys.executable, "-m", "shoal.cli", *words])
        while process.poll() is None and not (run / "metrics.jsonl").exists():
            time.sleep(0.05)
        box = Mailbox(run)
        for _ in range(sets):
            box.post({"command": "set", "values": {"algorithm.lr": 0.002}})
            time.sleep(0.002)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}")
        answers = len(list(box.folder.glob("*.answer"))) if sets else 0
        if answers != sets:
            raise RuntimeError(f"{answers} of {sets} changes were made")
    return round(usage.ru_utime + usage.ru_stime, 3)


LINES = [
    Line("mechanism-pbt-toy", 20, "the PBT paper's toy, medians of 20 seeds: PBT >= 1.17, explore only <= 1.13, neither 0.3897",
         papers_toy, seeds=(0,)),
    Line("mechanism-pbt-catch", 20, "a2c on Catch, eight members: the population's mean is >= 0.9 with PBT, and >= 0.4 above that "
         "of random search with the same env steps", catch, seeds=SEEDS),
    Line("mechanism-pbt-cartpole", 20, "impala on CartPole-v1, eight members of which most begin with bad values: the population's "
         "mean is >= 300 with PBT, and below that with random search", cartpole, seeds=(1, 2, 3)),
    Line("mechanism-live-sets", 20, "1,000 changed values slow a minute of training by at most 1 %", thousand_sets, seeds=(1,)),
]
