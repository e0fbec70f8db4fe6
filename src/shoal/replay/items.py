"""Compiled operations on the items of one table, all records held in arrays.

An item is a row of `items`; its columns are `records` (chunk, first row, rows, row step), kept in blocks of a power of two.
A *grouped* item has one set of records for all its columns, whose chunks have consecutive ids; otherwise the records of one
column follow those of the one before. The functions never call back into Python, so one call serves a whole batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shoal.replay.kernels import (
    compiled,
    index_fetch,
    index_find,
    index_insert,
    index_remove,
    inlined,
    next_uniform,
    prefetch,
)
from shoal.replay.orders import (
    BAD_PRIORITY,
    BYTES,
    DENSE,
    FREE,
    HEAD,
    INSERTED,
    ITEM_FIELDS,
    KEY,
    META,
    NEXT,
    NEXT_KEY,
    PREV,
    PRIORITY,
    REC,
    REC_FREE,
    REC_TOP,
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
    WAITING,
    State,
    acceptable,
    order,
    pick,
    settle,
)
from shoal.replay.selectors import PRIORITIZED, UNIFORM
from shoal.replay.tree import descend, total

__all__ = [
    "BAD_PRIORITY", "BYTES", "FREE", "HEAD", "ITEM_FIELDS", "KEY", "META", "NEXT_KEY", "PRIORITY", "REC", "REC_FREE", "REC_TOP",
    "REMOVE", "SELECT", "SHAPE", "SIZE", "STAMPED", "TAIL", "TIMES", "WAITING", "Chunks", "State",
    "count_sampled", "draw", "insert", "reindex", "release", "remove", "restore", "settle", "trim", "update",
    "walk",
]  # fmt: skip

AHEAD = 16
ROW_BYTES = 8 * ITEM_FIELDS


class Chunks(NamedTuple):
    """The arrays of the chunk store that all tables share."""

    address: Any  # int64[chunks]: where the rows lie; 0 for an encoded chunk
    nbytes: Any  # int64[chunks]
    holders: Any  # int32[chunks]: tables and writers that hold the chunk
    freed: Any  # int64[chunks]: ids whose last holder has gone
    freed_count: Any  # int64[1]


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
def _add(s: Any, c: Any, key: int, priority: float, now: float, layout: int, group: int, records: Any) -> int:
    """Add one item; room in the arrays was made by the caller. group is the number of grouped columns, or 0."""
    slot = s.meta[FREE]
    if slot >= 0:
        s.meta[FREE] = s.items[slot, NEXT]
    else:
        slot = s.meta[USED]
        s.meta[USED] += 1
    count = records.shape[0]
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
        for column in range(max(group, 1)):
            _refer(s, c, records[r, 0] + column)
    item = s.items[slot]
    item[KEY], item[TIMES], item[REC] = key, 0, block
    item[SHAPE] = (layout << 32) | count
    item[PREV], item[NEXT] = s.meta[TAIL], -1
    if s.meta[TAIL] >= 0:
        s.items[s.meta[TAIL], NEXT] = slot
    else:
        s.meta[HEAD] = slot
    s.meta[TAIL] = slot
    item[DENSE] = s.meta[SIZE]
    s.dense[s.meta[SIZE]] = slot
    s.meta[SIZE] += 1
    index_insert(s.index, key, slot)
    s.values[slot, PRIORITY], s.born[slot] = priority, now
    if s.meta[STAMPED]:
        s.meta[STAMP] += 1
        s.stamps[slot] = s.meta[STAMP]
    order(s, slot, s.meta[SIZE], 1)
    return int(slot)


@inlined
def _unlink(s: Any, slot: int) -> None:
    """Take an item out of the order, index and selectors; its records stay until `release`."""
    item = s.items[slot]
    order(s, slot, s.meta[SIZE], -1)
    index_remove(s.index, item[KEY])
    if item[PREV] >= 0:
        s.items[item[PREV], NEXT] = item[NEXT]
    else:
        s.meta[HEAD] = item[NEXT]
    if item[NEXT] >= 0:
        s.items[item[NEXT], PREV] = item[PREV]
    else:
        s.meta[TAIL] = item[PREV]
    s.meta[SIZE] -= 1
    last = s.dense[s.meta[SIZE]]
    s.dense[item[DENSE]] = last
    s.items[last, DENSE] = item[DENSE]
    item[KEY] = -1


@inlined
def _release(s: Any, c: Any, slot: int, groups: Any) -> None:
    """Give back the records, chunk references and slot of an unlinked item."""
    item = s.items[slot]
    count, layout, block = item[SHAPE] & 0xFFFFFFFF, item[SHAPE] >> 32, item[REC]
    for r in range(count):
        for column in range(max(groups[layout], 1)):
            _unrefer(s, c, s.records[block + r, 0] + column)
    size_class = _block_class(count)
    s.records[block, 0] = s.meta[REC_FREE + size_class]
    s.meta[REC_FREE + size_class] = block
    item[NEXT] = s.meta[FREE]
    s.meta[FREE] = slot


@inlined
def _remove_excess(s: Any, c: Any, groups: Any, max_size: int, max_bytes: int) -> int:
    """Let the remover pick victims until the limits hold."""
    removed = 0
    while s.meta[SIZE] > max_size or (s.meta[BYTES] > max_bytes and s.meta[SIZE] > 0):
        victim = pick(s, s.meta[REMOVE], s.rem_tree, s.rem_offsets, s.rem_heap)
        _unlink(s, victim)
        _release(s, c, victim, groups)
        removed += 1
    return removed


@compiled
def trim(s: Any, c: Any, groups: Any, max_size: int, max_bytes: int) -> int:
    """Remove what is above the limits; returns how many items that were."""
    removed = _remove_excess(s, c, groups, max_size, max_bytes)
    settle(s)
    return removed


@compiled
def insert(
    s: Any, c: Any, keys: Any, priorities: Any, records: Any, first: int, limit: int, now: float, layout: int,
    groups: Any, max_size: int, max_bytes: int, status: Any,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Insert items first.. until `limit` permissions are used; records is int32[n, k, 4].

    keys[i] < 0 asks for a new key, which is written back. Returns (items handled, inserted, removed, refused).
    """
    used = removed = refused = 0
    at = first
    n = priorities.shape[0]
    while at < n:
        priority = priorities[at]
        if not acceptable(s, priority):
            status[at] = BAD_PRIORITY
            refused += 1
            at += 1
            continue
        if used == limit:
            break
        slot = index_find(s.index, keys[at]) if keys[at] >= 0 else -1
        if slot >= 0:
            _update_one(s, slot, priority)
            status[at] = UPDATED
            at += 1
            continue
        if keys[at] < 0:
            keys[at] = s.meta[NEXT_KEY]
            s.meta[NEXT_KEY] += 1
        _add(s, c, keys[at], priority, now, layout, groups[layout], records[at])
        status[at] = INSERTED
        used += 1
        at += 1
        removed += _remove_excess(s, c, groups, max_size, max_bytes)
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
def update(s: Any, keys: Any, priorities: Any) -> tuple[int, int]:
    """Set priorities of known keys. Returns (unknown keys, refused priorities)."""
    unknown = refused = 0
    count = keys.shape[0]
    for i in range(min(AHEAD, count)):
        index_fetch(s.index, keys[i])
    for i in range(count):
        if i + AHEAD < count:
            index_fetch(s.index, keys[i + AHEAD])
        if not acceptable(s, priorities[i]):
            refused += 1
            continue
        slot = index_find(s.index, keys[i])
        if slot < 0:
            unknown += 1
        else:
            _update_one(s, slot, priorities[i])
    settle(s)
    return unknown, refused


