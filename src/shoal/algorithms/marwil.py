"""Monotonic advantage re-weighted imitation learning: MARWIL (Wang et al. 2018, NeurIPS).

    learner   scale     c^2, a running mean of A^2
              actor     -min(exp(beta A / c), limit) log pi(a|x),   A = R - V(x)
              value     (R - V(x))^2 / 2

R is the return of the recorded episode from there on: it needs no bootstrap but where the episode was truncated, or is longer than
`n_step`. Actions that came out better than expected are cloned more than others. With beta 0 it is bc, bit for bit.

Deliberate differences:

                     paper                           here
    return           lambda-returns or full ones     full ones, up to n_step rewards
    advantage        normalised by a running norm    the same: a parameter that follows the mean square, shared by all learners
    weights          not limited                     at most weight_limit
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.algorithms.common.metrics import phase_metrics
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.phases import Phase
from shoal.algorithms.off_policy.cloning import (
    ADVANTAGE_MEAN,
    LOG_PROB,
    VALUE_MEAN,
    WEIGHT_MEAN,
    ClonedPolicy,
    CloningOptions,
    log_prob,
)
from shoal.algorithms.off_policy.learn import ActorObjective, OffPolicyLearn, actor_phase
from shoal.algorithms.off_policy.nets import ClonedNet
from shoal.core import Tree
from shoal.ops.offline import advantage_weights
from shoal.options import number

__all__ = ["MARWIL", "Config"]

SMALLEST = 1e-8  # of the mean square: advantages may be 0 everywhere


@dataclass(frozen=True)
class Config(CloningOptions):
    """Monotonic advantage re-weighted imitation learning."""

    beta: float = number(1.0, at_least=0)
    """How much better actions count; 0 clones all alike."""
    weight_limit: float = number(100.0, above=0)
    """Largest weight of an action."""
    gamma: float = number(0.99, at_least=0, at_most=1)
    """Discount."""
    n_step: int = number(1_000, at_least=1, at_most=100_000)
    """Rewards in a return before it bootstraps."""
    reward_scale: float = number(1.0, above=0)
    """What rewards are multiplied by before anything is learned from them; evaluations see them as they are."""
    reward_shift: float = number(0.0)
    """Added to rewards after that."""
    value_lr: float = number(3e-4, above=0)
    """Learning rate of V."""
    scale_rate: float = number(1e-2, above=0, at_most=1)
    """Share of the way that the mean square of advantages moves towards that of a batch."""


class MARWIL(ClonedPolicy):
    """See the module."""

    name, config_class = "marwil", Config
    metrics = (ADVANTAGE_MEAN, WEIGHT_MEAN, LOG_PROB, VALUE_MEAN, *phase_metrics(("scale", "actor", "value")))

    def net(self, seed: int) -> ClonedNet:
        return ClonedNet(self.plan, self.space, seed, values=True)

    def learn(self, seed: int) -> OffPolicyLearn:
        config, model = self.config, self.model(seed)
        value = Phase("value", "adam", lambda: config.value_lr, epsilon=config.optimiser_epsilon, grad_norm=config.grad_norm)
        phases = [Phase("scale", "sgd", lambda: config.scale_rate), actor_phase(config), value]
        return OffPolicyLearn(config, model, None, phases, WeightedObjective(config, model))


class WeightedObjective:
    """An off_policy.learn.Cloning with phases for V and for the size of advantages."""

    noises = 0

    def __init__(self, config: Config, model: Model[Any]) -> None:
        self.config, self.model, self.net = config, model, model.net

    def more(self, phase: str, seen: Tree, items: Tree) -> ActorObjective:
        if phase == "scale":
            found: Tensor = self.net.scale.loss(self._advantage(seen, items).square())
            return ActorObjective(found)
        value = self._values(seen)
        return ActorObjective(0.5 * (self._returns(items) - value).square(), {"value_mean": value.detach().mean()}, weighted=True)

    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective:
        found, advantage = log_prob(self.net.actor, seen, items), self._advantage(seen, items)
        size = self.net.scale().clamp(min=SMALLEST).sqrt()
        weight = advantage_weights(advantage / size, self.config.beta, self.config.weight_limit)
        return ActorObjective(-found * weight, {"log_prob": found.detach().mean(), "advantage_mean": advantage.mean(),
                                                "weight_mean": weight.mean()})

    @torch.no_grad()
    def _advantage(self, seen: Tree, items: Tree) -> Tensor:
        return self._returns(items) - self._values(seen)

    @torch.no_grad()
    def _returns(self, items: Tree) -> Tensor:
        found: Tensor = items["reward"] + items["discount"] * self._values(self.model.see(items["next_observation"]))
        return found

    def _values(self, seen: Tree) -> Tensor:
        found: Tensor = self.net.value(seen)
        return found[0, :, 0]
