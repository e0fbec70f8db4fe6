"""Compiled operations on the items of one table, all records held in arrays.

An item is a row of `items`; its columns are records (chunk, first row, rows, row step): one is kept in the row itself, several in
a block of `records` whose length is a power of two.
A *grouped* item has one set of records for all its columns, whose chunks have consecutive ids; otherwise the records of one
column follow those of the one before. The functions never call back into Python, so one call serves a whole batch.
"""

from __future__ import annotations

from typing import Any

from shoal.replay.table.arrays import ITEM_FIELDS, chunk_arrays, table_arrays
from shoal.replay.table.fields import (
    BAD_PRIORITY,
    BORN,
    BYTES,
    DENSE,
    FREE,
    HEAD,
    INSERTED,
    KEY,
    NEXT,
    NEXT_KEY,
    PREV,
    PRIORITY,
    REC,
    REC_FREE,
    REC_TOP,
    RECORD,
    REMOVE,
    SELECT,
    SHAPE,
    SIZE,
    STAMP,
    STAMPED,
    TAIL,
    TIMES,
    UPDATED,
    USED,
)
from shoal.replay.table.kernels import (
    compiled,
    index_fetch,
    index_find,
    index_insert,
    index_remove,
    inlined,
    next_uniform,
    prefetch,
)
from shoal.replay.table.ordering import acceptable, order, pick, settle
from shoal.replay.table.selectors import PRIORITIZED, UNIFORM
from shoal.replay.table.sum_tree import search_batch, total

__all__ = [
    "count_sampled", "draw", "insert", "reindex", "release", "remove", "restore", "trim", "update", "walk",
]  # fmt: skip

AHEAD = 16
ROW_BYTES = 8 * ITEM_FIELDS


@compiled
def _block_class(count: int) -> int:
    size = 0
    while (1 << size) < count:
        size += 1
    return size


@inlined
def _refer(s: Any, c: Any, chunk: int) -> None:
    s.refs[chunk] += 1
    if s.refs[chunk] == 1:
        s.meta[BYTES] += c.nbytes[chunk]
        c.holders[chunk] += 1


@inlined
def _unrefer(s: Any, c: Any, chunk: int) -> None:
    s.refs[chunk] -= 1
    if s.refs[chunk] == 0:
        s.meta[BYTES] -= c.nbytes[chunk]
        c.holders[chunk] -= 1
        if c.holders[chunk] == 0:
            c.freed[c.freed_count[0]] = chunk
            c.freed_count[0] += 1


@inlined
def _add(s: Any, c: Any, key: int, priority: float, now: float, layout: int, records: Any) -> None:
    """Add one item; room in the arrays was made by the caller."""
    slot = s.meta[FREE]
    if slot >= 0:
        s.meta[FREE] = s.links[slot, NEXT]
    else:
        slot = s.meta[USED]
        s.meta[USED] += 1
    count, columns = records.shape[0], max(s.groups[layout], 1)
    block = -1
    if count == 1:
        for field in range(4):
            s.words[slot, RECORD + field] = records[0, field]
        for column in range(columns):
            _refer(s, c, records[0, 0] + column)
    else:
        size_class = _block_class(count)
        block = s.meta[REC_FREE + size_class]
        if block >= 0:
            s.meta[REC_FREE + size_class] = s.records[block, 0]
        else:
            block = s.meta[REC_TOP]
            s.meta[REC_TOP] += 1 << size_class
        for r in range(count):
            for field in range(4):
                s.records[block + r, field] = records[r, field]
            for column in range(columns):
                _refer(s, c, records[r, 0] + column)
    s.items[slot, KEY], s.items[slot, TIMES], s.items[slot, REC] = key, 0, block
    s.items[slot, SHAPE] = (layout << 32) | count
    s.values[slot, PRIORITY], s.values[slot, BORN] = priority, now
    tail = s.meta[TAIL]
    s.links[slot, PREV], s.links[slot, NEXT] = tail, -1
    if tail >= 0:
        s.links[tail, NEXT] = slot
    else:
        s.meta[HEAD] = slot
    s.meta[TAIL] = slot
    s.links[slot, DENSE] = s.meta[SIZE]
    s.dense[s.meta[SIZE]] = slot
    s.meta[SIZE] += 1
    index_insert(s.index, key, slot)
    if s.meta[STAMPED]:
        s.meta[STAMP] += 1
        s.stamps[slot] = s.meta[STAMP]
    order(s, slot, s.meta[SIZE], 1)


