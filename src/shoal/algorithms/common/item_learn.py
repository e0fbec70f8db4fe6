"""ItemLearn: a PhasedLearn from items of a replay table. `learning.ReplayLearn` says what tables expect of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.common.contrast import ENCODER, Contrast
from shoal.algorithms.common.item_batch import ItemMinibatch, item_sums
from shoal.algorithms.common.learn import Loss, PhasedLearn
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.phases import Phase
from shoal.core import Tree, Vector

__all__ = ["ItemLearn"]

M = TypeVar("M", bound=Model[Any])


class ItemLearn(PhasedLearn[M]):
    """A learning.Learn, ReplayLearn and ComparingLearn. With a `contrast` the first phase also teaches the encoder, which has a
    phase of its own after all others, or is learned elsewhere: then this is a learning.EncodedLearn."""

    records = stages = True

    def __init__(self, model: M, phases: Sequence[Phase], *, target: M | None = None, publishes: str | None = None,
                 contrast: Contrast | None = None) -> None:
        self._contrast = contrast
        if contrast is not None:
            phases, model.detached = contrast.with_encoder(phases), contrast.detached
        super().__init__(model, phases, target=target, publishes=publishes)

    @property
    def priorities(self) -> Vector:
        """Raw priorities [B] of the last minibatch, by the parameters before the step; a tensor on a GPU."""
        return self._priorities

    def sums(self, batch: Tree, index: int = 0, learners: int = 1) -> np.ndarray:
        return item_sums(batch, index, learners)

    def minibatches(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[Any]:
        return super().minibatches(batch if self._contrast is None else self._contrast.views(batch, rng), sums, progress, rng)

    def loss_of(self, minibatch: Any, phase: str) -> Loss:
        if self._contrast is None or phase != ENCODER:
            return super().loss_of(minibatch, phase)
        assert self.target is not None
        return self._contrast.loss(self.model, self.target, minibatch)

    # -------------------------------------------------------------------------------- several learners
    def told(self, minibatch: ItemMinibatch, phase: str, index: int, learners: int) -> np.ndarray:
        if self._contrast is None or phase != ENCODER:
            return np.zeros(0, np.float32)
        assert self.target is not None
        return self._contrast.told(self.target, minibatch, index, learners)

    def with_told(self, minibatch: ItemMinibatch, told: np.ndarray, index: int, learners: int) -> ItemMinibatch:
        assert self._contrast is not None
        return self._contrast.with_keys(minibatch, told, index, learners)

    def told_bytes(self, batch: int, learners: int) -> int:
        return 0 if self._contrast is None else 4 * learners * batch * (1 + self._contrast.key_size)

    # -------------------------------------------------------------------------------- an encoder that is learned elsewhere
    @property
    def encoder_gradient(self) -> np.ndarray:
        """By the loss of the last minibatch's first phase."""
        gradient: np.ndarray = self.model.grad[self.model.span(ENCODER)].numpy()
        return gradient

    def take_encoder(self, params: np.ndarray, target: np.ndarray) -> None:
        span = self.model.span(ENCODER)
        with torch.no_grad():
            self.state["params"][span].copy_(torch.from_numpy(params))
            self.state["target"][span].copy_(torch.from_numpy(target))

    def contrasted(self, minibatch: ItemMinibatch) -> Tree:
        """What RepresentationLearn needs of it."""
        assert self._contrast is not None
        return {**self._contrast.compared(minibatch.items), "weight": minibatch.weight}
