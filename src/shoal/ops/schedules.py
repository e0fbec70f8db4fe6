"""Schedules: over the run, and over the actors of a run.

`linear` is a function of the fraction of the run that is done, clamped to [0, 1]. The fraction travels with the weights as part of
Progress, so a schedule needs no counter of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["actor_epsilons", "linear"]


@overload
def linear(fraction: float, start: float, end: float) -> float: ...
@overload
def linear(fraction: Tensor, start: float, end: float) -> Tensor: ...
def linear(fraction: float | Tensor, start: float, end: float) -> float | Tensor:
    """Straight from ``start`` to ``end``; both are reached exactly. A fraction on a device stays there."""
    done = min(max(fraction, 0.0), 1.0) if isinstance(fraction, float | int) else fraction.clamp(0.0, 1.0)
    return start * (1.0 - done) + end * done


def actor_epsilons(count: int, epsilon: float = 0.4, alpha: float = 7.0) -> npt.NDArray[np.float64]:
    """Ape-X: actor i of ``count`` explores with epsilon^(1 + alpha i / (count - 1)) for the whole run; alone, with epsilon."""
    rungs: npt.NDArray[np.float64] = epsilon ** (1 + alpha * np.arange(count) / max(count - 1, 1))
    return rungs
