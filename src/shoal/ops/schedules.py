"""Schedules as functions of the fraction of the run that is done, clamped to [0, 1].

The fraction travels with the weights as part of Progress, so a schedule needs no counter of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["linear"]


@overload
def linear(fraction: float, start: float, end: float) -> float: ...
@overload
def linear(fraction: Tensor, start: float, end: float) -> Tensor: ...
def linear(fraction: float | Tensor, start: float, end: float) -> float | Tensor:
    """Straight from ``start`` to ``end``; both are reached exactly. A fraction on a device stays there."""
    done = min(max(fraction, 0.0), 1.0) if isinstance(fraction, float | int) else fraction.clamp(0.0, 1.0)
    return start * (1.0 - done) + end * done
