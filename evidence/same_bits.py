"""Does a commit train the same weights as another one, bit for bit? Both run here, on one machine: kernels differ between machines.

    python -m evidence.same_bits BEFORE [--presets ppo dqn] [--seeds 1 2 3] [--training-only] [--jobs 1] [--write]

Each preset trains inline with each seed, from the tree of BEFORE (a commit, or a folder with its checkout) and from this one. Then
all arrays of the last checkpoints are compared: parameters, targets, optimiser moments, counts, generators. A few presets also run
in lock step on the local runtime, where that is exact. For a change of evaluations, --training-only leaves out what the
evaluator saved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from evidence.lines import RESULTS, ROOT, commit, machine

__all__ = ["CASES", "RepeatableRun", "compare", "main"]


class RepeatableRun(NamedTuple):
    """A run that is the same every time."""

    preset: str
    env: str
    env_steps: int
    options: tuple[str, ...] = ()
    updates: int = 0  # end after as many instead, where actors run free: newer commits keep a budget of env steps more closely


CASES = (
    RepeatableRun("a2c", "CartPole-v1", 6000),
    RepeatableRun("a3c", "CartPole-v1", 6000, updates=60),
    RepeatableRun("a3c", "CartPole-v1", 6000, ("--architecture.mode", "master"), updates=60),
    RepeatableRun("anakin", "shoal/Catch-v0", 40000, ("--architecture.envs-per-actor", "64")),
    RepeatableRun("apex", "CartPole-v1", 4000),
    RepeatableRun("appo", "CartPole-v1", 6000),
    RepeatableRun("double_dqn", "CartPole-v1", 3000),
    RepeatableRun("dqn", "CartPole-v1", 3000),
    RepeatableRun("dqn_2013", "shoal/Catch-v0", 3000),
    RepeatableRun("ga3c", "CartPole-v1", 6000, updates=60),
    RepeatableRun("gala", "CartPole-v1", 6000, updates=60),
    RepeatableRun("gorila", "shoal/Catch-v0", 3000),
    RepeatableRun("impala", "CartPole-v1", 6000, updates=60),
    RepeatableRun("impala_throughput", "CartPole-v1", 60000, ("--actors", "1")),
    RepeatableRun("ppo", "CartPole-v1", 6000),
    RepeatableRun("ppo", "Pendulum-v1", 6000, ("--net.continuous", "gaussian")),
    RepeatableRun("ppo_quick", "CartPole-v1", 6000),
    RepeatableRun("ppo_throughput", "CartPole-v1", 60000, ("--actors", "1")),
    RepeatableRun("r2d2", "shoal/Catch-v0", 4000),
    RepeatableRun("rapid_ppo", "CartPole-v1", 6000, updates=60),
    RepeatableRun("seed", "CartPole-v1", 6000),
    RepeatableRun("seed_r2d2", "shoal/Catch-v0", 4000),
    RepeatableRun("impala", "shoal/PixelCatch-v0", 2000, ("--net.recurrent", "lstm"), updates=20),
)


def environment(*paths: Path) -> dict[str, str]:
    """One thread, and these paths in place of this checkout's; what else is on PYTHONPATH stays."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path and not path.startswith(str(ROOT))]
    return {**os.environ, "PYTHONPATH": ":".join([*map(str, paths), *others]), "OMP_NUM_THREADS": "1"}


def trained(tree: Path, case: RepeatableRun, seed: int, folder: Path) -> dict[str, np.ndarray]:
    """All arrays of the last checkpoint of a run from this tree."""
    run = folder / f"{tree.name}-{case.preset}-{seed}-{abs(hash(case)) % 10**6}"
    command = [sys.executable, "-m", "shoal.cli", "train", case.preset, case.env, "--runtime", "inline", "--seed", str(seed),
               "--run-dir", str(run), "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "2", "--device", "cpu",
               "--checkpoint.every-seconds", "100000", *case.options]
    command += ["--max-learner-steps", str(case.updates)] if case.updates else ["--max-env-steps", str(case.env_steps)]
    if "--actors" not in case.options and case.preset != "anakin":
        command += ["--actors", "2"]
    done = subprocess.run(command, env=environment(tree / "src"), capture_output=True, text=True, cwd=folder, check=False,
                          timeout=600)
    if done.returncode:
        raise RuntimeError(f"{tree.name}: {done.stderr[-600:] or done.stdout[-600:]}")
    newest = max(path for path in (run / "checkpoints").iterdir() if path.is_dir())
    files = sorted(newest.glob("*.safetensors"))
    return {f"{path.stem}/{name}": array for path in files for name, array in load_file(path).items()}


