"""Schedules as functions of the fraction of the run that is done, clamped to [0, 1].

The fraction travels with the weights as part of Progress, so a schedule needs no counter of its own.
"""

from __future__ import annotations

__all__ = ["constant", "exponential", "linear"]


def constant(fraction: float, value: float) -> float:
    """The same value at any time."""
    return value


def linear(fraction: float, start: float, end: float) -> float:
    """Straight from ``start`` to ``end``; both are reached exactly."""
    done = min(max(fraction, 0.0), 1.0)
    return start * (1.0 - done) + end * done


def exponential(fraction: float, start: float, end: float) -> float:
    """Straight on a logarithmic scale from ``start`` to ``end``; both must be positive."""
    if start <= 0 or end <= 0:
        raise ValueError(f"exponential: start = {start} and end = {end} must both be positive; use linear to reach 0")
    done = min(max(fraction, 0.0), 1.0)
    return float(start ** (1.0 - done) * end**done)
