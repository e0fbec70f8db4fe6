"""Twin delayed deterministic policy gradients: TD3 (Fujimoto et al. 2018, 1802.09477).

    actors    mu(x) + Gaussian noise   ->  transitions
    learner   critics                      (R + D min_i Q_i'(x', a') - Q_i(x, a))^2,   a' = mu'(x') + clipped noise
              actor                        -Q_1(x, mu(x)), and all target nets, every policy_delay updates

Deliberate differences:

                     paper and its source                   here
    nets             400-300 (paper), 256-256 (source)      net.hidden
    time limits      not the end                            bootstrapped from the true last observation too
    random steps     1,000 to 25,000                        algorithm.random_steps
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.algorithms.common.phases import Phase, TargetSchedule
from shoal.algorithms.off_policy.deterministic import DeterministicActorCritic
from shoal.algorithms.off_policy.learn import ActorObjective, actor_phase, critic_phase
from shoal.algorithms.off_policy.nets import DeterministicNet
from shoal.algorithms.off_policy.off_policy_options import NoiseOptions
from shoal.core import Tree
from shoal.ops.off_policy import clipped_double_q, smoothed_action
from shoal.options import number

__all__ = ["TD3", "Config", "TwinObjective", "twin_phases"]


@dataclass(frozen=True)
class Config(NoiseOptions):
    """Twin delayed deterministic policy gradient."""

    policy_delay: int = number(2, at_least=1)
    """Critic updates per actor update; the target nets move with the actor."""
    target_noise: float = number(0.2, at_least=0)
    """Deviation of the noise on target actions, which lie in [-1, 1]."""
    target_noise_limit: float = number(0.5, at_least=0)
    """Largest size of that noise."""


class TD3(DeterministicActorCritic):
    """See the module."""

    name, config_class, critics = "td3", Config, 2

    def phases(self) -> tuple[Phase, ...]:
        return twin_phases(self.config)

    def objective(self, net: DeterministicNet, target: DeterministicNet) -> TwinObjective:
        return TwinObjective(self.config, net, target)


def twin_phases(config: Config) -> tuple[Phase, Phase]:
    """Critics, and the delayed actor."""
    delay = config.policy_delay
    with_actor = TargetSchedule(delay * config.target_period_updates, config.target_tau)  # counted in updates of the critics
    follows = TargetSchedule(config.target_period_updates, config.target_tau)
    return critic_phase(config, with_actor), actor_phase(config, target=follows, period_updates=delay)


class TwinObjective:
    """An OffPolicyObjective of two critics: targets are the smaller value, and the actor climbs the first."""

    def __init__(self, config: Config, net: DeterministicNet, target: DeterministicNet) -> None:
        self.config = config
        self.policy, self.critic, self.target_actor, self.target_critic = net.actor, net.critic, target.actor, target.critic
        self.noises = net.actor.out.out_features  # one for each dimension of an action

    def taken(self, seen: Tree, items: Tree) -> Tensor:
        q: Tensor = self.critic(seen, items["action"])
        return q

    def bootstrap(self, following: Tree, lagging: Tree, items: Tree, noise: Tensor | None) -> Tensor:
        assert noise is not None
        action = self.target_actor.unit(lagging)
        action = smoothed_action(action, noise, self.config.target_noise, self.config.target_noise_limit)
        return clipped_double_q(self.target_critic.of_unit(lagging, action))

    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective:
        return ActorObjective(-self.critic.of_unit(seen, self.policy.unit(seen))[0])
