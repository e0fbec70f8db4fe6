"""Soft actor-critic: SAC with a learned temperature (Haarnoja et al. 2018, 1812.05905); with discrete actions Christodoulou 2019
(1910.07207).

    actors    a ~ pi(x)     ->  transitions
    learner   critics           (R + D (min_i Q_i'(x', a') - alpha log pi(a'|x')) - Q_i(x, a))^2,   a' ~ pi(x')
              actor             alpha log pi(b|x) - min_i Q_i(x, b),   b ~ pi(x) through which gradients flow
              temperature       alpha (entropy - target_entropy)

Box actions are tanh of a Gaussian, and log pi is a density in [-1, 1]^D whatever the bounds are. Over discrete actions the
expectations are exact: nothing is sampled in the learner.

Deliberate differences:

                     papers and their source               here
    temperature      one update with the actor's           the same; from the actor's own samples
    squared error    half of it                            all of it: Adam does not notice
    time limits      not the end                           bootstrapped from the true last observation too
    target entropy   0.98 log |A| (discrete)               the same with auto
    critics          min of two (discrete too)             the same
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
from torch import Tensor

from shoal.algorithms.common.metrics import ALPHA, ENTROPY, IMPORTANCE_MIN, Q_MEAN, TARGET_MEAN, TD_ERROR, phase_metrics
from shoal.algorithms.common.phases import Phase, TargetSchedule
from shoal.algorithms.off_policy.algorithm import OffPolicyActorCritic, bounded_box
from shoal.algorithms.off_policy.learn import ActorObjective, OffPolicyLearn, actor_phase, critic_phase
from shoal.algorithms.off_policy.nets import DiscreteSoftNet, SoftNet, Temperature
from shoal.algorithms.off_policy.off_policy_options import OffPolicyOptions
from shoal.algorithms.off_policy.policy import DiscretePolicy, SampledPolicy
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.ops import distributions as dist
from shoal.ops import off_policy
from shoal.ops.value import chosen
from shoal.options import flag, number

if TYPE_CHECKING:
    from shoal.algorithms.common.contrast import Contrast
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["SAC", "Config", "SoftObjective"]

DISCRETE_SHARE = 0.98  # of the largest entropy of discrete actions


@dataclass(frozen=True)
class Config(OffPolicyOptions):
    """Soft actor-critic."""

    alpha: float | Literal["auto"] = number("auto", at_least=0)
    """Temperature: what a nat of entropy is worth; auto learns it."""
    alpha_start: float = number(1.0, above=0)
    """Where a learned temperature begins."""
    alpha_lr: float = number(3e-4, above=0, live=True)
    """Learning rate of the temperature's logarithm."""
    target_entropy: float | Literal["auto"] = "auto"
    """Entropy in nats that a learned temperature keeps the policy at. auto: minus the number of dimensions of the action, whose
    bounds count as [-1, 1]; of n discrete actions 0.98 log n."""


class SAC(OffPolicyActorCritic):
    """See the module."""

    name, config_class, exploration = "sac", Config, 1.0
    metrics = (ALPHA, ENTROPY, TD_ERROR, Q_MEAN, TARGET_MEAN, IMPORTANCE_MIN, *phase_metrics(("critic", "actor", "temperature")))

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int, contrast: Contrast | None = None) -> None:
        space = spec.action_space
        self.space: Any = space if isinstance(space, gym.spaces.Discrete) else bounded_box(self.name, spec)
        self.actions = int(space.n) if isinstance(space, gym.spaces.Discrete) else 0
        super().__init__(config, spec, net, seats, contrast)
        self.target_entropy = target_entropy(config, self.space)

    def net(self, seed: int) -> SoftNet | DiscreteSoftNet:
        temperature = Temperature(self.config.alpha_start) if self.config.alpha == "auto" else None
        if self.actions:
            return DiscreteSoftNet(self.plan, self.actions, temperature, seed)
        return SoftNet(self.plan, self.space, temperature, seed)

    def policy(self) -> SampledPolicy | DiscretePolicy:
        model, actor, critic = self.acting_model()
        if self.actions:
            return DiscretePolicy(model, actor, critic, self.plan.mask_size > 0)
        return SampledPolicy(model, self.space, actor, critic)

    def phases(self) -> tuple[Phase, ...]:
        config = self.config
        phases = critic_phase(config, TargetSchedule(config.target_period_updates, config.target_tau)), actor_phase(config)
        if config.alpha != "auto":
            return phases
        return *phases, Phase("temperature", "adam", lambda: config.alpha_lr, epsilon=config.optimiser_epsilon)

    def learn(self, seed: int) -> OffPolicyLearn:
        config, model, target = self.config, self.model(seed), self.model(seed)
        make: Any = DiscreteSoftObjective if self.actions else SoftObjective
        return OffPolicyLearn(config, model, target, self.phases(), make(config, model.net, target.net), self.target_entropy,
                                self.plan.contrast)


