"""A slice of a learner's parameters: what a parameter server in pieces owns (GORILA)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.common.normaliser import LearnerNormalisers
from shoal.algorithms.common.phases import PhasedParameters, overlap
from shoal.core import Tree, Vector

__all__ = ["ParameterSlice"]


class ParameterSlice:
    """A learning.UpdaterSlice of the slice `where` of the whole vector. Gradients are clipped before they are cut and sent here."""

    def __init__(self, whole: PhasedParameters, where: slice, publishes: slice, statistics: LearnerNormalisers) -> None:
        """The slice's part of `publishes`, a slice of the whole vector too, is published."""
        self._parameters, self._statistics = whole.cut(where), statistics
        self.phases = whole.names
        self.state: dict[str, torch.Tensor] = {"begin": torch.tensor([where.start]), **statistics.state, **self._parameters.state}
        inside = overlap(publishes, where)
        self._publishes = slice(inside.start - where.start, inside.stop - where.start)

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        names = ("params", "target", *self._statistics.state)
        return {name: self.state[name] for name in names if name in self.state}

    def span(self, phase: str) -> slice:
        """Where the phase lies in this slice; empty where it owns nothing of it."""
        return self._parameters.span(phase)

    def anneal(self, progress: Progress) -> None:
        self._parameters.anneal(progress)

    def apply(self, gradient: Vector, phase: str) -> bool | torch.Tensor:
        return self._parameters.apply(gradient, phase)

    def updates(self, phase: str) -> int:
        return self._parameters.updates(phase)

    def go_on_from(self, updates: int, phase: str) -> None:
        self._parameters.go_on_from(updates, phase)

    def moments(self, batch: Tree) -> np.ndarray:
        moments: np.ndarray = self._statistics.moments(batch)
        return moments

    def absorb(self, moments: np.ndarray) -> None:
        self._statistics.absorb(moments)

    def published(self, progress: Progress) -> Tree:
        norm = {name: tensor.numpy() for name, tensor in self._statistics.published.items()}
        return {"params": self._parameters.params[self._publishes].numpy(), "norm": norm, "progress": progress.numbers}
