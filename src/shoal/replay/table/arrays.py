"""The arrays of a table, and their addresses in one array for compiled code.

Handing an array to compiled code costs a tenth of a microsecond, more than the work on one item, so a call is handed one array
instead of thirty: int64[2, n], the address and length of every array in the order of `TableArrays` and `ChunkArrays`. It is written
anew when an array is replaced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.replay.table.kernels import array_at, inlined

__all__ = [
    "ITEM_FIELDS", "LINKS", "META", "POWERS", "ChunkArrays", "TableArrays", "chunk_arrays", "table_arrays", "write_addresses",
]  # fmt: skip

ITEM_FIELDS = 8  # one cache line
LINKS = 3
META = 64
POWERS = 5
RNG = 1


class TableArrays(NamedTuple):
    """The arrays of one table."""

    meta: Any  # int64[META]
    powers: Any  # float64[POWERS]: exponents of selector and remover, least and greatest priority, the selector's uniform mix
    items: Any  # int64[N, ITEM_FIELDS]
    values: Any  # float64[N, ITEM_FIELDS]: the same memory, for the priority and the time of insertion
    words: Any  # int32[N, 2 * ITEM_FIELDS]: the same memory, for the record of an item that has only one
    links: Any  # int32[N, LINKS]: the neighbours by age, and the place in dense
    stamps: Any  # int64[N]
    dense: Any  # int64[N]: the slots in use, in no order
    index: Any  # int64[H, 2]: key -> slot
    records: Any  # int32[R, 4]: of items that have several
    refs: Any  # int32[chunks]: how many items of this table refer to a chunk
    sel_tree: Any
    sel_offsets: Any
    sel_heap: Any
    rem_tree: Any
    rem_offsets: Any
    rem_heap: Any
    dirty: Any  # int64[D]: leaves of the selector's tree whose sums wait for refresh
    rng: Any  # uint64[RNG]
    groups: Any  # int64[L]: of every layout, the number of grouped columns, or 0
    lengths: Any  # int64[C, L]: cells of every column
    extents: Any  # int64[C, L]: the same as sampled, also of a value given whole: its first axis
    sizes: Any  # int64[C, L]: bytes of a cell


class ChunkArrays(NamedTuple):
    """The arrays of the chunk store that all tables share."""

    address: Any  # int64[chunks]: where the rows lie; 0 for an encoded chunk
    stride: Any  # int64[chunks]: bytes from row to row
    nbytes: Any  # int64[chunks]
    holders: Any  # int32[chunks]: tables and writers that hold the chunk
    freed: Any  # int64[chunks]: ids whose last holder has gone
    freed_count: Any  # int64[1]


ENTRIES = len(TableArrays._fields)


def write_addresses(state: TableArrays, chunks: ChunkArrays) -> npt.NDArray[np.int64]:
    """The addresses and lengths (of the axis that varies) of all arrays. The caller keeps the arrays alive."""
    arrays = (*state, *chunks)
    names = (*TableArrays._fields, *ChunkArrays._fields)
    varying = [array.shape[1 if name.endswith("heap") else 0] for name, array in zip(names, arrays, strict=True)]
    return np.array([[array.ctypes.data for array in arrays], varying], np.int64)


@inlined
def table_arrays(addresses: Any) -> TableArrays:
    """The arrays of a table, in compiled code."""
    at, n = addresses[0], addresses[1]
    return TableArrays(
        array_at(at[0], (META,), np.int64),
        array_at(at[1], (POWERS,), np.float64),
        array_at(at[2], (n[2], ITEM_FIELDS), np.int64),
        array_at(at[3], (n[3], ITEM_FIELDS), np.float64),
        array_at(at[4], (n[4], 2 * ITEM_FIELDS), np.int32),
        array_at(at[5], (n[5], LINKS), np.int32),
        array_at(at[6], (n[6],), np.int64),
        array_at(at[7], (n[7],), np.int64),
        array_at(at[8], (n[8], 2), np.int64),
        array_at(at[9], (n[9], 4), np.int32),
        array_at(at[10], (n[10],), np.int32),
        array_at(at[11], (n[11],), np.float64),
        array_at(at[12], (n[12],), np.int64),
        array_at(at[13], (2, n[13]), np.int64),
        array_at(at[14], (n[14],), np.float64),
        array_at(at[15], (n[15],), np.int64),
        array_at(at[16], (2, n[16]), np.int64),
        array_at(at[17], (n[17],), np.int64),
        array_at(at[18], (RNG,), np.uint64),
        array_at(at[19], (n[19],), np.int64),
        array_at(at[20], (n[20], n[19]), np.int64),
        array_at(at[21], (n[21], n[19]), np.int64),
        array_at(at[22], (n[22], n[19]), np.int64),
    )


@inlined
def chunk_arrays(addresses: Any) -> ChunkArrays:
    """The arrays of the chunk store, in compiled code."""
    at, n = addresses[0, ENTRIES:], addresses[1, ENTRIES:]
    return ChunkArrays(
        array_at(at[0], (n[0],), np.int64),
        array_at(at[1], (n[1],), np.int64),
        array_at(at[2], (n[2],), np.int64),
        array_at(at[3], (n[3],), np.int32),
        array_at(at[4], (n[4],), np.int64),
        array_at(at[5], (n[5],), np.int64),
    )
