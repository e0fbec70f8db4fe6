"""Off-policy evaluation (issue 21): how often its intervals hold the truth.

CartPole's scripted expert, of whose actions a share is replaced by random ones: 60 % in the recording, 50 % in the policy that is
evaluated. Its true value is the mean discounted return of episodes of its own. A hundred times 200 episodes are drawn from a large
recording, with replacement; each time all three estimates are made, with their intervals of 95 %. Fitted Q has the nets and
updates of `shoal data evaluate`, and half as many resamples.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import numpy as np

from evidence.lines import Line, apart, shoal, side_by_side

__all__ = ["LINES"]

ENV, RECORDED, EVALUATED, GAMMA = "CartPole-v1", 0.6, 0.5, 0.99
POOL, TRUTH, EPISODES, DATASETS, WANTED = 2_000, 4_000, 200, 100, 85
EACH = 5  # datasets in one process


def record(folder: str, epsilon: float, episodes: int, seed: int) -> str:
    logs = f"{folder}/{epsilon:g}"
    done = shoal("data", "record", "scripted", ENV, "--epsilon", f"{epsilon:g}", "--episodes", str(episodes), "--num-envs", "64",
                 "--seed", str(seed), "--out", logs)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return logs


def coverage(seed: int) -> dict[str, Any]:
    from shoal import offline
    from shoal.offline.logged_steps import LoggedSteps

    with tempfile.TemporaryDirectory() as folder:
        pool, own = record(folder, RECORDED, POOL, seed), record(folder, EVALUATED, TRUTH, seed + 1)
        steps = LoggedSteps.of(offline.open_demos(own))
        truth = steps.returns(GAMMA)[np.cumsum(steps.lengths) - steps.lengths]
        parts = side_by_side(lambda first: apart("evidence.ope", pool=pool, first=first, seed=seed), range(0, DATASETS, EACH))
    each = [one for part in parts for one in part["each"]]
    value = float(truth.mean())
    held = {name: sum(one[name][1] <= value <= one[name][2] for one in each) for name in each[0] if name != "effective"}
    return {"met": min(held.values()) >= WANTED, "truth": value, "error of the truth": float(truth.std() / len(truth) ** 0.5),
            "held": held, "effective": float(np.mean([one["effective"] for one in each])), "each": each}


def some_datasets(pool: str, first: int, seed: int) -> list[dict[str, Any]]:
    """[value, low, high] of every estimate, for EACH of the datasets."""
    import torch

    from shoal import offline
    from shoal.envs.experts import balance
    from shoal.offline.fitted_q import FittedQPlan
    from shoal.offline.logged_steps import LoggedSteps, PolicyChoices
    from shoal.offline.policy_evaluation import evaluate_policy

    torch.set_num_threads(1)
    episodes, found = list(offline.open_demos(pool).episodes()), []
    for number in range(first, first + EACH):
        drawn = np.random.default_rng((seed, number)).integers(len(episodes), size=EPISODES)
        steps = LoggedSteps.of(Kept(offline.open_demos(pool).info, [episodes[k] for k in drawn]))
        best = np.array([balance(row) for row in steps.observation])
        likely = np.full((len(best), 2), EVALUATED / 2, np.float32)
        likely[np.arange(len(best)), best] += 1 - EVALUATED
        choices = PolicyChoices(likely, None, np.log(likely[steps.here, steps.action]))
        value = evaluate_policy(steps, choices, FittedQPlan(GAMMA, seed=number), bootstraps=10)
        found.append({"effective": value.effective, **{one.name: [one.value, one.low, one.high] for one in value.estimates}})
    return found


class Kept:
    """Some episodes of a recording as one."""

    def __init__(self, info: Any, episodes: list[Any]) -> None:
        self.info, self.kept = info, episodes

    def episodes(self, order: Any = None, checked: bool = True) -> Any:
        return iter(self.kept)


WORDS = f"CartPole-v1, {DATASETS} times {EPISODES} episodes of a policy with {RECORDED:.0%} random actions: the intervals of " \
        "fitted Q, importance sampling and doubly robust hold the true value of the one with " \
        f"{EVALUATED:.0%} at least {WANTED} times each"
LINES = [Line("ope-coverage", 21, WORDS, coverage, seeds=(2,))]  # seed 1: before importance sampling was corrected

if __name__ == "__main__":
    print(json.dumps({"each": some_datasets(**json.loads(sys.argv[1]))}))
