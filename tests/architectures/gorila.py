"""Bundles of GORILA that go wrong: a learner that never hears of newer parameters, rewards that are sometimes absurd."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.core import Me
from shoal.roles.gradient_learner import GradientLearner
from shoal.roles.parts import EnvSource

__all__ = ["Poisoned", "with_laggard"]


def with_laggard(index: int) -> Any:
    """A role for the learners of which the `index`-th keeps the parameters that it began with, and says so."""

    def made(me: Me, **arguments: Any) -> GradientLearner:
        """Computes gradients, with very old parameters if it is the laggard."""
        learner = GradientLearner(me, **arguments)
        if me.index == index:
            freeze(learner)
        return learner

    return made


def freeze(learner: GradientLearner) -> None:
    link, begin = learner.link, learner.link.begin

    async def once() -> None:
        await begin()
        link._take = lambda weights, where: None  # type: ignore[method-assign]
        link.version = 0

    link.begin = once  # type: ignore[method-assign]


@dataclass(frozen=True)
class Poisoned(EnvSource):
    """After `begin` steps of its environments, rewards of the `victim`-th actor are `size` with a probability of `share`."""

    victim: int = 0
    begin: int = 0
    share: float = 1e-3
    size: float = 1e4
    marked: bool = False

    def of(self, index: int) -> EnvSource:
        return replace(self, marked=index == self.victim)

    def make(self, num_envs: int) -> Any:
        env = super().make(num_envs)
        if not self.marked:
            return env
        step, dice, steps = env.step, np.random.default_rng(num_envs), 0

        def spoiled(action: Any) -> Any:
            nonlocal steps
            now, steps = step(action), steps + 1
            if steps <= self.begin:
                return now
            wrong = dice.random(len(now.reward)) < self.share
            return replace(now, reward=np.where(wrong, np.float32(self.size), now.reward))

        env.step = spoiled  # type: ignore[method-assign]
        return env
