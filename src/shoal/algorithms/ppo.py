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

from shoal.algorithms.actor_critic import ActorCritic
from shoal.algorithms.advantages import Advantages, estimate
from shoal.algorithms.blueprint import check_numbers
from shoal.algorithms.learner import Learner
from shoal.algorithms.proximal import Bounds, Proximal
from shoal.algorithms.training import OptimiserName
from shoal.core import Tolerance

if TYPE_CHECKING:
    from shoal.algorithms.batch import Batch

__all__ = ["PPO", "Config"]


@dataclass(frozen=True)
class Config:
    """Proximal policy optimisation."""

    unroll: int = 128
    """Steps in an unroll, T."""
    gamma: float = 0.99
    """Discount."""
    lambda_: float = 0.95
    """Decay of the traces in the advantages (GAE)."""
    epochs: int = 4
    """How often each batch is gone through."""
    minibatches: int = 4
    """Parts a batch is split into in each epoch."""
    clip: float = 0.2
    """The ratio may leave 1 by this much."""
    clip_final: float | None = None
    """Clip at the end of the env_steps budget; none keeps it constant."""
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
    value_clip: float | None = None
    """A new value may leave the old one by this much; none does not clip."""
    entropy: float = 0.01
    """Weight of the entropy bonus."""
    entropy_final: float | None = None
    """Entropy weight at the end of the env_steps budget; none keeps it constant."""
    normalise_advantage: bool = True
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
            positive=("unroll", "lr", "epochs", "minibatches", "clip", "value_clip", "optimiser_epsilon"),
            shares=("gamma", "lambda_"),
            not_negative=(
                "value_weight",
                "entropy",
                "grad_norm",
                "final_rows",
                "lr_final",
                "entropy_final",
                "clip_final",
            ),
        )


class PPO(ActorCritic):
    """See the module."""

    name = "ppo"
    tolerates = Tolerance.BOUNDED_REUSE

    def objective(self, learner: Learner) -> PPOObjective:
        return PPOObjective(self.config, learner)


class PPOObjective(Proximal):
    """Several gradients per batch."""

    def advantages(self, batch: Batch) -> Advantages:
        model = self.learner.model
        return estimate(model, batch, model.unroll(batch), self.config)

    def bounds(self, clip: float) -> Bounds:
        return Bounds(1 - clip, 1 + clip)
