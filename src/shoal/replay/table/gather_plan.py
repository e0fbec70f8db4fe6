"""From drawn items to a list of copies: made under the table's lock, carried out outside it.

A row of a plan is (destination, source, cells, source stride in bytes, cell bytes), as `kernels.run_plan` reads it. Where the chunk
is encoded, its row is (destination, -1 - chunk, cells, first row, step): its rows are decoded to their place one by one.
"""

from __future__ import annotations

from typing import Any

from shoal.replay.table.arrays import chunk_arrays, table_arrays
from shoal.replay.table.fields import REC, RECORD, SHAPE
from shoal.replay.table.kernels import compiled, inlined, prefetch

__all__ = ["encoded_chunks", "lay_out"]


@inlined
def _record(s: Any, slot: int, count: int, r: int, field: int) -> int:
    """A field of an item's r-th record."""
    return int(s.words[slot, RECORD + field] if count == 1 else s.records[s.items[slot, REC] + r, field])


@compiled
def lay_out(addresses: Any, slots: Any, count: int, address: int, geometry: Any, plan: Any) -> int:
    """Fill the plan of copies to an address; geometry int64[2, C] has the bytes of an item and the offset."""
    s, c = table_arrays(addresses), chunk_arrays(addresses)
    at = 0
    for i in range(count):
        slot = slots[i]
        shape = s.items[slot, SHAPE]
        records, layout = shape & 0xFFFFFFFF, shape >> 32
        group = s.groups[layout]
        column = done = 0
        for r in range(records):
            chunk, start = _record(s, slot, records, r, 0), _record(s, slot, records, r, 1)
            cells, step = _record(s, slot, records, r, 2), _record(s, slot, records, r, 3)
            while group == 0 and done == s.lengths[column, layout]:
                column += 1
                done = 0
            for g in range(max(group, 1)):
                size, stride = s.sizes[column + g, layout], c.stride[chunk + g]
                plan[at, 0] = address + geometry[1, column + g] + i * geometry[0, column + g] + done * size
                come = c.address[chunk + g]
                if come != 0:
                    come, step_by, last = come + start * stride, step * stride, size
                    prefetch(come)
                else:
                    come, step_by, last = -1 - (chunk + g), start, step
                plan[at, 1], plan[at, 2], plan[at, 3], plan[at, 4] = come, cells, step_by, last
                at += 1
            done += cells
    return at


@compiled
def encoded_chunks(addresses: Any, slots: Any, count: int, found: Any) -> int:
    """The encoded chunks (address 0) these items need, with repeats; at most found.shape[0] of them."""
    s, c = table_arrays(addresses), chunk_arrays(addresses)
    at = 0
    for i in range(count):
        slot = slots[i]
        shape = s.items[slot, SHAPE]
        records = shape & 0xFFFFFFFF
        for r in range(records):
            for g in range(max(s.groups[shape >> 32], 1)):
                chunk = _record(s, slot, records, r, 0) + g
                if c.address[chunk] == 0 and at < found.shape[0]:
                    found[at] = chunk
                    at += 1
    return at
