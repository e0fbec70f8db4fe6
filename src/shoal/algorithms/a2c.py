"""Advantage actor-critic (Mnih et al. 2016, 1602.01783), in its synchronous form.

    actors    T steps with the newest weights
    learner   V and pi on the batch -> GAE -> one gradient of  -A log pi + c_v (G - V)^2 / 2 - c_e H

                 A3C                                  here
    returns      n-step to the end of the unroll      GAE; lambda_ = 1 gives the n-step returns
    optimiser    RMSProp shared by the workers        Adam or RMSProp (epsilon inside the root, as in the paper)
    value loss   (R - V)^2                            half of it
    time limits  treated as the end                   bootstrapped from the true last observation, trace cut

It is PPO with one epoch and one minibatch, where the ratio is 1 (a test says so), and costs one forward pass less. It
does not correct for lag: for asynchronous actors, vtrace is the algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.actor_critic.advantages import estimate
from shoal.algorithms.actor_critic.algorithm import ActorCritic, ActorCriticConfig
from shoal.algorithms.actor_critic.learn import ActorCriticLearn, Totals
from shoal.algorithms.common.learn import Loss
from shoal.algorithms.common.metrics import POLICY_METRICS, phase_metrics
from shoal.algorithms.common.optimiser import annealed
from shoal.core import Tree
from shoal.learning import Tolerance
from shoal.ops import losses
from shoal.options import number

if TYPE_CHECKING:
    from shoal.algorithms.actor_critic.unroll_batch import UnrollBatch

__all__ = ["A2C", "Config"]


@dataclass(frozen=True)
class Config(ActorCriticConfig):
    """Advantage actor-critic."""

    lambda_: float = number(0.95, at_least=0, at_most=1)
    """Decay of the traces in the advantages (GAE); 1 gives n-step returns."""
    normalise_advantage: bool = False
    """Give the advantages of a batch (of all learners together) mean 0 and deviation 1."""


class A2C(ActorCritic[Config]):
    """See the module."""

    name, config_class, tolerates = "a2c", Config, Tolerance.LAG
    metrics = (*phase_metrics(("all",)), *POLICY_METRICS)

    def objective(self, learn: ActorCriticLearn) -> A2CObjective:
        return A2CObjective(self.config, learn)


@dataclass
class A2CMinibatch:
    """A batch and what is true while it is learned from."""

    batch: UnrollBatch
    totals: Totals
    entropy: float


class A2CObjective:
    """One gradient per batch."""

    captures = False

    def __init__(self, config: Config, learn: ActorCriticLearn) -> None:
        self.config, self.learn = config, learn

    def sums(self, batch: Tree) -> Any:
        if not self.config.normalise_advantage:
            return self.learn.shared(batch, (0.0, 0.0))
        tensors = self.learn.batch(batch)
        with torch.no_grad():
            output = self.learn.model.unroll(tensors)
        advantages = estimate(self.learn.model, tensors, output, self.config)
        return self.learn.shared(batch, advantages.sums(tensors.valid))

    def minibatches(
        self, batch: Tree, sums: Any, progress: Progress, rng: np.random.Generator
    ) -> Iterator[A2CMinibatch]:
        entropy = annealed(progress, self.config.entropy, self.config.entropy_final)
        yield A2CMinibatch(self.learn.batch(batch), self.learn.totals(sums, extra=2), entropy)

    def loss(self, minibatch: A2CMinibatch) -> Loss:
        config, batch, model = self.config, minibatch.batch, self.learn.model
        output = model.unroll(batch)  # T + 1 rows: the last one only for its value
        log_prob, entropy = model.judge(output, batch)
        advantages = estimate(model, batch, output, config)
        if config.normalise_advantage:
            advantages = advantages.normalised(minibatch.totals)
        valid, weight = batch.valid, minibatch.totals.weight()
        policy_loss = losses.masked_sum(losses.policy_gradient_loss(log_prob, advantages.advantage), valid) * weight
        value_loss = losses.masked_sum(losses.value_loss(output.value[:-1], advantages.target), valid) * weight
        bonus = losses.masked_sum(entropy, valid) * weight
        loss = policy_loss + config.value_weight * value_loss - minibatch.entropy * bonus
        return Loss(
            loss,
            {
                "policy_loss": policy_loss,
                "value_loss": value_loss,
                "entropy": losses.masked_mean(entropy.detach(), valid),
                "approx_kl": losses.masked_mean(losses.approx_kl(log_prob.detach(), batch.log_prob), valid),
                "mean_rho": losses.masked_mean((log_prob.detach() - batch.log_prob).exp(), valid),
                "explained_variance": losses.explained_variance(advantages.value, advantages.target, valid),
            },
        )
