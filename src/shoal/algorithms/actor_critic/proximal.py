"""What ppo and appo share: passes over one batch in minibatches, and the gradient of a clipped objective.

    minibatches   advantages once per batch -> normalised over all learners -> `epochs` times `minibatches` parts
    loss          -min(ratio A, clip(ratio) A) + c_v value loss - c_e H, of one part
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.actor_critic.algorithm import ActorCriticConfig
from shoal.algorithms.common.learn import Loss
from shoal.algorithms.common.optimiser import annealed
from shoal.core import Tree
from shoal.device.transfer import to_device
from shoal.ops import losses
from shoal.options import number

if TYPE_CHECKING:
    from shoal.algorithms.actor_critic.advantages import Advantages
    from shoal.algorithms.actor_critic.learn import ActorCriticLearn
    from shoal.algorithms.actor_critic.unroll_batch import UnrollBatch

__all__ = ["Proximal", "ProximalConfig", "ProximalMinibatch", "RatioBounds"]


@dataclass(frozen=True)
class ProximalConfig(ActorCriticConfig):
    """The options of ppo and appo."""

    epochs: int = number(4, at_least=1)
    """Passes over each batch."""
    minibatches: int = number(4, at_least=1)
    """Parts a batch is split into in each epoch."""
    clip: float = number(0.2, above=0)
    """The ratio may leave 1 by this much."""
    clip_final: float | None = number(None, at_least=0)
    """Clip at the end of the env_steps budget; none keeps it constant."""
    value_clip: float | None = number(None, above=0)
    """A new value may leave the old one by this much; none does not clip."""
    normalise_advantage: bool = True
    """Give the advantages of a batch (of all learners together) mean 0 and deviation 1."""


@dataclass
class ProximalMinibatch:
    """Part of a batch with its (normalised) advantages, and what is true while it is learned from."""

    batch: UnrollBatch
    advantages: Advantages
    weight: float
    clip: float
    entropy: float


@dataclass(frozen=True)
class RatioBounds:
    """How far the ratio pi/mu may go."""

    lower: float
    """Below this the objective is flat."""
    upper: float
    """Above this the objective is flat."""
    least: float | None = None
    """The ratio itself is held above this."""
    most: float | None = None
    """The ratio itself is held below this."""


P = TypeVar("P", bound=ProximalConfig)


class Proximal(ABC, Generic[P]):
    """The objective, gone down `epochs` times over each batch."""

    captures = True

    def __init__(self, config: P, learn: ActorCriticLearn) -> None:
        self.config, self.learn = config, learn
        self._prepared: tuple[Tree, UnrollBatch, Advantages] | None = None

    @abstractmethod
    def advantages(self, batch: UnrollBatch) -> Advantages:
        """With the weights as they are now."""

    @abstractmethod
    def bounds(self, clip: float) -> RatioBounds:
        """How far the ratio may go."""

    def sums(self, batch: Tree) -> Any:
        self._prepared = None  # a staging buffer comes back with new data in it
        _, prepared, advantages = self._prepare(batch)
        return self.learn.shared(batch, advantages.sums(prepared.valid))

    def minibatches(self, batch: Tree, sums: Any, progress: Progress, rng: np.random.Generator) -> Iterator[ProximalMinibatch]:
        config, learn = self.config, self.learn
        _, prepared, advantages = self._prepare(batch)
        self._prepared = None
        totals = learn.totals(sums, extra=2)
        if config.normalise_advantage:
            advantages = advantages.normalised(totals)
        whole = ProximalMinibatch(
            prepared.acted(),
            advantages,
            totals.weight(config.minibatches),
            annealed(progress, config.clip, config.clip_final),
            annealed(progress, config.entropy, config.entropy_final),
        )
        if not learn.model.recurrent:  # then a step is a column of its own
            whole = replace(whole, batch=whole.batch.flattened(), advantages=advantages.flattened())
        columns = whole.batch.columns()
        for _ in range(config.epochs):
            if config.minibatches == 1:
                yield whole
                continue
            for index in shuffled(columns, config.minibatches, rng, whole.batch.action.device):
                yield replace(whole, batch=whole.batch.select(index), advantages=whole.advantages.select(index))

    def loss(self, minibatch: ProximalMinibatch) -> Loss:
        """The clipped objective on a minibatch."""
        config, bounds = self.config, self.bounds(minibatch.clip)
        batch, advantages, model = minibatch.batch, minibatch.advantages, self.learn.model
        output = model.unroll(batch)
        log_prob, entropy = model.judge(output, batch)
        ratio = losses.importance_ratio(log_prob, batch.log_prob, bounds.least, bounds.most)
        valid, weight = batch.valid, minibatch.weight
        clipped = losses.ppo_clip_loss(ratio, advantages.advantage, bounds.lower, bounds.upper)
        policy_loss = losses.masked_sum(clipped, valid) * weight
        errors = losses.value_loss(output.value, advantages.target, advantages.value, config.value_clip)
        value_loss = losses.masked_sum(errors, valid) * weight
        bonus = losses.masked_sum(entropy, valid) * weight
        return Loss(
            policy_loss + config.value_weight * value_loss - minibatch.entropy * bonus,
            {
                "policy_loss": policy_loss,
                "value_loss": value_loss,
                "entropy": losses.masked_mean(entropy.detach(), valid),
                "approx_kl": losses.masked_mean(losses.approx_kl(log_prob.detach(), batch.log_prob), valid),
                "mean_rho": losses.masked_mean(ratio.detach(), valid),
                "clip_fraction": losses.clip_fraction(ratio.detach(), bounds.lower, bounds.upper, valid),
                "explained_variance": losses.explained_variance(advantages.value, advantages.target, valid),
            },
        )

    def _prepare(self, batch: Tree) -> tuple[Tree, UnrollBatch, Advantages]:
        """Advantages of a batch with the weights as they are now: once, for `sums` and for `minibatches`."""
        if self._prepared is None or self._prepared[0] is not batch:
            tensors = self.learn.batch(batch)
            with torch.no_grad():
                self._prepared = batch, tensors, self.advantages(tensors)
        return self._prepared


def shuffled(columns: np.ndarray, parts: int, rng: Any, device: torch.device) -> Iterable[torch.Tensor]:
    """The columns in `parts` parts, at random; with a generator of the device none of it leaves it."""
    if isinstance(rng, torch.Generator):
        return torch.rand(len(columns), generator=rng, device=device).argsort().tensor_split(parts)
    return [to_device(torch.from_numpy(part), device) for part in np.array_split(rng.permutation(columns), parts)]
