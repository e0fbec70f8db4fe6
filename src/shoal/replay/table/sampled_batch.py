"""Batches: what a sample returns, and the buffers that it is gathered into."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.replay.table.columns import Column, Spec, flatten, unflatten
from shoal.replay.table.memory_pool import mapped

__all__ = ["Batch", "BatchLayout", "BatchMemory", "Buffers", "Info", "joined"]

ALIGN = 64
IDLE_REFERENCES = 3  # the list's, the loop variable's and getrefcount's own


@dataclass
class Info:
    """About the items of a batch, each [B]."""

    keys: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    priorities: npt.NDArray[np.float64]
    times_sampled: npt.NDArray[np.int64]
    table_size: int
    lengths: dict[str, npt.NDArray[np.int64]] | None = None
    """True lengths [B] of every column's time axis, where items of different lengths were padded with zeros."""


@dataclass
class Batch:
    """Sampled items: nested arrays [B, ...] and what is known about each."""

    data: Any
    info: Info

    def __len__(self) -> int:
        return len(self.info.keys)


@dataclass(frozen=True)
class BatchLayout:
    """Where the columns of B items lie in one block of memory."""

    columns: tuple[Column, ...]
    count: int
    lengths: tuple[int, ...]
    offsets: tuple[int, ...] = field(init=False)
    shapes: tuple[tuple[int, ...], ...] = field(init=False)
    nbytes: int = field(init=False)
    geometry: npt.NDArray[np.int64] = field(init=False, compare=False)
    """int64[2, C]: bytes of an item, offset."""

    def __post_init__(self) -> None:
        offsets, shapes, at = [], [], 0
        for column, length in zip(self.columns, self.lengths, strict=True):
            shape = column.spec.shape if column.squeeze else (length, *column.spec.shape)
            offsets.append(at)
            shapes.append((self.count, *shape))
            at += -(-self.count * length * column.spec.cell_bytes // ALIGN) * ALIGN
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "shapes", tuple(shapes))
        object.__setattr__(self, "nbytes", at)
        sizes = np.array([column.spec.cell_bytes for column in self.columns], np.int64)
        geometry = np.stack([sizes * np.array(self.lengths, np.int64), np.array(offsets, np.int64)])
        object.__setattr__(self, "geometry", geometry)

    def part(self, start: int, count: int) -> BatchLayout:
        """`count` of its items from the one at `start` on, where they lie in the same block."""
        made = BatchLayout(self.columns, count, self.lengths)
        geometry = self.geometry.copy()
        geometry[1] += start * geometry[0]
        object.__setattr__(made, "geometry", geometry)
        object.__setattr__(made, "offsets", tuple(geometry[1].tolist()))
        object.__setattr__(made, "nbytes", self.nbytes)
        return made

    def views(self, memory: npt.NDArray[np.uint8], offset: int = 0) -> Any:
        """The nested arrays over a block of memory."""
        flat = {
            column.spec.path: np.ndarray(shape, column.spec.dtype, memory, offset + at)
            for column, shape, at in zip(self.columns, self.shapes, self.offsets, strict=True)
        }
        return unflatten(flat)


class BatchMemory(Protocol):
    """Where a batch is gathered: Buffers, or a block of somebody else's memory."""

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]: ...


class Buffers:
    """Blocks of memory for batches, reused as soon as the arrays of an earlier batch are gone.

    `allocate(nbytes)` may return pinned memory: a writable uint8 array that is not a view of another array, since NumPy
    lets views refer to the array at the bottom.
    """

    def __init__(self, allocate: Callable[[int], npt.NDArray[np.uint8]] | None = None, most: int = 8) -> None:
        self._allocate = allocate or _mapped
        self._most = most
        self._blocks: list[npt.NDArray[np.uint8]] = []

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A block of at least `nbytes` bytes that no living array uses."""
        blocks = self._blocks
        for block in blocks:
            if sys.getrefcount(block) == IDLE_REFERENCES and nbytes <= block.nbytes <= 2 * nbytes + 65536:
                return block
        block = self._allocate(max(nbytes, ALIGN))
        blocks.append(block)
        if len(blocks) > self._most:
            del blocks[0]
        return block


def _mapped(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mapped(nbytes), np.uint8)


def padded_lengths(columns: Sequence[Column], extents: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
    """The extents int64[C, B] of the columns that have a time axis."""
    return {c.spec.path: n.copy() for c, n in zip(columns, extents, strict=True) if not c.squeeze or (n != n[0]).any()}


def reaching(column: Column, extent: int) -> tuple[Column, int]:
    """The column and length of a batch whose items have a first axis up to an extent."""
    if not column.squeeze:
        return column, extent
    if column.extent == extent:
        return column, 1
    spec = column.spec
    return Column(Spec(spec.path, spec.dtype, spec.shape[1:]), extent, False), extent


def joined(parts: Sequence[Batch]) -> Batch:
    """Several batches as one; shorter time axes are padded with zeros."""
    flats = [flatten(part.data) for part in parts]
    data = {}
    for path in flats[0]:
        arrays = [flat[path] for flat in flats]
        if any(array.shape[1:] != arrays[0].shape[1:] for array in arrays):
            longest = max(array.shape[1] for array in arrays)
            arrays = [np.pad(a, [(0, 0), (0, longest - a.shape[1])] + [(0, 0)] * (a.ndim - 2)) for a in arrays]
        data[path] = np.concatenate(arrays)
    infos = [part.info for part in parts]
    info = Info(
        np.concatenate([i.keys for i in infos]),
        np.concatenate([i.probabilities for i in infos]),
        np.concatenate([i.priorities for i in infos]),
        np.concatenate([i.times_sampled for i in infos]),
        infos[-1].table_size,
    )
    if any(i.lengths is not None for i in infos) or len({tuple(f[p].shape[1:2] for p in f) for f in flats}) > 1:
        timed = [path for path, array in flats[0].items() if array.ndim > 1]
        info.lengths = {
            path: np.concatenate([
                i.lengths[path] if i.lengths and path in i.lengths else np.full(len(i.keys), f[path].shape[1])
                for i, f in zip(infos, flats, strict=True)
            ])
            for path in timed
        }
    return Batch(unflatten(data), info)