@inlined
def _unlink(s: Any, slot: int) -> None:
    """Take an item out of the order, index and selectors; its records stay until `release`."""
    order(s, slot, s.meta[SIZE], -1)
    index_remove(s.index, s.items[slot, KEY])
    before, after = s.links[slot, PREV], s.links[slot, NEXT]
    if before >= 0:
        s.links[before, NEXT] = after
    else:
        s.meta[HEAD] = after
    if after >= 0:
        s.links[after, PREV] = before
    else:
        s.meta[TAIL] = before
    s.meta[SIZE] -= 1
    last = s.dense[s.meta[SIZE]]
    s.dense[s.links[slot, DENSE]] = last
    s.links[last, DENSE] = s.links[slot, DENSE]
    s.items[slot, KEY] = -1


@inlined
def _release(s: Any, c: Any, slot: int) -> None:
    """Give back the records, chunk references and slot of an unlinked item."""
    shape, block = s.items[slot, SHAPE], s.items[slot, REC]
    count, columns = shape & 0xFFFFFFFF, max(s.groups[shape >> 32], 1)
    if count == 1:
        for column in range(columns):
            _unrefer(s, c, s.words[slot, RECORD] + column)
    else:
        for r in range(count):
            for column in range(columns):
                _unrefer(s, c, s.records[block + r, 0] + column)
        size_class = _block_class(count)
        s.records[block, 0] = s.meta[REC_FREE + size_class]
        s.meta[REC_FREE + size_class] = block
    s.links[slot, NEXT] = s.meta[FREE]
    s.meta[FREE] = slot


@inlined
def _remove_excess(s: Any, c: Any, max_size: int, max_bytes: int) -> int:
    """Let the remover pick victims until the limits hold; bytes, which count whole chunks, leave one item."""
    removed = 0
    while s.meta[SIZE] > max_size or (s.meta[BYTES] > max_bytes and s.meta[SIZE] > 1):
        victim = pick(s, s.meta[REMOVE], s.rem_tree, s.rem_offsets, s.rem_heap)
        _unlink(s, victim)
        _release(s, c, victim)
        removed += 1
    return removed


@compiled
def trim(addresses: Any, max_size: int, max_bytes: int) -> int:
    """Remove what is above the limits; returns how many items that were."""
    s, c = table_arrays(addresses), chunk_arrays(addresses)
    removed = _remove_excess(s, c, max_size, max_bytes)
    settle(s)
    return removed