LOCAL = {
    "ppo, synchronous": "train(folder, ppo.Config(unroll=8), 'synchronous', 'CartPole-v1', 'local', actors=2, seed=SEED)",
    "vtrace, lock step": "train(folder, vtrace.Config(unroll=8), 'actor_learner', 'CartPole-v1', 'local', batch_slots=1, "
                         "lockstep=True, seed=SEED)",
    "dqn, in turns": "train(folder, dqn.Config(), 'synchronous', 'CartPole-v1', 'local', seed=SEED, updates=60, "
                     "replay=ReplayConfig(min_size=64, batch_size=16, insert_batch=4, samples_per_insert=4.0))",
}
"""Runs between processes that are exact: each tree's own test helper stops them after exactly as many updates."""
LOCAL_PROGRAM = """
import sys, tempfile
from pathlib import Path
from shoal.algorithms import dqn, ppo, vtrace
from tests.architectures.graphs import Farm, ReplayConfig, train
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    print((CALL).hash)
Farm.close()
"""


def hashed(tree: Path, call: str, seed: int) -> str:
    """The hash of the weights after a run between processes, from this tree."""
    program = LOCAL_PROGRAM.replace("CALL", call).replace("SEED", str(seed))
    done = subprocess.run([sys.executable, "-c", program], env=environment(tree / "src", tree), capture_output=True, text=True,
                          cwd=tree, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{tree.name}: {done.stderr[-600:]}")
    return done.stdout.split()[-1]


def judge_local(name: str, seed: int, before: Path) -> dict[str, Any]:
    row = {"run": name, "runtime": "local", "seed": seed}
    try:
        one, other = hashed(before, LOCAL[name], seed), hashed(ROOT, LOCAL[name], seed)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {**row, "met": False, "error": str(error)[-600:].replace(str(ROOT), ".").replace(str(before), "before")}
    return {**row, "met": one == other, "hash": other}


def compare(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> list[str]:
    """The names of arrays that differ, or that one side lacks."""
    both = before.keys() & after.keys()
    differ = [name for name in sorted(both) if before[name].tobytes() != after[name].tobytes()]
    return differ + [f"{name} (only one side has it)" for name in sorted(before.keys() ^ after.keys())]


def judge(case: RepeatableRun, seed: int, before: Path, folder: Path, training_only: bool = False) -> dict[str, Any]:
    row: dict[str, Any] = {**case._asdict(), "seed": seed}
    try:
        one, other = trained(before, case, seed, folder), trained(ROOT, case, seed, folder)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {**row, "met": False, "error": str(error)[-600:].replace(str(ROOT), ".").replace(str(folder), "...")}
    if training_only:
        one, other = ({name: array for name, array in arrays.items() if not name.startswith("evaluator-")}
                      for arrays in (one, other))
    differ = compare(one, other)
    return {**row, "met": not differ, "arrays": len(one), "differ": differ[:8]}


@contextmanager
def checkout(before: str, folder: Path) -> Iterator[Path]:
    """The tree of a commit, in a worktree that is removed afterwards; a folder is taken as it is."""
    if Path(before).is_dir():
        yield Path(before).resolve()
        return
    subprocess.run(["git", "worktree", "add", "--detach", "--force", str(folder), before], cwd=ROOT, check=True,
                   capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=ROOT, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence.same_bits", description=__doc__.splitlines()[0])
    parser.add_argument("before", help="the commit to compare with, or a folder with its checkout")
    parser.add_argument("--presets", nargs="*", default=(), help="only these")
    parser.add_argument("--seeds", nargs="*", type=int, default=(1, 2, 3))
    parser.add_argument("--training-only", action="store_true", help="leave out what the evaluator saved")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--write", action="store_true", help="write docs/results/same-bits.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, checkout(options.before, Path(name) / "before") as before:
        folder = Path(name)
        tasks: list[Callable[[], dict[str, Any]]] = [
            partial(judge, case, seed, before, folder, options.training_only)
            for case, seed in product(CASES, options.seeds) if not options.presets or case.preset in options.presets]
        tasks += [partial(judge_local, local, seed, before)
                  for local, seed in product(LOCAL if not options.presets else (), options.seeds)]
        rows = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for row in pool.map(lambda task: task(), tasks):
                rows.append(row)
                print("same  " if row["met"] else "DIFFER", row, flush=True)
    same = sum(row["met"] for row in rows)
    print(f"{same} of {len(rows)} runs have the same bits")
    if options.write:
        found = {"before": options.before, "commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine(),
                 "rows": rows}
        (RESULTS / "same-bits.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if same == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
