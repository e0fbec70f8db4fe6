"""The compiled ground: a typed front for Numba, raw copies, random numbers and a key index.

Everything here works on plain arrays, releases the GIL and is cached on disk. Callers pass checked indices: compiled code has
no bounds checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "compiled", "copy_bytes", "index_fetch", "index_find", "index_insert", "index_remove", "inlined", "next_uniform",
    "prefetch", "run_plan",
]  # fmt: skip

_njit = cast(Any, njit)  # its stubs do not know the option _nrt
_cgutils = cast(Any, cgutils)

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """njit with an on-disk cache, without the GIL and without reference counts (nothing here allocates)."""
    return cast(Function, _njit(cache=True, nogil=True, _nrt=False)(function))


def inlined(function: Function) -> Function:
    """Like compiled, for helpers that take a table's whole state: passing forty arrays by value costs more than they do."""
    return cast(Function, _njit(inline="always", cache=True, nogil=True, _nrt=False)(function))


def _copy_bytes(typingctx: Any, destination: Any, source: Any, size: Any) -> Any:
    signature = types.void(types.int64, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        to, come, count = arguments
        _cgutils.raw_memcpy(builder, builder.inttoptr(to, pointer), builder.inttoptr(come, pointer), count, 1)
        return context.get_dummy_value()

    return signature, codegen


copy_bytes = cast(Callable[[int, int, int], None], intrinsic(_copy_bytes))
"""Copy `size` bytes between two addresses; only for compiled code."""


def _prefetch(typingctx: Any, address: Any) -> Any:
    signature = types.void(types.int64)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = _cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return signature, codegen


prefetch = cast(Callable[[int], None], intrinsic(_prefetch))
"""Ask for the cache line at an address without waiting for it; only for compiled code.

Where a batch touches random places of a table of a million items, fetching ahead makes their cache misses overlap."""


@compiled
def run_plan(plan: Any, count: int) -> None:
    """Carry out copies; a row of plan is (destination, source, cells, source stride in bytes, cell bytes)."""
    for i in range(count):
        to, come, cells, stride, size = plan[i, 0], plan[i, 1], plan[i, 2], plan[i, 3], plan[i, 4]
        if cells == 1 or stride == size:
            copy_bytes(to, come, cells * size)
        else:
            for _ in range(cells):
                copy_bytes(to, come, size)
                to += size
                come += stride


@compiled
def next_uniform(rng: Any) -> float:
    """The next double in [0, 1) of a splitmix64 stream; rng is uint64[1]."""
    state = rng[0] + np.uint64(0x9E3779B97F4A7C15)
    rng[0] = state
    z = state
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


# The index: open addressing with linear probing over int64[H, 2] rows (key, slot); slot -1 marks an empty row. Four consecutive
# keys share a cache line, since keys are given out in order and mostly removed in order.


@compiled
def _home(key: int, size: int) -> Any:
    mixed = (np.uint64(key) >> np.uint64(2)) * np.uint64(0x9E3779B97F4A7C15)
    place = ((mixed >> np.uint64(20)) << np.uint64(2)) | (np.uint64(key) & np.uint64(3))
    return np.int64(place & np.uint64(size - 1))


@compiled
def index_fetch(index: Any, key: int) -> None:
    """Fetch the cache line where the search for a key begins."""
    prefetch(index.ctypes.data + 16 * _home(key, index.shape[0]))


@compiled
def index_find(index: Any, key: int) -> int:
    """The slot of a key, or -1."""
    size = index.shape[0]
    at = _home(key, size)
    while index[at, 1] >= 0:
        if index[at, 0] == key:
            return int(index[at, 1])
        at = (at + 1) & (size - 1)
    return -1


@compiled
def index_insert(index: Any, key: int, slot: int) -> None:
    size = index.shape[0]
    at = _home(key, size)
    while index[at, 1] >= 0:
        at = (at + 1) & (size - 1)
    index[at, 0] = key
    index[at, 1] = slot


@compiled
def index_remove(index: Any, key: int) -> None:
    """Remove a present key, moving later entries of its run back so that no tombstones pile up."""
    size = index.shape[0]
    at = _home(key, size)
    while index[at, 0] != key or index[at, 1] < 0:
        at = (at + 1) & (size - 1)
    hole = at
    while True:
        at = (at + 1) & (size - 1)
        if index[at, 1] < 0:
            break
        home = _home(index[at, 0], size)
        if ((at - home) & (size - 1)) >= ((at - hole) & (size - 1)):
            index[hole, 0] = index[at, 0]
            index[hole, 1] = index[at, 1]
            hole = at
    index[hole, 1] = -1
