"""QT-Opt (issue 18, specs/value.md 11d): PointGrasp from recorded grasps alone, then online; CEM and the second judge.

    learning    20,000 scripted episodes, a quarter of them successful -> 5,000 updates offline -> 6,000 more with one actor
    search      the same trained network: the best of CEM 64/6/2, of 64 and of 16 uniformly random actions
    judges      targets with and without the lagged second network: by how much it promises more than it gets at the end of the
                offline phase, and after 2,000 updates, while values still rise; and how far the two networks are apart

Everything runs inline, so the results depend on the seed and not on the machine. A grasp succeeded if its episode returned more
than 0.5: success gives 1 less 0.05 for each step before.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from evidence.lines import Line, apart, shoal, side_by_side
from shoal import envs
from shoal.algorithms.qtopt import QTModel, QTPolicy
from shoal.offline import open_demos

__all__ = ["LINES"]

MODULE, ENV, SEEDS = "evidence.qtopt", "shoal/PointGrasp-v0", (0, 1, 2, 3, 4)
FRESH = (21, 22, 23, 24, 25)  # of the judges: RISING was chosen on seeds 11 to 13, after SEEDS had been seen
LOGS, RISING, OFFLINE, ONLINE = 20_000, 2_000, 5_000, 6_000
EPISODES, STATES, HORIZON = 1_000, 100, 10
QUIET = ("--runtime", "inline", "--console.mode", "none", "--no-tensorboard", "--eval.every-learner-steps", "1000000",
         "--eval.every-env-steps", "100000000")
Search = Callable[[QTModel, torch.Tensor, torch.Generator], torch.Tensor]


# ---------------------------------------------------------------------------------------------- one run
def trial(seed: int, clipped: bool = True, online: bool = False, rising: bool = False) -> dict[str, Any]:
    """Learn, and look at what came of it; `rising` looks at a run that ends early too."""
    with tempfile.TemporaryDirectory() as folder:
        logs, run = f"{folder}/logs", f"{folder}/run"
        command("data", "record", "scripted", ENV, "--episodes", str(LOGS), "--seed", str(seed), "--num-envs", "64", "--out", logs)
        wrong = () if clipped else ("--no-algorithm.clipped-double",)

        def learn(updates: int, into: str) -> None:
            command("train", "qtopt", ENV, "--demos", logs, "--offline", "--max-learner-steps", str(updates), "--seed", str(seed),
                    "--run-dir", into, *QUIET, *wrong)

        learn(OFFLINE, run)
        found = {"offline": played(run, seed), **looked_at(run, logs, seed)}
        if rising:
            learn(RISING, f"{folder}/early")
            found |= {"rising": {**played(f"{folder}/early", seed), "bias": bias(loaded(f"{folder}/early"), seed)}}
        if online:
            command("resume", run, "--online", "--max-learner-steps", str(OFFLINE + ONLINE), "--console.mode", "none")
            found |= {"online": played(run, seed), "env_steps": json.loads(Path(run, "summary.json").read_text())["env_steps"]}
    return found


def command(*words: str) -> None:
    done = shoal(*words, timeout=7200)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def loaded(run: str, judge: str = "target") -> QTPolicy:
    """The policy of the newest checkpoint, whatever the evaluator took for the best one; `lagged`: by the second network."""
    import shoal as library

    policy = library.load(run).prepared.algorithm.policy()
    assert isinstance(policy, QTPolicy)
    state = load_file(max(Path(run, "checkpoints").glob("*/learner-0.safetensors")))
    policy.model.params.copy_(torch.from_numpy(state[f"learn/{judge}"]))
    return policy


@torch.no_grad()
def distance(run: str, states: torch.Tensor, seed: int) -> float:
    """How far the two judges are apart, on average, at the best action that the search finds."""
    first, second = loaded(run).model, loaded(run, "lagged").model
    unit, logits = first.best(first.encode(states), torch.Generator().manual_seed(seed))
    judged = second.values(second.logits(second.encode(states), unit.unsqueeze(1))).squeeze(1)
    return float((first.values(logits) - judged).abs().mean())


def played(run: str, seed: int) -> dict[str, float]:
    """Fresh episodes of the newest policy."""
    policy = loaded(run)
    rewards, _, valid = rolled_out(policy.model, cem, seed)
    returns = (rewards * valid).sum(0)
    return {"success": float((returns > 0.5).mean()), "return": float(returns.mean())}


def looked_at(run: str, logs: str, seed: int) -> dict[str, Any]:
    """How well the policy's search finds the best action, what other searches come to, and what the network promises."""
    policy = loaded(run)
    episodes = open_demos(logs).episodes(np.random.default_rng(seed))
    states = np.stack([next(episodes).observation[0] for _ in range(STATES)])
    searches: dict[str, Search] = {"64/6/2": cem, "64": uniform(64), "16": uniform(16)}
    return {"gap": gap(policy.model, torch.from_numpy(states), seed), "bias": bias(policy, seed),
            "distance": distance(run, torch.from_numpy(states), seed),
            "success of searches": {name: success(policy.model, search, seed) for name, search in searches.items()}}


