"""Schedules as functions of the fraction of the run that is done, clamped to [0, 1].

The fraction travels with the weights as part of Progress, so a schedule needs no counter of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["constant", "exponential", "linear"]


def constant(fraction: float, value: float) -> float:
    """The same value at any time."""
    return value


@overload
def linear(fraction: float, start: float, end: float) -> float: ...
@overload
def linear(fraction: Tensor, start: float, end: float) -> Tensor: ...
def linear(fraction: float | Tensor, start: float, end: float) -> float | Tensor:
    """Straight from ``start`` to ``end``; both are reached exactly. A fraction that lies on a device stays there."""
    done = min(max(fraction, 0.0), 1.0) if isinstance(fraction, float | int) else fraction.clamp(0.0, 1.0)
    return start * (1.0 - done) + end * done


def exponential(fraction: float, start: float, end: float) -> float:
    """Straight on a logarithmic scale from ``start`` to ``end``; both must be positive."""
    if start <= 0 or end <= 0:
        raise ValueError(f"exponential: start = {start} and end = {end} must both be positive; use linear to reach 0")
    done = min(max(fraction, 0.0), 1.0)
    return float(start ** (1.0 - done) * end**done)