@compiled
def insert(
    addresses: Any, keys: Any, fresh: bool, priorities: Any, records: Any, first: int, limit: int, now: float, layout: int,
    max_size: int, max_bytes: int, status: Any,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Insert items first.. until `limit` permissions are used; records is int32[n, k, 4].

    Where the items are fresh, new keys are written to keys. Returns (items handled, inserted, removed, refused).
    """
    s, c = table_arrays(addresses), chunk_arrays(addresses)
    used = removed = refused = 0
    at = first
    n = priorities.shape[0]
    while at < n:
        priority = priorities[at]
        if not acceptable(s, priority):
            status[at] = BAD_PRIORITY
            if fresh:
                keys[at] = -1
            refused += 1
            at += 1
            continue
        if used == limit:
            break
        slot = -1 if fresh else index_find(s.index, keys[at])
        if slot >= 0:
            _update_one(s, slot, priority)
            status[at] = UPDATED
            at += 1
            continue
        if fresh:
            keys[at] = s.meta[NEXT_KEY]
            s.meta[NEXT_KEY] += 1
        _add(s, c, keys[at], priority, now, layout, records[at])
        status[at] = INSERTED
        used += 1
        at += 1
        removed += _remove_excess(s, c, max_size, max_bytes)
    settle(s)
    return at - first, used, removed, refused


@inlined
def _update_one(s: Any, slot: int, priority: float) -> None:
    s.values[slot, PRIORITY] = priority
    if s.meta[STAMPED]:
        s.meta[STAMP] += 1
        s.stamps[slot] = s.meta[STAMP]
    order(s, slot, s.meta[SIZE], 0)


@compiled
def update(addresses: Any, keys: Any, priorities: Any, drawn: Any) -> tuple[int, int]:
    """Set priorities of known keys. Returns (unknown keys, refused priorities).

    drawn is int64[3, n] as `draw` filled it: where it has the same keys in the same places, its slots spare the search.
    """
    s = table_arrays(addresses)
    unknown = refused = 0
    count, hints = keys.shape[0], drawn.shape[1]
    for i in range(hints, min(hints + AHEAD, count)):
        index_fetch(s.index, keys[i])
    for i in range(count):
        if i + AHEAD < count and (i + AHEAD >= hints or drawn[1, i + AHEAD] != keys[i + AHEAD]):
            index_fetch(s.index, keys[i + AHEAD])
        if not acceptable(s, priorities[i]):
            refused += 1
            continue
        slot = drawn[0, i] if i < hints else -1
        if slot < 0 or drawn[1, i] != keys[i] or s.items[slot, KEY] != keys[i]:
            slot = index_find(s.index, keys[i])
        if slot < 0:
            unknown += 1
        else:
            _update_one(s, slot, priorities[i])
    settle(s)
    return unknown, refused


@compiled
def remove(addresses: Any, keys: Any) -> int:
    """Delete the items of known keys; returns how many there were."""
    s, c = table_arrays(addresses), chunk_arrays(addresses)
    removed = 0
    for i in range(keys.shape[0]):
        slot = index_find(s.index, keys[i])
        if slot >= 0:
            _unlink(s, slot)
            _release(s, c, slot)
            removed += 1
    settle(s)
    return removed


@compiled
def count_sampled(addresses: Any, keys: Any) -> None:
    """Count one consumed sample for every key that is still present."""
    s = table_arrays(addresses)
    for i in range(keys.shape[0]):
        slot = index_find(s.index, keys[i])
        if slot >= 0:
            s.items[slot, TIMES] += 1


@inlined
def _describe(s: Any, slot: int, at: int, counts: Any, numbers: Any) -> None:
    counts[1, at] = s.items[slot, KEY]
    counts[2, at] = s.items[slot, TIMES]
    numbers[1, at] = s.values[slot, PRIORITY]


@inlined
def _draw_batch(s: Any, n: int, counted: bool, counts: Any, numbers: Any) -> bool:
    """n proportional draws at once; False where every leaf is zero."""
    sum_, size, mix = total(s.sel_tree, s.sel_offsets), s.meta[SIZE], s.powers[4]
    if sum_ <= 0.0:
        return False
    slots = counts[0]
    for i in range(n):
        numbers[0, i] = next_uniform(s.rng) * sum_
    search_batch(s.sel_tree, s.sel_offsets, numbers[0], slots, n)
    if mix > 0.0:
        for i in range(n):
            if next_uniform(s.rng) < mix:
                slots[i] = s.dense[int(next_uniform(s.rng) * size)]
    first = s.items.ctypes.data
    for i in range(n):
        prefetch(first + slots[i] * ROW_BYTES)
    for i in range(n):
        slot = slots[i]
        numbers[0, i] = (1.0 - mix) * s.sel_tree[slot] / sum_ + mix / size
        s.items[slot, TIMES] += counted
        _describe(s, slot, i, counts, numbers)
    return True


@inlined
def _draw_singly(
    s: Any, n: int, min_size: int, max_times: int, counted: bool, counts: Any, numbers: Any, doomed: Any
) -> tuple[int, int]:
    """Draws one after the other, each seeing what the one before has changed."""
    kind = s.meta[SELECT]
    gone = drawn = 0
    while drawn < n:
        size = s.meta[SIZE]
        if size < min_size or size == 0:
            break
        probability = 1.0
        if kind == UNIFORM:
            probability = 1.0 / size
        slot = pick(s, kind, s.sel_tree, s.sel_offsets, s.sel_heap)
        if kind == PRIORITIZED:
            mix, sum_ = s.powers[4], total(s.sel_tree, s.sel_offsets)
            if mix > 0.0 and next_uniform(s.rng) < mix:
                slot = int(s.dense[int(next_uniform(s.rng) * size)])
            probability = (1.0 - mix) * s.sel_tree[slot] / sum_ + mix / size if sum_ > 0.0 else 1.0 / size
        counts[0, drawn] = slot
        numbers[0, drawn] = probability
        s.items[slot, TIMES] += counted
        _describe(s, slot, drawn, counts, numbers)
        drawn += 1
        if max_times > 0 and s.items[slot, TIMES] >= max_times:
            _unlink(s, slot)
            settle(s)
            doomed[gone] = slot
            gone += 1
    return drawn, gone


@compiled
def draw(
    addresses: Any, n: int, min_size: int, max_times: int, counted: bool, counts: Any, numbers: Any, doomed: Any, longest: Any
) -> tuple[int, int, int, bool]:
    """Draw up to n items; counts is int64[3, n] (slots, keys, times sampled), numbers float64[2, n] (probabilities, priorities).

    Stops when fewer than min_size are left. Items that reach max_times are unlinked and listed in doomed; the caller
    releases them after it has copied their data. The greatest extent of every column goes into longest. Returns (draws,
    doomed, rows that the plan of their copies needs, whether all items have the same lengths).
    """
    s = table_arrays(addresses)
    if s.meta[SIZE] < min_size or s.meta[SIZE] == 0:
        return 0, 0, 0, True
    drawn, gone = n, 0
    if not (max_times == 0 and s.meta[SELECT] == PRIORITIZED and _draw_batch(s, n, counted, counts, numbers)):
        drawn, gone = _draw_singly(s, n, min_size, max_times, counted, counts, numbers, doomed)
    rows, alike, columns = 0, True, s.lengths.shape[0]
    first = s.items[counts[0, 0], SHAPE] >> 32
    for column in range(columns):
        longest[column] = s.extents[column, first]
    for i in range(drawn):
        shape = s.items[counts[0, i], SHAPE]
        layout = shape >> 32
        rows += (shape & 0xFFFFFFFF) * (columns if s.groups[layout] > 0 else 1)
        if layout != first:
            for column in range(columns):
                if s.extents[column, layout] != longest[column]:
                    alike = False
                    longest[column] = max(longest[column], s.extents[column, layout])
    return drawn, gone, rows, alike


@compiled
def walk(addresses: Any, order: Any) -> None:
    """All slots, oldest first."""
    s = table_arrays(addresses)
    slot = s.meta[HEAD]
    for i in range(s.meta[SIZE]):
        order[i] = slot
        slot = s.links[slot, NEXT]


@compiled
def restore(addresses: Any, keys: Any, times: Any, born: Any) -> None:
    """Give restored items their counts and times of insertion."""
    s = table_arrays(addresses)
    for i in range(keys.shape[0]):
        slot = index_find(s.index, keys[i])
        if slot >= 0:
            s.items[slot, TIMES] = times[i]
            s.values[slot, BORN] = born[i]


@compiled
def reindex(addresses: Any, index: Any) -> None:
    """Fill an empty index with the keys of all items."""
    s = table_arrays(addresses)
    for i in range(s.meta[SIZE]):
        slot = s.dense[i]
        index_insert(index, s.items[slot, KEY], slot)


@compiled
def release(addresses: Any, doomed: Any, count: int) -> None:
    """Let go of what `draw` unlinked."""
    s, c = table_arrays(addresses), chunk_arrays(addresses)
    for i in range(count):
        _release(s, c, doomed[i])
