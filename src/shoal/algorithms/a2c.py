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
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.algorithms.actor_critic import ActorCritic
from shoal.algorithms.advantages import estimate
from shoal.algorithms.blueprint import check_numbers
from shoal.algorithms.learner import Learner, Totals
from shoal.algorithms.training import OptimiserName, annealed
from shoal.core import Progress, Tolerance, Tree
from shoal.ops import losses

if TYPE_CHECKING:
    from shoal.algorithms.batch import Batch

__all__ = ["A2C", "Config"]


@dataclass(frozen=True)
class Config:
    """Advantage actor-critic."""

    unroll: int = 16
    """Steps in an unroll, T."""
    gamma: float = 0.99
    """Discount."""
    lambda_: float = 0.95
    """Decay of the traces in the advantages (GAE); 1 gives n-step returns."""
    lr: float = 1e-3
    """Learning rate."""
    lr_final: float | None = None
    """Learning rate at the end of the env_steps budget; none keeps it constant."""
    optimiser: OptimiserName = "adam"
    """adam, rmsprop (epsilon inside the root) or sgd."""
    optimiser_epsilon: float = 1e-5
    """Epsilon of adam and rmsprop."""
    grad_norm: float = 0.5
    """Longest gradient; longer ones are scaled down. 0 does not clip."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    entropy: float = 0.01
    """Weight of the entropy bonus."""
    entropy_final: float | None = None
    """Entropy weight at the end of the env_steps budget; none keeps it constant."""
    normalise_advantage: bool = False
    """Give the advantages of a batch (of all learners together) mean 0 and deviation 1."""
    normalise_observations: bool = False
    """Scale floating-point observations by their running mean and deviation; pixels are scaled anyway."""
    normalise_returns: bool = False
    """Scale rewards by the running deviation of the discounted return."""
    final_rows: int = 0
    """Final observations of truncated episodes that one slot can hold; 0 works it out."""

    def validate(self) -> None:
        check_numbers(
            self,
            positive=("unroll", "lr", "optimiser_epsilon"),
            shares=("gamma", "lambda_"),
            not_negative=("value_weight", "entropy", "grad_norm", "final_rows", "lr_final", "entropy_final"),
        )


class A2C(ActorCritic):
    """See the module."""

    name = "a2c"
    tolerates = Tolerance.LAG

    def objective(self, learner: Learner) -> A2CObjective:
        return A2CObjective(self.config, learner)


@dataclass
class Update:
    """A batch and what is true while it is learned from."""

    batch: Batch
    totals: Totals
    entropy: float


class A2CObjective:
    """One gradient per batch."""

    def __init__(self, config: Config, learner: Learner) -> None:
        self.config, self.learner = config, learner

    def sums(self, batch: Tree) -> np.ndarray:
        if not self.config.normalise_advantage:
            return self.learner.sums(batch, (0.0, 0.0))
        tensors = self.learner.batch(batch)
        with torch.no_grad():
            output = self.learner.model.unroll(tensors)
        advantages = estimate(self.learner.model, tensors, output, self.config)
        return self.learner.sums(batch, advantages.sums(tensors.valid))

    def minibatches(
        self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator
    ) -> Iterator[Update]:
        entropy = annealed(progress, self.config.entropy, self.config.entropy_final)
        yield Update(self.learner.batch(batch), self.learner.totals(sums, extra=2), entropy)

    def gradients(self, minibatch: Update, phase: str) -> tuple[np.ndarray, dict[str, float]]:
        config, batch, model = self.config, minibatch.batch, self.learner.model
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
        return self.learner.descend(
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
