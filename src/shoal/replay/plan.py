"""From drawn items to a list of copies: made under the table's lock, carried out outside it.

A row of a plan is (destination, source, cells, source stride in bytes, cell bytes), as `kernels.run_plan` reads it.
"""

from __future__ import annotations

from typing import Any

from shoal.replay.items import REC, SHAPE
from shoal.replay.kernels import compiled, prefetch

__all__ = ["chunks_of", "lay_out", "longest", "plan_rows"]


@compiled
def plan_rows(s: Any, slots: Any, count: int, groups: Any, columns: int) -> int:
    """How many rows the plan of these items needs."""
    rows = 0
    for i in range(count):
        shape = s.items[slots[i], SHAPE]
        rows += (shape & 0xFFFFFFFF) * (columns if groups[shape >> 32] > 0 else 1)
    return rows


@compiled
def longest(s: Any, slots: Any, count: int, lengths: Any, columns: int, result: Any) -> bool:
    """The greatest length of every column into result; True if all items are alike."""
    first = s.items[slots[0], SHAPE] >> 32
    alike = True
    for column in range(columns):
        result[column] = lengths[first, column]
    for i in range(1, count):
        layout = s.items[slots[i], SHAPE] >> 32
        if layout != first:
            for column in range(columns):
                if lengths[layout, column] != result[column]:
                    alike = False
                    result[column] = max(result[column], lengths[layout, column])
    return alike


@compiled
def lay_out(
    s: Any, c: Any, slots: Any, count: int, groups: Any, lengths: Any, bases: Any, sizes: Any, strides: Any, plan: Any
) -> int:
    """Fill the plan. bases, sizes and strides (per item) are the columns' destination addresses and bytes."""
    at = 0
    for i in range(count):
        shape = s.items[slots[i], SHAPE]
        records, layout, block = shape & 0xFFFFFFFF, shape >> 32, s.items[slots[i], REC]
        group = groups[layout]
        column = done = 0
        for r in range(records):
            record = block + r
            chunk, start = s.records[record, 0], s.records[record, 1]
            cells, step = s.records[record, 2], s.records[record, 3]
            if group > 0:
                for g in range(group):
                    size = sizes[g]
                    plan[at, 0] = bases[g] + i * strides[g] + done * size
                    plan[at, 1] = c.address[chunk + g] + start * size
                    prefetch(plan[at, 1])
                    plan[at, 2], plan[at, 3], plan[at, 4] = cells, step * size, size
                    at += 1
                done += cells
                continue
            while done == lengths[layout, column]:
                column += 1
                done = 0
            size = sizes[column]
            plan[at, 0] = bases[column] + i * strides[column] + done * size
            plan[at, 1] = c.address[chunk] + start * size
            prefetch(plan[at, 1])
            plan[at, 2], plan[at, 3], plan[at, 4] = cells, step * size, size
            at += 1
            done += cells
    return at


@compiled
def chunks_of(s: Any, c: Any, slots: Any, count: int, groups: Any, found: Any) -> int:
    """The encoded chunks (address 0) these items need, with repeats; at most found.shape[0] of them."""
    at = 0
    for i in range(count):
        shape = s.items[slots[i], SHAPE]
        block = s.items[slots[i], REC]
        for r in range(shape & 0xFFFFFFFF):
            for g in range(max(groups[shape >> 32], 1)):
                chunk = s.records[block + r, 0] + g
                if c.address[chunk] == 0 and at < found.shape[0]:
                    found[at] = chunk
                    at += 1
    return at
