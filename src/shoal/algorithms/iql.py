"""Implicit Q-learning: IQL (Kostrikov, Nair and Levine 2021, 2110.06169). No action is ever judged that the data do not show.

    learner   value     |tau - 1(u < 0)| u^2,   u = min_i Q_i'(x, a) - V(x)         an expectile of the data's own actions
              actor     -min(exp(beta A), limit) log pi(a|x),   A = min_i Q_i'(x, a) - V(x)
              critic    (R + D V(x') - Q_i(x, a))^2, then Q' moves

In this order, as in the authors' program: the policy and the critics see the new V. With tau near 1, V is what the best recorded
actions are worth; 0.5 values the data's own policy.

Deliberate differences:

                     paper and its source                      here
    actor's rate     cosine decay                              linear, to actor_lr_final
    rewards          scaled by returns, or shifted by -1       reward_scale, reward_shift
    dropout          0.1 in the kitchen                        none
    discrete         not there                                 a softmax policy; critics with a value of each action
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.algorithms.common.metrics import IMPORTANCE_MIN, Q_MEAN, TARGET_MEAN, TD_ERROR, phase_metrics
from shoal.algorithms.common.phases import Phase, TargetSchedule
from shoal.algorithms.off_policy.cloning import ADVANTAGE_MEAN, LOG_PROB, VALUE_MEAN, WEIGHT_MEAN, ClonedPolicy, log_prob
from shoal.algorithms.off_policy.learn import ActorObjective, OffPolicyLearn, actor_phase, critic_phase
from shoal.algorithms.off_policy.nets import ImplicitNet
from shoal.algorithms.off_policy.off_policy_options import OffPolicyOptions
from shoal.core import Tree
from shoal.nets import Critic
from shoal.ops.off_policy import clipped_double_q
from shoal.ops.offline import advantage_weights, expectile_loss
from shoal.ops.value import chosen
from shoal.options import number

__all__ = ["IQL", "Config"]


@dataclass(frozen=True)
class Config(OffPolicyOptions):
    """Implicit Q-learning."""

    expectile: float = number(0.7, above=0, below=1)
    """Tau: how optimistic V is about the data's actions. 0.9 where good actions are rare (AntMaze)."""
    beta: float = number(3.0, at_least=0)
    """Inverse temperature of the advantages in the policy's weights; 0 clones, 10 follows the best actions (AntMaze)."""
    weight_limit: float = number(100.0, above=0)
    """Largest weight."""
    value_lr: float = number(3e-4, above=0)
    """Learning rate of V."""
    actor_lr_final: float | None = number(None, at_least=0)
    """Learning rate of the actor at the end of the updates; none keeps it constant."""
    random_steps: int = number(0, at_least=0)
    """Environment steps at the beginning whose actions are uniformly random; online only."""


class IQL(ClonedPolicy):
    """See the module."""

    name, config_class = "iql", Config
    metrics = (VALUE_MEAN, ADVANTAGE_MEAN, WEIGHT_MEAN, LOG_PROB, TD_ERROR, Q_MEAN, TARGET_MEAN, IMPORTANCE_MIN,
               *phase_metrics(("value", "actor", "critic")))

    def net(self, seed: int) -> ImplicitNet:
        return ImplicitNet(self.plan, self.space, seed)

    def learn(self, seed: int) -> OffPolicyLearn:
        config, model, target = self.config, self.model(seed), self.model(seed)
        critic = critic_phase(config, TargetSchedule(config.target_period_updates, config.target_tau))
        phases = [Phase("value", "adam", lambda: config.value_lr, epsilon=config.optimiser_epsilon, grad_norm=config.grad_norm),
                  replace(actor_phase(config), lr_final=lambda: config.actor_lr_final), critic]
        return OffPolicyLearn(config, model, target, phases, ImplicitObjective(config, model.net, target.net))


class ImplicitObjective:
    """An off_policy.learn.OffPolicyObjective with a phase for V."""

    noises = 0

    def __init__(self, config: Config, net: ImplicitNet, target: ImplicitNet) -> None:
        self.config, self.policy, self.value = config, net.actor, net.value
        self.critic, self.target_critic = net.critic, target.critic

    def more(self, phase: str, seen: Tree, items: Tree) -> ActorObjective:
        """V, towards an expectile of the target critics' values."""
        value = self._values(seen)
        return ActorObjective(expectile_loss(self._judged(seen, items) - value, self.config.expectile),
                              {"value_mean": value.detach().mean()}, weighted=True)

    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective:
        found = log_prob(self.policy, seen, items)
        with torch.no_grad():
            advantage = self._judged(seen, items) - self._values(seen)
        weight = advantage_weights(advantage, self.config.beta, self.config.weight_limit)
        return ActorObjective(-weight * found, {"log_prob": found.detach().mean(), "advantage_mean": advantage.mean(),
                                                "weight_mean": weight.mean()})

    def taken(self, seen: Tree, items: Tree) -> Tensor:
        return _of_actions(self.critic, seen, items)

    def bootstrap(self, following: Tree, lagging: Tree, items: Tree, noise: Tensor | None) -> Tensor:
        return self._values(following)

    def _values(self, seen: Tree) -> Tensor:
        found: Tensor = self.value(seen)
        return found[0, :, 0]

    @torch.no_grad()
    def _judged(self, seen: Tree, items: Tree) -> Tensor:
        return clipped_double_q(_of_actions(self.target_critic, seen, items))


def _of_actions(critic: torch.nn.Module, seen: Tree, items: Tree) -> Tensor:
    """Q [2, B] of the recorded actions."""
    if isinstance(critic, Critic):
        judged: Tensor = critic(seen, items["action"])
        return judged
    q: Tensor = critic(seen)  # [2, B, A]
    return chosen(q, items["action"].expand(len(q), -1))
