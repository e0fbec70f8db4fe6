"""Behaviour cloning: the recorded action becomes the likeliest one, whatever came of it.

    learner   policy    -log pi(a|x)            Box actions: of a Gaussian, or the squared distance of its mean

It is what every other way of learning from recordings has to beat, and the right one where all of them were made by an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import gymnasium as gym
from torch import Tensor

from shoal.algorithms.common.metrics import phase_metrics
from shoal.algorithms.off_policy.cloning import LOG_PROB, ClonedPolicy, CloningOptions, log_prob
from shoal.algorithms.off_policy.learn import ActorObjective, OffPolicyLearn, actor_phase
from shoal.algorithms.off_policy.nets import ClonedNet
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.nets import GaussianActor
from shoal.options import flag

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["BC", "Config"]


@dataclass(frozen=True)
class Config(CloningOptions):
    """Behaviour cloning."""

    loss: Literal["likelihood", "squared"] = "likelihood"
    """likelihood makes recorded actions likely; squared fits the mean of Box actions alone, as a deterministic policy."""


class BC(ClonedPolicy):
    """See the module."""

    name, config_class = "bc", Config
    metrics = (LOG_PROB, *phase_metrics(("actor",)))

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        super().__init__(config, spec, net, seats)
        if config.loss == "squared" and isinstance(self.space, gym.spaces.Discrete):
            raise ConfigError(f"{flag('loss', config.section)} squared does not fit {spec.name}: its actions are discrete, and "
                              "have no distances; use likelihood")

    def net(self, seed: int) -> ClonedNet:
        return ClonedNet(self.plan, self.space, seed)

    def learn(self, seed: int) -> OffPolicyLearn:
        model = self.model(seed)
        return OffPolicyLearn(self.config, model, None, [actor_phase(self.config)], CloningObjective(self.config, model.net))


class CloningObjective:
    """An off_policy.learn.Cloning."""

    noises = 0

    def __init__(self, config: Config, net: ClonedNet) -> None:
        self.config, self.policy = config, net.actor

    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective:
        found = log_prob(self.policy, seen, items)
        metrics = {"log_prob": found.detach().mean()}
        if self.config.loss == "likelihood":
            return ActorObjective(-found, metrics)
        assert isinstance(self.policy, GaussianActor)
        return ActorObjective((self.policy.unit(seen) - self.policy.recorded(items["action"])).square().mean(-1), metrics)
