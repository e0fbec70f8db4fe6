"""What bc, marwil and iql share: a policy that makes recorded actions likely, each as much as it is worth.

Box actions have a Gaussian (nets.GaussianActor), discrete ones a softmax. Evaluations take the mean, or the likeliest action;
actors, where there are some, take samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from torch import Tensor

from shoal.algorithms.off_policy.algorithm import OffPolicyActorCritic, bounded_box
from shoal.algorithms.off_policy.policy import DiscretePolicy, SampledPolicy
from shoal.core import Tree
from shoal.nets import GaussianActor, PolicyNetwork
from shoal.ops import distributions as dist
from shoal.options import Options, number
from shoal.telemetry.metrics import Metric

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["ADVANTAGE_MEAN", "LOG_PROB", "VALUE_MEAN", "WEIGHT_MEAN", "ClonedPolicy", "CloningOptions", "log_prob"]

LOG_PROB = Metric("log_prob", "gauge", "nats", "Mean log-probability of the recorded actions in the last batch.")
VALUE_MEAN = Metric("value_mean", "gauge", "reward", "Mean of V(s) in the last batch.")
ADVANTAGE_MEAN = Metric("advantage_mean", "gauge", "reward", "Mean advantage of the recorded actions in the last batch.")
WEIGHT_MEAN = Metric("weight_mean", "gauge", "ratio", "Mean weight of the recorded actions in the policy's loss.")


@dataclass(frozen=True)
class CloningOptions(Options):
    """A policy of recorded actions without critics."""

    section = "algorithm"
    n_step, gamma, reward_scale, reward_shift = 1, 0.99, 1.0, 0.0
    importance, importance_final, actor_priorities, random_steps = 0.0, None, False, 0

    actor_lr: float = number(3e-4, above=0)
    """Learning rate of the policy."""
    optimiser_epsilon: float = number(1e-8, above=0)
    """Epsilon of Adam."""
    grad_norm: float = number(0.0, at_least=0)
    """Largest norm of a gradient; larger ones are scaled down. 0 does not clip."""
    normalise_observations: bool = False
    """Scale floating-point observations by the mean and deviation of those in the data; pixels are scaled anyway."""


class ClonedPolicy(OffPolicyActorCritic):
    """A policy of recorded actions, Discrete or in a bounded Box."""

    exploration = 1.0

    def __init__(self, config: Any, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        space = spec.action_space
        self.space: Any = space if isinstance(space, gym.spaces.Discrete) else bounded_box(self.name, spec)
        super().__init__(config, spec, net, seats)

    def policy(self) -> SampledPolicy | DiscretePolicy:
        model, actor, critic = self.acting_model()
        if isinstance(self.space, gym.spaces.Discrete):
            return DiscretePolicy(model, actor, critic, self.plan.mask_size > 0)
        return SampledPolicy(model, self.space, actor, critic)


def log_prob(actor: GaussianActor | PolicyNetwork, seen: Tree, items: Tree) -> Tensor:
    """Of the recorded actions [B]."""
    if isinstance(actor, GaussianActor):
        return actor.log_prob(seen, items["action"])
    return dist.categorical_log_prob(dist.mask_logits(actor(seen), items.get("action_mask")), items["action"])
