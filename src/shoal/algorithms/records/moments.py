"""Moments of observations and returns that travel from actors to learners: sums relative to a `shift` that goes along.

Any learner can merge the sums of any actors, however old the weights were that made them (see common/normaliser.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shoal.core import Tree
from shoal.slots import Field

__all__ = ["MomentSums", "moment_fields", "write_moments"]


def moment_fields(size: int) -> dict[str, Field]:
    """The layout of the moments of `size` numbers; several of them side by side are [slots, ...]."""
    one = Field((1, size), "float64", 0)
    return {"count": Field((1, 1), "float64", 0), "shift": one, "sum": one, "square": one}


def write_moments(into: Mapping[str, np.ndarray], values: np.ndarray, shift: np.ndarray | None) -> None:
    """Moments of `values` [N, size]; the shift is None where nothing was ever seen."""
    into["count"][...] = len(values)
    if shift is None:
        shift = np.zeros(values.shape[1])
    delta = values - shift
    into["shift"][0] = shift
    into["sum"][0] = delta.sum(0)
    into["square"][0] = np.einsum("ij,ij->j", delta, delta)


class MomentSums:
    """Moments that are added up step by step until they are sent."""

    def __init__(self, size: int) -> None:
        self._shift: np.ndarray | None = None
        self._count, self._sum, self._square = 0, np.zeros(size), np.zeros(size)

    def add(self, values: np.ndarray) -> None:
        """Values [N, size], of one step of N seats."""
        if not len(values):
            return
        if self._shift is None:
            self._shift = values.mean(0)
        delta = values - self._shift
        self._count += len(values)
        self._sum += delta.sum(0)
        self._square += np.einsum("ij,ij->j", delta, delta)

    def take(self, into: Tree) -> None:
        """Write them out and start again, around the same shift."""
        into["count"][...] = self._count
        into["shift"][0] = 0.0 if self._shift is None else self._shift
        into["sum"][0], into["square"][0] = self._sum, self._square
        self._count = 0
        self._sum.fill(0)
        self._square.fill(0)
