"""Memory for chunks: slabs cut into blocks of one size, in RAM (huge pages) or in files (`storage="memmap"`).

A block given back is used again by the next chunk of its size, so a full table runs without allocating or page faults. A file has
no name: it goes with the process that maps it, even after kill -9.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError, ReplayError

__all__ = ["MemoryPool", "SlabBlock", "mapped", "zeros"]

SMALLEST_SLAB = 1 << 18
LARGEST_SLAB = 1 << 25
HUGE_FROM = 1 << 22
SPARE_BYTES = 1 << 26


def block_bytes(nbytes: int) -> int:
    """Round up to one of eight sizes per power of two, so that odd lengths share blocks."""
    if nbytes <= 64:
        return 64
    step = max(64, 1 << ((nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


def zeros(shape: int | tuple[int, ...], dtype: Any = np.float64) -> npt.NDArray[Any]:
    """A zeroed array, on a page of its own, and on huge pages where it is large: random access then spares a table walk."""
    lengths, kind = (shape,) if isinstance(shape, int) else shape, np.dtype(dtype)
    nbytes = kind.itemsize
    for length in lengths:
        nbytes *= length
    mapping = mapped(max(nbytes, 1))
    return np.ndarray(lengths, kind, np.frombuffer(mapping, np.uint8))


def mapped(nbytes: int) -> mmap.mmap:
    """Private memory, of huge pages where it is large: copies of frames are otherwise slowed by the table of small pages."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _inner_strides(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    strides: list[int] = []
    for length in reversed(shape):
        strides.insert(0, size)
        size *= length
    return tuple(strides)


class Slab:
    """One mapping, cut into equal blocks."""

    def __init__(self, size: int, count: int, directory: Path | None) -> None:
        self.size, self.count = size, count
        self.used = 0
        nbytes = size * count
        if directory is None:
            mapping = mapped(nbytes)
        else:
            try:
                with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                    os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is an error now, not a SIGBUS later
                    mapping = mmap.mmap(file.fileno(), nbytes)
            except OSError as error:
                raise ReplayError(f"{directory} has no room for {nbytes} more bytes of chunks: {error}") from error
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.address = int(self.bytes.ctypes.data)


class SlabBlock:
    """A piece of a slab."""

    __slots__ = ("address", "offset", "slab", "users")

    def __init__(self, slab: Slab, offset: int) -> None:
        self.slab, self.offset = slab, offset
        self.address = slab.address + offset
        self.users = 1

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, stride: int) -> npt.NDArray[Any]:
        """Rows in the block, `stride` bytes apart; the array keeps the slab's memory mapped."""
        rows = np.ndarray(shape, dtype, self.slab.bytes, self.offset + offset, (stride, *_inner_strides(shape[1:], dtype.itemsize)))
        return rows


class MemoryPool:
    """Takes and gives blocks. Not safe for threads: the store's owner holds its lock."""

    def __init__(self, storage: str = "memory", directory: str | os.PathLike[str] | None = None) -> None:
        if storage not in ("memory", "memmap"):
            raise ConfigError(f"storage must be 'memory' or 'memmap', got {storage!r}")
        self.directory: Path | None = None
        if storage == "memmap":
            self.directory = Path(directory) if directory is not None else Path(tempfile.gettempdir())
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{self.directory} cannot hold the files of memmap storage: {error}") from error
        self._free: dict[int, list[SlabBlock]] = {}
        self._grown: dict[int, int] = {}
        self.mapped_bytes = 0
        self.used_bytes = 0

    def take(self, nbytes: int) -> SlabBlock:
        size = block_bytes(nbytes)
        free = self._free.setdefault(size, [])
        if not free:
            self._grow(size, free)
        block = free.pop()
        block.users = 1
        block.slab.used += 1
        self.used_bytes += size
        return block

    def _grow(self, size: int, free: list[SlabBlock]) -> None:
        wanted = min(max(SMALLEST_SLAB, self._grown.get(size, 0)), LARGEST_SLAB)
        count = max(1, wanted // size)
        slab = Slab(size, count, self.directory)
        self._grown[size] = self._grown.get(size, 0) + size * count
        self.mapped_bytes += size * count
        free.extend(SlabBlock(slab, i * size) for i in reversed(range(count)))

    def give(self, block: SlabBlock) -> None:
        slab = block.slab
        slab.used -= 1
        self.used_bytes -= slab.size
        free = self._free.setdefault(slab.size, [])  # a reader may end after the pool was closed
        free.append(block)
        if slab.used == 0 and self.mapped_bytes - self.used_bytes > max(SPARE_BYTES, self.used_bytes):
            self._free[slab.size] = [other for other in free if other.slab is not slab]
            self._grown[slab.size] -= slab.size * slab.count
            self.mapped_bytes -= slab.size * slab.count

    def close(self) -> None:
        """Forget everything; mappings and their files go with the last array that uses them."""
        self._free.clear()
