"""Deep deterministic policy gradients: DDPG (Lillicrap et al. 2016, 1509.02971); with n-step returns, prioritised replay and many
actors Ape-X DPG (Horgan et al. 2018, 1803.00933).

    actors    mu(x) + noise         ->  n-step transitions, with an initial priority from the critic where actors have it
    learner   critic                    (R + D Q'(x', mu'(x')) - Q(x, a))^2, with importance weights  ->  new priorities
              actor                     -Q(x, mu(x))

                 n_step  noise     targets                    priorities          actor's gradient
    DDPG         1       ou        0.001 of the way           none                as it is
    Ape-X DPG    5       gaussian  copied every 100 updates   of the actors       each element clipped to [-1, 1]

Deliberate differences:

                     papers                                here
    nets             400-300, batch norm; action enters    net.hidden; the action enters at the first layer
                     at the second layer (DDPG)
    weight decay     0.01 for the critic (DDPG)            none
    time limits      treated as the end                    bootstrapped from the true last observation
    squared error    half of it (Ape-X)                    all of it: Adam does not notice
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
from shoal.options import number

__all__ = ["DDPG", "Config"]


@dataclass(frozen=True)
class Config(NoiseOptions):
    """Deep deterministic policy gradient."""

    actor_grad_limit: float = number(0.0, at_least=0)
    """Largest size of any element of the actor's gradient (Ape-X DPG: 1); 0 does not clip."""


class DDPG(DeterministicActorCritic):
    """See the module."""

    name, config_class, critics = "ddpg", Config, 1

    def phases(self) -> tuple[Phase, ...]:
        config = self.config
        follows = TargetSchedule(config.target_period_updates, config.target_tau)
        return critic_phase(config, follows), actor_phase(config, target=follows, grad_limit=config.actor_grad_limit)

    def objective(self, net: DeterministicNet, target: DeterministicNet) -> SingleObjective:
        return SingleObjective(net, target)


class SingleObjective:
    """An OffPolicyObjective of one critic."""

    noises = 0

    def __init__(self, net: DeterministicNet, target: DeterministicNet) -> None:
        self.policy, self.critic, self.target_actor, self.target_critic = net.actor, net.critic, target.actor, target.critic

    def taken(self, seen: Tree, items: Tree) -> Tensor:
        q: Tensor = self.critic(seen, items["action"])
        return q

    def bootstrap(self, following: Tree, lagging: Tree, items: Tree, noise: Tensor | None) -> Tensor:
        return self.target_critic.of_unit(lagging, self.target_actor.unit(lagging))[0]

    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective:
        return ActorObjective(-self.critic.of_unit(seen, self.policy.unit(seen))[0])
