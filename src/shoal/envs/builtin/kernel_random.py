"""What the kernels of environments and of games share: how they are compiled, and their random numbers.

Numba's disk cache does not notice a change in this file: kernels that were compiled before keep the old `draw`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np

__all__ = ["Array", "draw", "jit", "was_compiled"]

Array = np.ndarray
Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def jit(function: Kernel) -> Kernel:
    """Compile, with an on-disk cache and without the GIL."""
    return cast(Kernel, numba.njit(cache=True, nogil=True)(function))


def was_compiled(kernel: Any) -> bool:
    """Whether Numba's cache has a function that `jit` made, so that its first call takes no time."""
    return any(Path(kernel.stats.cache_path).glob(f"*.{kernel.__name__}-*.nbi"))


@jit
def draw(rng: Array, i: int) -> float:
    """The next 53-bit uniform number in [0, 1) of row or game i (splitmix64)."""
    rng[i] += np.uint64(0x9E3779B97F4A7C15)
    z = rng[i]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float((z >> np.uint64(11)) * (1.0 / 9007199254740992.0))
