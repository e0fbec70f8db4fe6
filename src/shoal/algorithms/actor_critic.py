"""What a2c, ppo, appo and vtrace are to the rest of shoal; each adds its Config and its objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.algorithms.blueprint import Blueprint
from shoal.algorithms.learner import Descent, Learner, Objective
from shoal.core import Progress, Tolerance
from shoal.slots import Layout

if TYPE_CHECKING:
    from shoal.algorithms.policy import ActorCriticPolicy
    from shoal.algorithms.records import Unroll
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["ActorCritic"]


class ActorCritic(ABC):
    """Unrolls in, a policy and values out."""

    name: str
    tolerates: Tolerance
    runs_on_gpu = True

    def __init__(self, config: Any, spec: EnvSpec, net: NetConfig, seats: int, mix: float = 0.0) -> None:
        """`mix` is the share of uniformly random actions."""
        config.validate()
        self.config, self.mix = config, mix
        self.plan = Blueprint.of(self.name, config, spec, net, seats, mix)

    @abstractmethod
    def objective(self, learner: Learner) -> Objective:
        """What is descended."""

    @property
    def record(self) -> Unroll:
        return self.plan.record

    def policy(self) -> ActorCriticPolicy:
        return self.plan.policy()

    def learn(self, seed: int) -> Descent:
        learner = Learner.of(self.config, self.plan, seed)
        return Descent(self.config, learner, self.objective(learner))

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        return np.full(seats, self.mix, np.float32)

    def published_layout(self) -> Layout:
        return self.plan.published_layout()
