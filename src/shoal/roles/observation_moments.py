"""Sums of observations on their way from actors through a replay table to a learner, each observation counted once.

    actor ── with every insert ──▶ MomentRelay of the table ── with the next batch ──▶ learner: Learn.moments, Learn.absorb

The sums are relative to a `shift` that travels with them, so that sums of different actors can be added without losing digits.
What the readers of a recording send is in recorded_moments.py.
"""

from __future__ import annotations

import numpy as np

from shoal.algorithms.records.moments import moment_fields
from shoal.core import Tree
from shoal.slots import Field

__all__ = ["NAME", "MomentRelay", "moments_fields"]

NAME = "observation_moments"


def moments_fields(size: int) -> dict[str, dict[str, Field]]:
    """The fields of a message that carries the sums of `size` numbers; none where nothing is normalised."""
    return {NAME: moment_fields(size)} if size else {}


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
        given = message[NAME]
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
        into = message[NAME]
        into["count"][:], into["shift"][:], into["sum"][:], into["square"][:] = self.count, self.shift, self.sum, self.square
        for sums in (self.count, self.sum, self.square):
            sums[:] = 0
