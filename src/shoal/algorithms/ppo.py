"""PPO with a clipped objective (Schulman et al. 2017, 1707.06347).

    actors    T steps with the newest weights, log-probabilities kept
    learner   V with the same weights -> GAE, once per batch -> `epochs` times over the batch in `minibatches` parts,
              each a gradient of the clipped objective

Deliberate differences:

                       common practice (CleanRL)     here
    advantages         normalised per minibatch      normalised once over the whole batch of all learners
    values             sent with the data            recomputed by the learner: nothing to send, right after lag too
    observation stats  updated while acting          frozen while a batch is learned from: the first ratio is 1
    time limits        often treated as the end      bootstrapped from the true last observation, trace cut
    value clip         on                            off unless `value_clip` is set
    shuffling          steps                         steps; whole columns [T] of seats when the net is recurrent
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.algorithms.actor_critic.advantages import Advantages, estimate
from shoal.algorithms.actor_critic.algorithm import ActorCritic
from shoal.algorithms.actor_critic.learn import ActorCriticLearn
from shoal.algorithms.actor_critic.proximal import Proximal, ProximalConfig, RatioBounds
from shoal.algorithms.common.metrics import CLIP_FRACTION, POLICY_METRICS, phase_metrics
from shoal.learning import Tolerance
from shoal.options import number

if TYPE_CHECKING:
    from shoal.algorithms.actor_critic.unroll_batch import UnrollBatch

__all__ = ["PPO", "Config"]


@dataclass(frozen=True)
class Config(ProximalConfig):
    """Proximal policy optimisation."""

    unroll: int = number(128, at_least=1)


class PPO(ActorCritic[Config]):
    """See the module."""

    name, config_class, tolerates = "ppo", Config, Tolerance.BOUNDED_REUSE
    metrics = (*phase_metrics(("all",)), *POLICY_METRICS, CLIP_FRACTION)

    def objective(self, learn: ActorCriticLearn) -> PPOObjective:
        return PPOObjective(self.config, learn)


class PPOObjective(Proximal[Config]):
    """Several gradients per batch."""

    def advantages(self, batch: UnrollBatch) -> Advantages:
        model = self.learn.model
        return estimate(model, batch, model.unroll(batch), self.config)

    def bounds(self, clip: float) -> RatioBounds:
        return RatioBounds(1 - clip, 1 + clip)
