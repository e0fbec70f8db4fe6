"""The compiled ground: a typed front for Numba, raw copies, random numbers and a key index.

Everything here works on plain arrays, releases the GIL and is cached on disk. Callers pass checked indices: compiled code has
no bounds checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

__all__ = [
    "array_at", "compiled", "copy_bytes", "index_fetch", "index_find", "index_insert", "index_remove", "inlined", "next_uniform",
    "prefetch", "run_plan",
]  # fmt: skip

_njit = cast(Any, njit)  # its stubs do not know the option _nrt
_cgutils = cast(Any, cgutils)
_make_array, _populate_array = cast(Any, make_array), cast(Any, populate_array)

Function = TypeVar("Function", bound=Callable[..., Any])


COMPILED = ("arrays", "compression", "fields", "gather_plan", "item_kernels", "kernels", "ordering", "selectors", "sum_tree")
STAMP = tuple((name, os.stat(Path(__file__).with_name(f"{name}.py")).st_mtime_ns) for name in COMPILED)


def compiled(function: Function) -> Function:
    """njit with an on-disk cache, without the GIL and without reference counts (nothing here allocates).

    Numba takes a cached function to be good as long as its own file is unchanged, but it holds code of the other files as well.
    """
    dispatcher = _njit(cache=True, nogil=True, _nrt=False)(function)
    dispatcher._cache._cache_file._source_stamp = STAMP
    return cast(Function, dispatcher)


def inlined(function: Function) -> Function:
    """Like compiled, for helpers that take a table's whole state: passing thirty arrays by value costs more than they do."""
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


def _array_at(typingctx: Any, address: Any, shape: Any, dtype: Any) -> Any:
    kind = types.Array(dtype.dtype, len(shape), "C")
    signature = kind(types.int64, shape, dtype)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = context.get_value_type(types.intp)
        item = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        given = _cgutils.unpack_tuple(builder, arguments[1])
        lengths = [context.cast(builder, n, came, types.intp) for n, came in zip(given, shape, strict=True)]
        strides: list[Any] = []
        at = ir.Constant(number, item)
        for length in reversed(lengths):
            strides.insert(0, at)
            at = builder.mul(at, length)
        array = _make_array(kind)(context, builder)
        data = builder.inttoptr(arguments[0], context.get_data_type(kind.dtype).as_pointer())
        _populate_array(array, data, lengths, strides, ir.Constant(number, item), None)
        return array._getvalue()

    return signature, codegen


array_at = cast(Callable[[int, Any, Any], Any], intrinsic(_array_at))
"""The array of a shape and dtype that lies at an address; only for compiled code."""


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
            size, cells = cells * size, 1
        for _ in range(cells):
            if size == 8:  # a length known beforehand makes a copy a single move
                copy_bytes(to, come, 8)
            elif size == 4:
                copy_bytes(to, come, 4)
            elif size == 16:
                copy_bytes(to, come, 16)
            else:
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
