"""Reuse and staleness slow learning (OpenAI Five, specs/policy.md 7d): optimiser steps to a threshold, inline and deterministic.

The machinery is rapid_ppo's: PPO, actor_learner with a buffer of recent unrolls. An update takes the same number of unrolls
in all runs; what differs is how many new ones come in for it (reuse), or how long they are kept back (delay).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evidence.lines import Line
from shoal.algorithms import ppo
from shoal.nets import NetConfig
from shoal.roles.episodes import EpisodePlay
from shoal.roles.learner import Learner
from shoal.roles.parts import EvalPlan
from tests.architectures.graphs import Weights, draw, go

__all__ = ["LINES", "steps_to_threshold"]

SEATS, BATCH_SLOTS, BUFFER_SLOTS = 4, 4, 16  # 16 rows of 9 steps in a batch, out of 64
GOAL, EPISODES, EVERY, MOST = 0.8, 400, 10, 6000
ALGORITHM = ppo.Config(unroll=9, epochs=1, minibatches=1, lr=3e-3, entropy=0.01)
NET = NetConfig(hidden=(64,))
REUSES, DELAYS = (1.0, 2.0, 4.0, 8.0), (0, 32, 128, 256)


class Quiet(Weights):
    """Looks at nothing while the program runs: the learner itself ends it."""

    def tick(self, control: Any) -> None:
        pass


class StoppingLearner(Learner):
    """Looks every few optimiser steps whether what it has learned is good enough; stops then."""

    def __init__(self, me: Any, parts: Any, **arguments: Any) -> None:
        super().__init__(me, parts, **arguments)
        self.policy, self.record = parts.algorithm.policy(), parts.algorithm.record
        self.env = parts.env.make(100)
        self.dice = me.rng("examination")

    async def step(self) -> None:
        await super().step()
        steps = int(self.counts[1])
        if steps % EVERY == 0 and steps and (self.examine() >= GOAL or steps >= MOST):
            self.me.finish("reached" if steps < MOST else "given up")

    def examine(self) -> float:
        self.policy.load(self.learn.published(self.learner_state.progress))
        rng = torch.Generator().manual_seed(int(self.dice.integers(2**31)))
        explore = np.zeros(self.env.num_seats, np.float32)  # as in training: drawn from the policy
        play = EpisodePlay(self.policy, self.record, self.env, EPISODES, int(self.dice.integers(2**31)), rng, explore)
        return float(play.to_the_end().returns.mean())


def steps_to_threshold(seed: int, reuse: float = 1.0, delay: int = 0) -> dict[str, Any]:
    program, _ = draw(ALGORITHM, "actor_learner", "shoal/Catch-v0", seed=seed, net=NET, eval=EvalPlan(enabled=False),
                      envs_per_actor=SEATS, batch_slots=BATCH_SLOTS, buffer_slots=BUFFER_SLOTS, slots_per_actor=1, reuse=reuse,
                      delay_slots=delay, max_staleness=10**6)
    program.nodes["learner"].role = StoppingLearner
    with tempfile.TemporaryDirectory() as folder:
        done = go(program, "inline", Path(folder), Quiet())
    learner = done.final["learner-0"]
    taken = done.wires["unrolls"]["consumed"] * ALGORITHM.unroll * SEATS
    return {"reached": done.reason == "reached", "optimiser_steps": int(learner["learner_steps"]),
            "reuse_measured": round(learner["samples_consumed"] / taken, 3),
            "staleness": round(learner["policy_lag/sum"] / learner["policy_lag/count"], 2)}


def grows(name: str, words: str, key: str, values: tuple[float, ...], seeds: int = 5) -> Line:
    """Some seeds of every value; the medians must grow from each value to the next. A run is one `seed`: all of them."""

    def run(_: int) -> dict[str, Any]:
        runs = {f"{value:g}": [{"seed": seed, **steps_to_threshold(seed, **{key: value})} for seed in range(seeds)]
                for value in values}
        steps = {value: [one["optimiser_steps"] for one in some] for value, some in runs.items()}
        medians = {value: statistics.median(some) for value, some in steps.items()}
        ranges = {value: [min(some), max(some)] for value, some in steps.items()}
        staleness = {value: round(statistics.median(one["staleness"] for one in some), 2) for value, some in runs.items()}
        met = all(a < b for a, b in itertools.pairwise(medians.values()))
        return {"met": met, "median_optimiser_steps": medians, "range": ranges, "median_staleness": staleness, "each": runs}

    return Line(f"mechanism-{name}", 5, words, run, seeds=(0,))


LINES = [
    grows("reuse", f"Catch: median optimiser steps to {GOAL} over 5 seeds grow strictly with reuse {REUSES}", "reuse", REUSES),
    # Five seeds did not tell 1 from 2 (see that line's result, not met); this one has the same settings and seeds, and 15 more.
    grows("reuse-20-seeds", f"as mechanism-reuse, which five seeds did not settle, with 20: medians grow with reuse {REUSES}",
          "reuse", REUSES, seeds=20),
    grows("staleness", f"Catch: median optimiser steps to {GOAL} over 5 seeds grow strictly with the delay {DELAYS} (unrolls)",
          "delay", DELAYS),
]
