"""ItemLearn: a PhasedLearn from items of a replay table. `learning.ReplayLearn` says what tables expect of it."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from shoal.algorithms.common.item_batch import item_sums
from shoal.algorithms.common.learn import PhasedLearn
from shoal.algorithms.common.model import Model
from shoal.core import Tree, Vector

__all__ = ["ItemLearn"]

M = TypeVar("M", bound=Model[Any])


class ItemLearn(PhasedLearn[M]):
    """A learning.Learn and ReplayLearn."""

    @property
    def priorities(self) -> Vector:
        """Raw priorities [B] of the last minibatch, by the parameters before the step; a tensor on a GPU."""
        return self._priorities

    def sums(self, batch: Tree, index: int = 0, learners: int = 1) -> np.ndarray:
        return item_sums(batch, index, learners)
