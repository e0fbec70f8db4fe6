"""Intervals of an estimate from resamples, corrected for its bias and its skew: BCa (Efron 1987).

    z0   how far the estimate is from the middle of its resamples, in normal deviations
    a    how fast its deviation changes with its value: the skew of the estimates without one part of the data each
    q    Phi(z0 + (z0 + z) / (1 - a (z0 + z)))    the share of resamples at each end, in place of Phi(z)
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

__all__ = ["corrected_interval", "without_each"]

PARTS = 200  # of the data, at most


def corrected_interval(estimate: float, resampled: np.ndarray, without: np.ndarray, confidence: float) -> tuple[float, float]:
    """`resampled`: of resamples of the data; `without`: of the data without each of their parts."""
    normal, count = NormalDist(), len(resampled)
    below = (np.count_nonzero(resampled < estimate) + np.count_nonzero(resampled <= estimate)) / (2 * count)
    bias = normal.inv_cdf(min(max(below, 0.5 / count), 1 - 0.5 / count))
    apart = without.mean() - without
    spread = float(np.square(apart).sum())
    skew = float((apart**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
    ends = []
    for share in (0.5 - confidence / 2, 0.5 + confidence / 2):
        z = bias + normal.inv_cdf(share)
        ends.append(normal.cdf(bias + z / max(1 - skew * z, 1e-6)))
    low, high = np.quantile(resampled, ends)
    return float(low), float(high)


def without_each(rows: int, rng: np.random.Generator) -> np.ndarray:
    """How often each row counts [parts, rows] when one part of them is left out: each row alone, or random parts of many."""
    parts = min(rows, PARTS)
    part = rng.permutation(rows) % parts
    counts: np.ndarray = (part != np.arange(parts)[:, None]).astype(np.float64)
    return counts
