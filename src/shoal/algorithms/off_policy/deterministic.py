"""What ddpg and td3 share: a deterministic actor that explores by noise."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.algorithms.common.metrics import IMPORTANCE_MIN, Q_MEAN, TARGET_MEAN, TD_ERROR, phase_metrics
from shoal.algorithms.common.phases import Phase
from shoal.algorithms.off_policy.algorithm import OffPolicyActorCritic, bounded_box
from shoal.algorithms.off_policy.learn import OffPolicyLearn, OffPolicyObjective
from shoal.algorithms.off_policy.nets import DeterministicNet
from shoal.algorithms.off_policy.policy import NoisyPolicy, noise_named

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["DeterministicActorCritic"]


class DeterministicActorCritic(OffPolicyActorCritic):
    """A deterministic actor and `critics` critics. Box actions only."""

    critics: ClassVar[int]
    metrics = (TD_ERROR, Q_MEAN, TARGET_MEAN, IMPORTANCE_MIN, *phase_metrics(("critic", "actor")))

    def __init__(self, config: Any, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        self.box = bounded_box(self.name, spec)
        super().__init__(config, spec, net, seats)

    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Critics first: the actor is judged by what they have just learned."""

    @abstractmethod
    def objective(self, net: DeterministicNet, target: DeterministicNet) -> OffPolicyObjective: ...

    @property
    def exploration(self) -> float:
        return float(self.config.noise_std)

    def net(self, seed: int) -> DeterministicNet:
        return DeterministicNet(self.plan, self.box, self.critics, seed)

    def policy(self) -> NoisyPolicy:
        model, actor, critic = self.acting_model()
        return NoisyPolicy(model, self.box, actor, critic, noise_named(self.config.noise, self.config.noise_theta))

    def learn(self, seed: int) -> OffPolicyLearn:
        model, target = self.model(seed), self.model(seed)
        return OffPolicyLearn(self.config, model, target, self.phases(), self.objective(model.net, target.net))
