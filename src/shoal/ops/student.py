"""Student's distribution, in numbers: how far a mean may be from what a few samples say."""

from __future__ import annotations

import math

__all__ = ["student_p", "student_quantile"]


def student_p(t: float, freedom: float) -> float:
    """Two-sided tail of Student's distribution: the regularised incomplete beta function I_x(freedom / 2, 1 / 2)."""
    x = freedom / (freedom + t * t)
    return _incomplete_beta(freedom / 2, 0.5, x)


def student_quantile(confidence: float, freedom: float) -> float:
    """The t between whose two sides this share lies; for much freedom that of a normal distribution."""
    low, high = 0.0, 1.0
    while student_p(high, freedom) > 1 - confidence:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, freedom) > 1 - confidence else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    fraction, c, d = 1.0, 1.0, 0.0  # Lentz's method
    for step in range(300):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away_from_0(1 + term * d)
        c = _away_from_0(1 + term / c)
        fraction *= c * d
        if abs(1 - c * d) < 1e-12:
            break
    return front * (fraction - 1)


def _away_from_0(x: float) -> float:
    return x if abs(x) > 1e-30 else 1e-30
