"""The encoder alone, for a role that learns nothing else: CURL's contrastive loss, its key encoder and its optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.acting import Progress
from shoal.algorithms.common.contrast import Contrast
from shoal.algorithms.common.item_batch import ItemMinibatch
from shoal.algorithms.common.learn import Loss, PhasedLearn
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.phases import Phase
from shoal.core import Tree

__all__ = ["RepresentationLearn"]


class RepresentationLearn(PhasedLearn[Model[nn.Module]]):
    """A learning.Learn of one phase. A batch has items as a table gives them, or crops that were made already, with their weights.

    Items of a table count alike, however they are drawn: there is no value in them that could be wrong.
    """

    def __init__(self, contrast: Contrast, phase: Phase, seed: int) -> None:
        super().__init__(self._model(contrast, seed), (phase,), target=self._model(contrast, seed))
        self.contrast = contrast

    def _model(self, contrast: Contrast, seed: int) -> Model[nn.Module]:
        return Model(nn.Module(), contrast.codes, representation=contrast.representation(seed, learns=True))

    def split(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[ItemMinibatch]:
        """One: two crops of each image."""
        if "key_view" in batch:
            views, weight = {name: batch[name] for name in ("query", "key_view")}, batch["weight"]
        else:
            query, key = self.contrast.pair(batch["observation"], rng)
            views, weight = {"query": query, "key_view": key}, np.ones(len(query), np.float32)
        items: dict[str, Any] = {name: self.tensor(view) for name, view in views.items()}
        yield ItemMinibatch(items, torch.from_numpy(weight), 1.0 / len(weight))

    def loss(self, minibatch: ItemMinibatch, phase: str) -> Loss:
        assert self.target is not None
        return self.contrast.loss(self.model, self.target, minibatch)
