"""TD3 with behaviour cloning: TD3+BC (Fujimoto and Gu 2021, 2106.06860).

    learner   critics     as in td3
              scale       c = mean |Q_1(x, mu(x))| of the batch, all learners' together
              actor       -(alpha / c) Q_1(x, mu(x)) + |mu(x) - a|^2 / D

The second term keeps the actor near the recorded actions; alpha says how much better a value must promise to be. Observations are
normalised by the statistics of the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.algorithms import td3
from shoal.algorithms.common.metrics import IMPORTANCE_MIN, Q_MEAN, TARGET_MEAN, TD_ERROR, phase_metrics
from shoal.algorithms.common.phases import Phase
from shoal.algorithms.off_policy.deterministic import DeterministicActorCritic
from shoal.algorithms.off_policy.learn import ActorObjective
from shoal.algorithms.off_policy.nets import DeterministicNet
from shoal.core import Tree
from shoal.nets.continuous import bounded_range
from shoal.nets.heads import ActionRange
from shoal.options import number
from shoal.telemetry.metrics import Metric

__all__ = ["TD3BC", "Config"]

SMALLEST = 1e-8  # of the scale: critics may begin at 0
DISTANCE = Metric("cloning_error", "gauge", "", "Mean squared distance of the policy's actions from the recorded ones, in [-1, 1].")


@dataclass(frozen=True)
class Config(td3.Config):
    """TD3 with behaviour cloning."""

    alpha: float = number(2.5, at_least=0)
    """How much values count, once their mean size is 1, against the distance from recorded actions; 0 only clones."""
    cloning: float = number(1.0, at_least=0)
    """Weight of that distance; 0 is td3."""
    random_steps: int = number(0, at_least=0)
    """Environment steps at the beginning whose actions are uniformly random; online only."""


class TD3BC(DeterministicActorCritic):
    """See the module."""

    name, config_class, critics = "td3_bc", Config, 2
    metrics = (DISTANCE, TD_ERROR, Q_MEAN, TARGET_MEAN, IMPORTANCE_MIN, *phase_metrics(("critic", "scale", "actor")))

    def net(self, seed: int) -> DeterministicNet:
        return DeterministicNet(self.plan, self.box, self.critics, seed, scaled=self.config.cloning > 0)

    def phases(self) -> tuple[Phase, ...]:
        critic, actor = td3.twin_phases(self.config)
        if not self.config.cloning:
            return critic, actor
        return critic, Phase("scale", "sgd", 1.0, period_updates=actor.period_updates), actor

    def objective(self, net: DeterministicNet, target: DeterministicNet) -> td3.TwinObjective | CloningTwinObjective:
        twin = td3.TwinObjective(self.config, net, target)
        return CloningTwinObjective(self.config, twin, net, bounded_range(self.box)) if self.config.cloning else twin


class CloningTwinObjective:
    """An off_policy.learn.OffPolicyObjective: that of td3, with an actor near the data and a phase for the scale of its values."""

    def __init__(self, config: Config, twin: td3.TwinObjective, net: DeterministicNet, range_: ActionRange) -> None:
        assert net.scale is not None
        self.config, self.twin, self.noises, self.scale, self._range = config, twin, twin.noises, net.scale, range_

    def taken(self, seen: Tree, items: Tree) -> Tensor:
        return self.twin.taken(seen, items)

    def bootstrap(self, following: Tree, lagging: Tree, items: Tree, noise: Tensor | None) -> Tensor:
        return self.twin.bootstrap(following, lagging, items, noise)

    def more(self, phase: str, seen: Tree, items: Tree) -> ActorObjective:
        """The scale, of the critic that the actor is about to climb."""
        with torch.no_grad():
            climbed = self.twin.actor(seen, items, None).loss
        return ActorObjective(self.scale.loss(climbed.abs()))

    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective:
        unit = self.twin.policy.unit(seen)
        distance = (unit - self._range.unit(items["action"].flatten(1))).square().mean(-1)
        weight = self.config.alpha / self.scale().clamp(min=SMALLEST)
        loss = self.config.cloning * distance - weight * self.twin.critic.of_unit(seen, unit)[0]
        return ActorObjective(loss, {"cloning_error": distance.detach().mean()})