@compiled
def remove(s: Any, c: Any, keys: Any, groups: Any) -> int:
    """Delete the items of known keys; returns how many there were."""
    removed = 0
    for i in range(keys.shape[0]):
        slot = index_find(s.index, keys[i])
        if slot >= 0:
            _unlink(s, slot)
            _release(s, c, slot, groups)
            removed += 1
    settle(s)
    return removed


@compiled
def count_sampled(s: Any, keys: Any) -> None:
    """Count one consumed sample for every key that is still present."""
    for i in range(keys.shape[0]):
        slot = index_find(s.index, keys[i])
        if slot >= 0:
            s.items[slot, TIMES] += 1


@inlined
def _describe(s: Any, slot: int, at: int, keys: Any, numbers: Any, times: Any) -> None:
    keys[at] = s.items[slot, KEY]
    numbers[1, at] = s.values[slot, PRIORITY]
    times[at] = s.items[slot, TIMES]


@compiled
def draw(
    s: Any, n: int, min_size: int, max_times: int, counted: bool, slots: Any, keys: Any, numbers: Any, times: Any,
    doomed: Any,
) -> tuple[int, int]:  # fmt: skip
    """Draw up to n items; numbers is float64[2, n] (probabilities, priorities).

    Stops when fewer than min_size are left. Items that reach max_times are unlinked and listed in doomed; the caller
    releases them after it has copied their data. Returns (draws, doomed).
    """
    kind = s.meta[SELECT]
    size = s.meta[SIZE]
    if size < min_size or size == 0:
        return 0, 0
    if max_times == 0 and kind == PRIORITIZED:
        sum_ = total(s.sel_tree, s.sel_offsets)
        if sum_ > 0.0:
            for i in range(n):
                numbers[0, i] = next_uniform(s.rng) * sum_
            descend(s.sel_tree, s.sel_offsets, numbers[0], slots, n)
            mix = s.powers[4]
            if mix > 0.0:
                for i in range(n):
                    if next_uniform(s.rng) < mix:
                        slots[i] = s.dense[int(next_uniform(s.rng) * size)]
            first, records = s.items.ctypes.data, s.records.ctypes.data
            for i in range(n):
                prefetch(first + slots[i] * ROW_BYTES)
            for i in range(n):
                prefetch(records + 16 * s.items[slots[i], REC])
            for i in range(n):
                slot = slots[i]
                numbers[0, i] = (1.0 - mix) * s.sel_tree[slot] / sum_ + mix / size
                s.items[slot, TIMES] += counted
                _describe(s, slot, i, keys, numbers, times)
            return n, 0
    gone = 0
    for i in range(n):
        size = s.meta[SIZE]
        if size < min_size or size == 0:
            return i, gone
        probability = 1.0
        if kind == UNIFORM:
            probability = 1.0 / size
        slot = pick(s, kind, s.sel_tree, s.sel_offsets, s.sel_heap)
        if kind == PRIORITIZED:
            mix, sum_ = s.powers[4], total(s.sel_tree, s.sel_offsets)
            if mix > 0.0 and next_uniform(s.rng) < mix:
                slot = int(s.dense[int(next_uniform(s.rng) * size)])
            probability = (1.0 - mix) * s.sel_tree[slot] / sum_ + mix / size if sum_ > 0.0 else 1.0 / size
        slots[i] = slot
        numbers[0, i] = probability
        s.items[slot, TIMES] += counted
        _describe(s, slot, i, keys, numbers, times)
        if max_times > 0 and s.items[slot, TIMES] >= max_times:
            _unlink(s, slot)
            settle(s)
            doomed[gone] = slot
            gone += 1
    return n, gone


@compiled
def walk(s: Any, order: Any) -> None:
    """All slots, oldest first."""
    slot = s.meta[HEAD]
    for i in range(s.meta[SIZE]):
        order[i] = slot
        slot = s.items[slot, NEXT]


@compiled
def restore(s: Any, keys: Any, times: Any, born: Any) -> None:
    """Give restored items their counts and times of insertion."""
    for i in range(keys.shape[0]):
        slot = index_find(s.index, keys[i])
        if slot >= 0:
            s.items[slot, TIMES] = times[i]
            s.born[slot] = born[i]


@compiled
def reindex(s: Any, index: Any) -> None:
    """Fill an empty index with the keys of all items."""
    for i in range(s.meta[SIZE]):
        slot = s.dense[i]
        index_insert(index, s.items[slot, KEY], slot)


@compiled
def release(s: Any, c: Any, doomed: Any, count: int, groups: Any) -> None:
    for i in range(count):
        _release(s, c, doomed[i], groups)
