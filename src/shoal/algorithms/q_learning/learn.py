"""The learning side of dqn and r2d2: what surrounds their errors.

    batch (items, probabilities) ──> errors: per item a loss and a priority ──> x importance weight, mean ──> gradient
                                                            └──> learn.priorities, back to the table
    apply: clip, optimiser, target net

A batch is a tree of items [B, ...] with `probability` [B], with which each was drawn, and `table_size` [1] or [B], of the
table it came from. Several learners make the update of their joined batch.

Noisy layers: an update has noise of its own, one set for its whole batch. It follows from the seed and the number of the update, so
learners that make an update together have the same noise, and a resumed run continues with the noise that it would have had.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.common.contrast import Contrast
from shoal.algorithms.common.item_batch import ItemMinibatch, item_minibatch
from shoal.algorithms.common.item_learn import ItemLearn
from shoal.algorithms.common.learn import Loss
from shoal.algorithms.common.optimiser import annealed
from shoal.algorithms.common.phases import Phase, TargetSchedule
from shoal.algorithms.q_learning.model import QModel
from shoal.core import Tree

if TYPE_CHECKING:
    from shoal.algorithms.q_learning.algorithm import QLearningConfig

__all__ = ["Errors", "Judged", "QLearn", "QMinibatch"]

NOISES = 3
"""Sets of noise in an update: of the values to be changed, of the net when it selects an action, of the target net."""


@dataclass
class QMinibatch(ItemMinibatch):
    """A batch, and the noise of its update."""

    noise: torch.Tensor | None = None
    """[NOISES, noise_size] normal numbers; None without noisy layers."""


class Judged(NamedTuple):
    """What an algorithm makes of a batch."""

    loss: torch.Tensor
    """Of each item [B]."""
    priority: torch.Tensor
    """Of each item [B]: the size of its error."""
    q: torch.Tensor
    """Values of the actions taken, in any shape; for metrics."""
    target: torch.Tensor
    """What they were moved towards."""
    valid: torch.Tensor | None = None
    """Where these two count; None everywhere."""
    more: Mapping[str, torch.Tensor] = {}
    """Further metrics."""
    values: torch.Tensor | None = None
    """Of all actions [B, A], where they are plain numbers."""


class Errors(Protocol):
    """Where dqn and r2d2 differ. With `captures` it reads no number of a tensor: it can be captured as a CUDA graph."""

    captures: bool

    def __call__(self, model: QModel, target: QModel, items: Tree, noise: torch.Tensor | None = None) -> Judged:
        """`items` are tensors; `noise` is that of QMinibatch."""
        ...


class QLearn(ItemLearn[QModel]):
    """A learning.Learn and ReplayLearn."""

    def __init__(self, config: QLearningConfig, model: QModel, target: QModel, errors: Errors, seed: int,
                 contrast: Contrast | None = None) -> None:
        """`seed` is that of the noise."""
        follows = TargetSchedule(tau=config.target_tau) if config.target_tau else TargetSchedule(config.target_period_updates)
        name = "all" if contrast is None else "head"
        phase = Phase(name, config.optimiser, lambda: config.lr, lambda: config.lr_final,
                      config.optimiser_epsilon, config.grad_norm,
                      decay=config.rmsprop_decay, start=config.adagrad_start, target=follows)
        super().__init__(model, (phase,), target=target, contrast=contrast)
        self.config, self._errors, self._target, self._seed = config, errors, target, seed
        self.captures = errors.captures

    def split(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[QMinibatch]:
        """One: the batch as it was drawn."""
        beta = annealed(progress, self.config.importance, self.config.importance_final)
        drawn = item_minibatch(batch, sums, beta, self.tensor, self.small)
        yield QMinibatch(drawn.items, drawn.weight, drawn.scale, self._noise(progress))

    def _noise(self, progress: Progress) -> torch.Tensor | None:
        size = self.model.net.noise_size
        if size == 0:
            return None
        rng = np.random.default_rng((self._seed, zlib.crc32(b"noise"), progress.learner_steps))
        return self.small(rng.standard_normal((NOISES, size), np.float32))

    def loss(self, minibatch: QMinibatch, phase: str) -> Loss:
        judged = self._errors(self.model, self._target, minibatch.items, minibatch.noise)
        q, valid = judged.q.detach(), judged.valid
        metrics = {
            "td_error": judged.priority.mean(),
            "q_mean": _mean(q, valid),
            "q_max": (q if valid is None else q.masked_fill(~valid, -torch.inf)).amax(),
            "target_mean": _mean(judged.target, valid),
            "importance_min": minibatch.weight.amin(),
            **judged.more,
        }
        return Loss((minibatch.weight * judged.loss).sum() * minibatch.scale, metrics, judged.priority)


def _mean(x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Over what is valid, without asking how much that is."""
    return x.mean() if valid is None else torch.where(valid, x, 0).sum() / valid.sum()
