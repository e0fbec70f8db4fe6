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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.algorithms.advantages import Advantages, estimate
from shoal.algorithms.blueprint import Blueprint, check_numbers
from shoal.algorithms.learner import Learner
from shoal.algorithms.training import OptimiserName, annealed
from shoal.core import Progress, Tolerance, Tree
from shoal.ops import losses
from shoal.slots import Layout

if TYPE_CHECKING:
    from shoal.algorithms.batch import Batch
    from shoal.algorithms.policy import ActorCriticPolicy
    from shoal.algorithms.records import Unroll
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

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
    """Scale observations by their running mean and deviation."""
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


class PPO:
    """See the module."""

    name = "ppo"
    tolerates = Tolerance.BOUNDED_REUSE

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        config.validate()
        self.config = config
        self.plan = Blueprint.of(self.name, config, spec, net, seats)

    @property
    def record(self) -> Unroll:
        return self.plan.record

    def policy(self) -> ActorCriticPolicy:
        return self.plan.policy()

    def learn(self, seed: int) -> PPOLearn:
        return PPOLearn(self.config, self.plan, seed)

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        return np.zeros(seats, np.float32)

    def published_layout(self) -> Layout:
        return self.plan.published_layout()


@dataclass
class Minibatch:
    """Part of a batch with its (normalised) advantages, and what is true while it is learned from."""

    batch: Batch
    advantages: Advantages
    weight: float
    clip: float
    entropy: float


class PPOLearn:
    """Several gradients per batch."""

    phases = ("all",)

    def __init__(self, config: Config, plan: Blueprint, seed: int) -> None:
        self.config = config
        self.learner = Learner(
            plan, seed, optimiser=config.optimiser, epsilon=config.optimiser_epsilon, grad_norm=config.grad_norm
        )
        self.state = self.learner.state
        self._prepared: tuple[Tree, Batch, Advantages] | None = None

    def sums(self, batch: Tree) -> np.ndarray:
        self._prepared = None  # a staging buffer comes back with new data in it
        _, prepared, advantages = self._prepare(batch)
        return self.learner.sums(batch, advantages.sums(prepared.valid))

    def minibatches(
        self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator
    ) -> Iterator[Minibatch]:
        config, learner = self.config, self.learner
        _, prepared, advantages = self._prepare(batch)
        self._prepared = None
        totals = learner.totals(sums, extra=2)
        if config.normalise_advantage:
            advantages = advantages.normalised(totals)
        learner.optimiser.lr = annealed(progress, config.lr, config.lr_final)
        whole = Minibatch(
            prepared.acted(),
            advantages,
            totals.weight(config.minibatches),
            annealed(progress, config.clip, config.clip_final),
            annealed(progress, config.entropy, config.entropy_final),
        )
        if not learner.model.recurrent:  # then a step is a column of its own
            whole = replace(whole, batch=whole.batch.flattened(), advantages=advantages.flattened())
        columns = whole.batch.columns()
        for _ in range(config.epochs):
            if config.minibatches == 1:
                yield whole
                continue
            for chosen in np.array_split(rng.permutation(columns), config.minibatches):
                index = torch.from_numpy(chosen)
                yield replace(whole, batch=whole.batch.select(index), advantages=whole.advantages.select(index))

    def gradients(self, minibatch: Minibatch, phase: str) -> tuple[np.ndarray, dict[str, float]]:
        config, batch, advantages, model = self.config, minibatch.batch, minibatch.advantages, self.learner.model
        output = model.unroll(batch)
        log_prob, entropy = model.judge(output, batch)
        lower, upper = 1 - minibatch.clip, 1 + minibatch.clip
        ratio = losses.importance_ratio(log_prob, batch.log_prob)
        valid, weight = batch.valid, minibatch.weight
        policy_loss = losses.masked_sum(losses.ppo_clip_loss(ratio, advantages.advantage, lower, upper), valid) * weight
        value_loss = (
            losses.masked_sum(
                losses.value_loss(output.value, advantages.target, advantages.value, config.value_clip), valid
            )
            * weight
        )
        bonus = losses.masked_sum(entropy, valid) * weight
        loss = policy_loss + config.value_weight * value_loss - minibatch.entropy * bonus
        return self.learner.descend(
            loss,
            {
                "policy_loss": policy_loss,
                "value_loss": value_loss,
                "entropy": losses.masked_mean(entropy.detach(), valid),
                "approx_kl": losses.masked_mean(losses.approx_kl(log_prob.detach(), batch.log_prob), valid),
                "mean_rho": losses.masked_mean(ratio.detach(), valid),
                "clip_fraction": losses.clip_fraction(ratio.detach(), lower, upper, valid),
                "explained_variance": losses.explained_variance(advantages.value, advantages.target, valid),
            },
        )

    def apply(self, gradient: np.ndarray, phase: str) -> bool:
        return self.learner.optimiser.step(gradient)

    def moments(self, batch: Tree) -> np.ndarray:
        return self.learner.moments(batch)

    def absorb(self, moments: np.ndarray) -> None:
        self.learner.absorb(moments)

    def bind(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.learner.bind(arrays)

    def published(self, progress: Progress) -> Tree:
        return self.learner.published(progress)

    def _prepare(self, batch: Tree) -> tuple[Tree, Batch, Advantages]:
        """Advantages of a batch with the weights as they are now: once, for `sums` and for `minibatches`."""
        if self._prepared is None or self._prepared[0] is not batch:
            tensors = self.learner.batch(batch)
            with torch.no_grad():
                output = self.learner.model.unroll(tensors)
            self._prepared = batch, tensors, estimate(self.learner.model, tensors, output, self.config)
        return self._prepared
