"""Run directories written by an earlier commit: this tree resumes, evaluates and plays them.

The earlier commit is checked out beside this one and trains each preset that it has for a moment. `SHOAL_BEFORE` names a folder
with its checkout where the history is not at hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from evidence.lines import ROOT, Line
from evidence.same_bits import checkout, environment

__all__ = ["LINES"]

BEFORE = "a24688d"
"""The last commit before the rooms were moved."""


class EarlierRun(NamedTuple):
    """A run that the earlier commit makes."""

    preset: str
    env: str = "CartPole-v1"
    options: tuple[str, ...] = ("--actors", "1")
    updates: int = 20


RUNS = (
    *(EarlierRun(preset) for preset in ("a2c", "a3c", "ga3c", "gala", "impala", "seed", "appo", "rapid_ppo", "ppo", "ppo_quick",
                                        "impala_throughput", "ppo_throughput", "dqn", "double_dqn", "apex")),
    *(EarlierRun(preset, "shoal/Catch-v0") for preset in ("dqn_2013", "r2d2", "seed_r2d2", "gorila")),
    EarlierRun("anakin", "shoal/Catch-v0", ("--architecture.envs-per-actor", "64")),
    EarlierRun("ppo", "Pendulum-v1", ("--actors", "1", "--net.continuous", "gaussian")),
    EarlierRun("apex", "CartPole-v1", ("--actors", "1", "--replay.checkpoint")),
    EarlierRun("impala", "shoal/PixelCatch-v0", ("--actors", "1", "--net.recurrent", "lstm")),
)
DRAWN = ("CartPole-v1", "Pendulum-v1")  # what can be drawn as a picture; `shoal play` prints the others' episodes
QUIET = ("--console.mode", "none", "--no-tensorboard", "--eval.episodes", "2", "--device", "cpu", "--runtime", "inline")


def shoal_of(tree: Path, folder: Path, *words: str) -> str:
    """What the command of this tree prints; raises what it says if it fails."""
    done = subprocess.run([sys.executable, "-m", "shoal.cli", *words], env=environment(tree / "src"), cwd=folder, text=True,
                          capture_output=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"shoal {' '.join(words[:2])}: {(done.stderr or done.stdout)[-400:]}".replace(str(folder), "..."))
    return done.stdout


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def again(case: EarlierRun, seed: int, before: Path, folder: Path) -> dict[str, Any]:
    """Train from the earlier tree; evaluate, play and resume from this one."""
    run = folder / f"{case.preset}-{case.env.replace('/', '-')}-{len(case.options)}"
    row: dict[str, Any] = {"preset": case.preset, "env": case.env, "options": " ".join(case.options)}
    try:
        shoal_of(before, folder, "train", case.preset, case.env, "--seed", str(seed), "--run-dir", str(run), *QUIET,
                 "--max-learner-steps", str(case.updates), *case.options)
        first = summary_of(run)
        row["eval"] = shoal_of(ROOT, folder, "eval", str(run), "--episodes", "2").splitlines()[-1].strip()
        shoal_of(ROOT, folder, "play", str(run), *(("--video", str(folder / "seen.gif")) if case.env in DRAWN else ()))
        shoal_of(ROOT, folder, "resume", str(run), "--max-learner-steps", str(first["learner_steps"] + case.updates))
        last = summary_of(run)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {**row, "met": False, "error": str(error)}
    counts = {f"{name}_{when}": summary[name] for name in ("env_steps", "learner_steps")
              for when, summary in (("before", first), ("after", last))}
    met = last["learner_steps"] >= first["learner_steps"] + case.updates and last["env_steps"] > first["env_steps"]
    return {**row, **counts, "met": met}


def all_runs(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, checkout(os.environ.get("SHOAL_BEFORE", BEFORE), Path(name) / "before") as before:
        rows = []
        for case in RUNS:
            rows.append(again(case, seed, before, Path(name)))
            print(f"      {rows[-1]}", flush=True)
    return {"met": all(row["met"] for row in rows), "resumed": sum(row["met"] for row in rows), "of": len(rows), "rows": rows}


LINES = [Line("earlier-runs", 14, f"run directories made by commit {BEFORE} are evaluated, played and resumed, "
              f"{len(RUNS)} runs of 20 presets", all_runs, seeds=(0,))]
