"""Moments of observations and returns that travel from actors to learners: sums relative to a `shift` that goes along, so that
sums of different actors can be added without losing digits.

    actor ── with every insert ──▶ MomentRelay of a replay table ── with the next batch ──▶ learner: Learn.moments, Learn.absorb

Any learner can merge the sums of any actors, however old the weights were that made them (see common/normaliser.py). Each
observation counts once. What the readers of a recording send is in roles/recorded_moments.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shoal.core import Tree
from shoal.slots import Field

__all__ = ["MOMENTS", "MomentRelay", "MomentSums", "moment_fields", "observation_moment_fields", "write_moments"]

MOMENTS = "observation_moments"
"""The field of a message that carries those of observations."""


def moment_fields(size: int) -> dict[str, Field]:
    """The layout of the moments of `size` numbers; several of them side by side are [slots, ...]."""
    one = Field((1, size), "float64", 0)
    return {"count": Field((1, 1), "float64", 0), "shift": one, "sum": one, "square": one}


def observation_moment_fields(size: int) -> dict[str, dict[str, Field]]:
    """The fields of a message that carries the sums of `size` numbers; none where nothing is normalised."""
    return {MOMENTS: moment_fields(size)} if size else {}


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


class MomentRelay:
    """Adds up the sums of messages until they are passed on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count, self.shift = np.zeros((1, 1)), np.zeros((1, size))
        self.sum, self.square = np.zeros((1, size)), np.zeros((1, size))

    def add(self, message: Tree) -> None:
        """Add what a message carries."""
        if not self.size:
            return
        given = message[MOMENTS]
        if not self.count[0, 0]:
            self.shift[:] = given["shift"]
        offset = given["shift"] - self.shift
        self.square += given["square"] + 2 * offset * given["sum"] + given["count"] * offset**2
        self.sum += given["sum"] + given["count"] * offset
        self.count += given["count"]

    def take(self, message: Tree) -> None:
        """Move the sums into a message, and start again."""
        if not self.size:
            return
        into = message[MOMENTS]
        into["count"][:], into["shift"][:], into["sum"][:], into["square"][:] = self.count, self.shift, self.sum, self.square
        for sums in (self.count, self.sum, self.square):
            sums[:] = 0