def cem(model: QTModel, encoded: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return model.best(encoded, rng)[0]


def uniform(count: int) -> Search:
    """The best of some random actions."""

    def search(model: QTModel, encoded: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        unit = torch.rand(len(encoded), count, model.net.size, generator=rng) * 2 - 1
        unit = torch.where(model.binary, unit.sign(), unit)
        return unit[torch.arange(len(unit)), model.logits(encoded, unit).argmax(1)]

    return search


@torch.no_grad()
def gap(model: QTModel, states: torch.Tensor, seed: int) -> float:
    """By how much the best value on a grid of 21 numbers in each direction is above that of the action which is found."""
    line = torch.linspace(-1, 1, 21)
    grid = torch.cartesian_prod(line, line, torch.tensor([-1.0, 1.0]))
    encoded = model.encode(states)
    best = model.values(model.logits(encoded, grid.expand(len(states), -1, -1))).amax(1)
    found = model.values(model.best(encoded, torch.Generator().manual_seed(seed))[1])
    return float((best - found).mean())


@torch.no_grad()
def rolled_out(model: QTModel, search: Search, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first episode of each of many environments: rewards, promised values, and whether a step belongs to it, each [T, B]."""
    env, rng = envs.make(ENV, EPISODES), torch.Generator().manual_seed(seed)
    now, alive = env.reset(5000 + seed), np.ones(EPISODES, bool)
    rows = []
    for _ in range(HORIZON):
        encoded = model.encode(torch.from_numpy(np.array(now.observation)))
        unit = search(model, encoded, rng)
        promised = model.values(model.logits(encoded, unit.unsqueeze(1))).squeeze(1)
        now = env.step(model.net.range.scaled(unit).numpy())
        rows.append((now.reward.copy(), promised.numpy(), alive.copy()))
        alive &= ~now.last
    env.close()
    rewards, values, valid = (np.stack(column) for column in zip(*rows, strict=True))
    return rewards, values, valid


def success(model: QTModel, search: Search, seed: int) -> float:
    rewards, _, valid = rolled_out(model, search, seed)
    return float(((rewards * valid) > 0.5).any(0).mean())


def bias(policy: QTPolicy, seed: int) -> float:
    """Mean of what the network promises less what comes of it, discounted."""
    model = policy.model
    rewards, values, valid = rolled_out(model, cem, seed)
    outcome = np.zeros(rewards.shape)
    following = np.zeros(rewards.shape[1])
    for t in reversed(range(HORIZON)):
        following = outcome[t] = valid[t] * (rewards[t] + model.config.gamma * following)
    return float((values - outcome)[valid].mean())


# ---------------------------------------------------------------------------------------------- the lines
def learns(_: int) -> dict[str, Any]:
    runs = side_by_side(lambda seed: {"seed": seed, **apart(MODULE, seed=seed, online=True)}, SEEDS)
    good = sum(run["offline"]["success"] >= 0.8 and run["online"]["success"] >= 0.95 and run["online"]["return"] >= 0.8
               for run in runs)
    return {"met": good >= 4, "seeds that met it": good, "each": runs}


def judges(_: int) -> dict[str, Any]:
    cases = [(clipped, seed) for clipped in (True, False) for seed in FRESH]
    runs = side_by_side(lambda case: {"clipped": case[0], "seed": case[1],
                                      **apart(MODULE, clipped=case[0], seed=case[1], rising=True)}, cases)
    two, one = ([run for run in runs if run["clipped"] is clipped] for clipped in (True, False))
    rising = [statistics.median(run["rising"]["bias"] for run in some) for some in (two, one)]
    settled = [statistics.median(run["bias"] for run in some) for some in (two, one)]
    order = [statistics.median(run["success of searches"][name] for run in two) for name in ("64/6/2", "64", "16")]
    gaps = [run["gap"] for run in two]
    met = settled[1] - settled[0] >= 0.05 and order[0] > order[1] > order[2] and statistics.median(gaps) < 0.02
    return {"met": met, "median bias with two judges": settled[0], "with one": settled[1],
            f"the same after {RISING:,} updates": rising,
            "median distance of the judges": statistics.median(run["distance"] for run in two),
            "median gap": statistics.median(gaps),
            "median success of CEM 64/6/2, best of 64, best of 16": order, "each": runs}


LINES = [
    Line("learning-qtopt-pointgrasp", 18, f"qtopt on PointGrasp: >= 80 % success after {OFFLINE:,} updates from {LOGS:,} recorded "
         f"episodes alone, >= 95 % and a return >= 0.8 after {ONLINE:,} more online, on at least 4 of 5 seeds", learns, seeds=(0,)),
    Line("mechanism-qtopt", 18, "PointGrasp, medians of 5 seeds: success of CEM 64/6/2 above the best of 64 above the best of 16 "
         "random actions; CEM's gap to a grid's best value < 0.02; without the second judge values are too high by 0.05 more",
         judges, seeds=(0,)),
]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(trial(**json.loads(sys.argv[1]))) + "\n")