def target_entropy(config: Config, space: gym.spaces.Box | gym.spaces.Discrete) -> float:
    """The number behind auto; numbers of which nothing good can come are refused."""
    given, name = config.target_entropy, flag("target_entropy", config.section)
    if isinstance(space, gym.spaces.Discrete):
        most = math.log(space.n)
        if given != "auto" and not 0 <= given < most:
            raise ConfigError(f"{name} {given:g} cannot be reached: the entropy of {space.n} discrete actions "
                              f"lies between 0 and log {space.n} = {most:.3g}; give a number between, or auto")
        return DISCRETE_SHARE * most if given == "auto" else given
    size = math.prod(space.shape)
    if given != "auto" and given > 0:
        raise ConfigError(f"{name} {given:g} has the wrong sign: of continuous actions it is a differential "
                          f"entropy, at most 0; give {-given:g}, or auto ({-size})")
    return float(-size if given == "auto" else given)


class Tempered:
    """The temperature of an objective, learned or fixed."""

    def __init__(self, config: Config, temperature: Temperature | None) -> None:
        self._fixed, self._temperature = config.alpha, temperature

    def alpha(self) -> Tensor | float:
        """Its gradient is another phase's business."""
        if self._temperature is not None:
            learned: Tensor = self._temperature().detach()
            return learned
        return float(self._fixed)

    def objective(self, loss: Tensor, entropy: Tensor, alpha: Tensor | float) -> ActorObjective:
        """With its metrics."""
        entropy = entropy.detach()
        return ActorObjective(loss, {"alpha": entropy.new_zeros(()) + alpha, "entropy": entropy.mean()}, entropy)


class SoftObjective(Tempered):
    """An OffPolicyObjective of Box actions."""

    def __init__(self, config: Config, net: SoftNet, target: SoftNet) -> None:
        super().__init__(config, net.temperature)
        self.policy, self.critic, self.target_critic = net.actor, net.critic, target.critic
        self.noises = net.actor.out.out_features  # of the next action, and of this one

    def taken(self, seen: Tree, items: Tree) -> Tensor:
        q: Tensor = self.critic(seen, items["action"])
        return q

    def bootstrap(self, following: Tree, lagging: Tree, items: Tree, noise: Tensor | None) -> Tensor:
        assert noise is not None
        action, log_prob = self.policy.sample(following, noise.chunk(2, 1)[0])
        return off_policy.soft_values(self.target_critic.of_unit(lagging, action), log_prob, self.alpha())

    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective:
        assert noise is not None
        alpha = self.alpha()
        action, log_prob = self.policy.sample(seen, noise.chunk(2, 1)[1])
        loss = off_policy.soft_policy_loss(self.critic.of_unit(seen, action), log_prob, alpha)
        return self.objective(loss, -log_prob, alpha)


class DiscreteSoftObjective(Tempered):
    """An OffPolicyObjective of discrete actions, some of which may be illegal."""

    noises = 0

    def __init__(self, config: Config, net: DiscreteSoftNet, target: DiscreteSoftNet) -> None:
        super().__init__(config, net.temperature)
        self.policy, self.critic, self.target_critic = net.actor, net.critic, target.critic

    def taken(self, seen: Tree, items: Tree) -> Tensor:
        q: Tensor = self.critic(seen)  # [count, B, A]
        return chosen(q, items["action"].expand(len(q), -1))

    def bootstrap(self, following: Tree, lagging: Tree, items: Tree, noise: Tensor | None) -> Tensor:
        log_probs = self._log_probs(following, items.get("next_action_mask"))
        return off_policy.expected_soft_values(self.target_critic(lagging), log_probs, self.alpha())

    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective:
        alpha = self.alpha()
        log_probs = self._log_probs(seen, items.get("action_mask"))
        loss = off_policy.expected_soft_policy_loss(self.critic(seen), log_probs, alpha)
        return self.objective(loss, -(log_probs.exp() * log_probs).sum(-1), alpha)

    def _log_probs(self, seen: Tree, mask: Tensor | None) -> Tensor:
        """[B, A]."""
        return dist.log_softmax(dist.mask_logits(self.policy(seen), mask))
