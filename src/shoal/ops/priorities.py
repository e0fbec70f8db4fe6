"""The arithmetic of prioritised replay: importance weights, priorities of sequences. NumPy, for actors too.

Papers: prioritised replay (Schaul et al. 2016, 1511.05952), Ape-X (Horgan et al. 2018, 1803.00933), R2D2 (Kapturowski et
al. 2019), R2D3 (Gulcehre et al. 2019, 1909.01387). Priorities are raw everywhere (|td|, plus FLOOR): only the
table applies the exponent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FLOOR", "draw_demonstrations", "importance_weights", "sequence_priority"]

Floats = npt.NDArray[Any]

FLOOR = 1e-6  # added to every priority: an error of 0 must not make an item unreachable


def importance_weights(probability: Floats, size: Any, exponent: float) -> Floats:
    """(N P(i))^-exponent; a learner divides them by the largest. ``size`` is N, one number or one for each item's own table."""
    raw: Floats = (np.asarray(size) * probability) ** -exponent
    return raw


def sequence_priority(error: Floats, valid: Floats, eta: float) -> Floats:
    """eta max + (1 - eta) mean of the errors' sizes over the valid steps: ``[T, ...]`` -> ``[...]``."""
    size = np.where(valid, np.abs(error), 0.0)
    mean = size.sum(0) / np.maximum(np.count_nonzero(valid, axis=0), 1)
    mixed: Floats = eta * size.max(0) + (1 - eta) * mean
    return mixed


def draw_demonstrations(rng: np.random.Generator, count: int, ratio: float) -> npt.NDArray[np.bool_]:
    """R2D3: which elements of a batch come from the demonstrations, each on its own with this probability."""
    return rng.random(count) < ratio
