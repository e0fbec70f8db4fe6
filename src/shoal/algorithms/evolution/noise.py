"""One table of normal numbers per machine; a perturbation is a slice of it, and a message names only where the slice begins.

The table is a file in the cache folder (cache_folder.py) that every worker maps: its pages are in memory once, whatever the number
of workers, and the next run finds them there. On a cluster every node makes its own.
Where the folder cannot be written, a worker keeps a private table with the same numbers.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from shoal.cache_folder import cache_folder
from shoal.errors import ConfigError

__all__ = ["NoiseTable", "draw_indices"]

SEED = 123  # the published code's; runs differ in the slices that they draw
BLOCK = 1 << 20


class NoiseTable:
    """`size` standard normal numbers, the same everywhere."""

    def __init__(self, size: int, parameters: int) -> None:
        """Slices have the length of `parameters`."""
        if parameters > size:
            raise ConfigError(f"--algorithm.noise-size {size} is less than the network's {parameters} parameters, and a "
                              f"perturbation is a slice of the table; give --algorithm.noise-size {2 * parameters} or more")
        self.size, self.parameters = size, parameters

    @cached_property
    def values(self) -> torch.Tensor:
        return torch.from_numpy(_mapped(self.size))

    @cached_property
    def fingerprint(self) -> int:
        """Of the numbers: libraries may round the tails of the normal distribution differently on another machine."""
        return zlib.crc32(self.values.numpy().view(np.uint8).data)

    def slice(self, index: int) -> torch.Tensor:
        return self.values[index : index + self.parameters]

    def weighted_sum(self, weights: np.ndarray, indices: np.ndarray) -> torch.Tensor:
        """sum_j weights_j slice_j, in float32 and always in the same order."""
        total = torch.zeros(self.parameters)
        block = max(1, BLOCK // self.parameters)
        for start in range(0, len(weights), block):
            slices = torch.stack([self.slice(int(index)) for index in indices[start : start + block]])
            total += torch.as_tensor(weights[start : start + block], dtype=torch.float32) @ slices
        return total


def draw_indices(seed: int, iteration: int, draws: np.ndarray, table: NoiseTable) -> np.ndarray:
    """Where these perturbations of an iteration begin: the same for everyone who asks, however many others ask for."""
    last = table.size - table.parameters
    found: np.ndarray = np.random.default_rng([seed, iteration]).integers(0, last + 1, size=int(draws.max()) + 1)[draws]
    return found


def _mapped(size: int) -> np.ndarray:
    path = cache_folder() / f"noise-{SEED}-{size}.f32"
    try:
        if not path.exists() or path.stat().st_size != 4 * size:
            _write(path, size)
        return np.memmap(path, np.float32, mode="c")  # private where it is written to, which nobody does
    except OSError:
        return _numbers(size)


def _write(path: Path, size: int) -> None:
    """Whole or not at all: several workers may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            _numbers(size).tofile(file)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _numbers(size: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(SEED)).standard_normal(size, np.float32)
