"""Demonstrations (issue 6, specs/value.md 10d): R2D3 solves what exploration does not find.

The task is the cue-lure corridor with L = 12: an agent that takes the lure gets 0.1 at once, one that passes it twelve times and
then takes the door that was named at the beginning gets 1. By epsilon-greedy steps from a policy that takes the lure that never
happens (0.2^12 per episode). The demonstrations are 20 episodes of a scripted expert, recorded again for every seed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from evidence.lines import Line, shoal, train
from evidence.value_mechanisms import SEEDS, SOLVED, compared, medians

__all__ = ["LINES"]

EXPERT, ENV = "shoal.envs.experts:follow_cue", "shoal/CueLure-v0"
DEMOS, MINUTES = 20, 5
UPDATES = 3_000
RHOS = {"rho 0": 0.0, "rho 1/64": 1 / 64, "rho 1/16": 1 / 16, "rho 1/4": 1 / 4}


def recorded(folder: str, seed: int) -> str:
    """Demonstrations in a folder."""
    path = str(Path(folder) / "demos")
    done = shoal("data", "record", EXPERT, ENV, "--episodes", str(DEMOS), "--seed", str(seed), "--out", path)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return path


def learns(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = recorded(folder, seed)
        result = train("r2d3", ENV, "--demos", path, "--until-return", str(SOLVED), "--max-seconds", str(60 * MINUTES), seed=seed)
    return {"met": result["stopped_by"] == "return" and result["eval_return"] >= SOLVED, **result,
            "command": result["command"].replace(path, "DEMOS")}


def rho(_: int) -> dict[str, Any]:
    """The same learner with more and fewer demonstrations in its batches; rho 0 is R2D2."""
    with tempfile.TemporaryDirectory() as folder:
        path = recorded(folder, 0)
        base = {"preset": "r2d3", "env": ENV, "every": 100, "episodes": 50, "most_updates": UPDATES, "goal": SOLVED}
        runs = compared({name: {**base, "overrides": {"demos": path, "replay.demo_ratio": share}} for name, share in RHOS.items()})
    updates, scores = medians(runs, lambda run: run["updates"]), medians(runs, lambda run: run["score"])
    solved = {name: sum(run["solved"] for run in some) for name, some in runs.items()}
    met = solved["rho 0"] == 0 and all(run["score"] <= 0.15 for run in runs["rho 0"]) and solved["rho 1/16"] == len(SEEDS)
    return {"met": met, "medians": {name: {"updates until solved": updates[name], "return": scores[name],
                                           "seeds that solved it": solved[name]} for name in RHOS}, "each": runs}


LINES = [
    Line("learning-r2d3-cuelure", 6, f"r2d3 with {DEMOS} demonstrations on the cue-lure corridor (L = 12) >= {SOLVED:g} within "
         f"{MINUTES} minutes", learns),
    Line("mechanism-rho", 6, f"cue-lure corridor (L = 12), r2d3, {DEMOS} demonstrations, 5 seeds: with rho 0 no seed gets past the "
         f"lure within {UPDATES:,} updates, with rho 1/16 every one solves it", rho, seeds=(0,)),
]
