"""Compiled operations on the items of one table, all records held in arrays.

An item is a row of `items`; its columns are `records` (chunk, first row, rows, row step), kept in blocks of a power of two.
A *grouped* item has one set of records for all its columns, whose chunks have consecutive ids; otherwise the records of one
column follow those of the one before. The functions never call back into Python, so one call serves a whole batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shoal.replay.heap import heap_fix, heap_push, heap_remove
from shoal.replay.kernels import compiled, index_find, index_insert, index_remove, inlined, next_uniform
from shoal.replay.selectors import FIFO, LIFO, MAX_HEAP, MIN_HEAP, PRIORITIZED, UNIFORM
from shoal.replay.tree import descend, refresh, search, total

__all__ = [
    "Chunks", "State", "count_sampled", "draw", "insert", "reindex", "release", "remove", "restore", "settle", "update",
    "walk",
]  # fmt: skip

# columns of items
KEY, TIMES, PREV, NEXT, DENSE, SHAPE, REC, PRIORITY = range(8)
ITEM_FIELDS = 8  # one cache line
# entries of meta
SIZE, HEAD, TAIL, FREE, USED, NEXT_KEY, STAMP, BYTES, REC_TOP, DIRTY = range(10)
SELECT, REMOVE = 10, 11
REC_FREE = 16
META = 64
# what became of an item of a request
INSERTED, UPDATED, BAD_PRIORITY, WAITING = 0, 1, 2, 3

LARGEST_LEAF = 1e290
SMALLEST_LEAF = 1e-300


class State(NamedTuple):
    """The arrays of one table."""

    meta: Any  # int64[META]
    powers: Any  # float64[2]: exponents of selector and remover
    items: Any  # int64[N, ITEM_FIELDS]
    values: Any  # float64[N, ITEM_FIELDS]: the same memory, for the priority
    born: Any  # float64[N]: time of insertion
    stamps: Any  # int64[N]
    dense: Any  # int64[N]: the slots in use, in no order
    index: Any  # int64[H, 2]: key -> slot
    records: Any  # int32[R, 4]
    refs: Any  # int32[chunks]: how many items of this table refer to a chunk
    sel_tree: Any
    sel_offsets: Any
    sel_heap: Any
    rem_tree: Any
    rem_offsets: Any
    rem_heap: Any
    dirty: Any  # int64[D]: leaves of the selector's tree whose sums wait for refresh
    rng: Any  # uint64[1]


class Chunks(NamedTuple):
    """The arrays of the chunk store that all tables share."""

    address: Any  # int64[chunks]: where the rows lie; 0 for an encoded chunk
    nbytes: Any  # int64[chunks]
    holders: Any  # int32[chunks]: tables and writers that hold the chunk
    freed: Any  # int64[chunks]: ids whose last holder has gone
    freed_count: Any  # int64[1]


@inlined
def _leaf(priority: float, power: float) -> float:
    if priority == 0.0:
        return 0.0
    value = priority**power
    return value if value > SMALLEST_LEAF else SMALLEST_LEAF


@inlined
def _acceptable(s: Any, priority: float) -> bool:
    if not (priority >= 0.0 and priority < 1.7e308):
        return False
    if s.meta[SELECT] == PRIORITIZED and not _leaf(priority, s.powers[0]) <= LARGEST_LEAF:
        return False
    return not (s.meta[REMOVE] == PRIORITIZED and not _leaf(priority, s.powers[1]) <= LARGEST_LEAF)


@inlined
def settle(s: Any) -> None:
    """Bring the selector's tree up to date."""
    if s.meta[DIRTY] > 0:
        refresh(s.sel_tree, s.sel_offsets, s.dirty, s.meta[DIRTY])
        s.meta[DIRTY] = 0


@inlined
def _set_selector_leaf(s: Any, slot: int, value: float) -> None:
    s.sel_tree[slot] = value
    if s.meta[DIRTY] == s.dirty.shape[0]:
        settle(s)
    s.dirty[s.meta[DIRTY]] = slot
    s.meta[DIRTY] += 1


@inlined
def _set_remover_leaf(s: Any, slot: int, value: float) -> None:
    s.rem_tree[slot] = value
    node = slot
    for level in range(s.rem_offsets.shape[0] - 2):
        node >>= 3
        first = s.rem_offsets[level] + (node << 3)
        result = 0.0
        for child in range(8):
            result += s.rem_tree[first + child]
        s.rem_tree[s.rem_offsets[level + 1] + node] = result


@inlined
def _order(s: Any, slot: int, size: int, change: int) -> None:
    """Tell selector and remover that a slot appears (1), changes (0) or goes (-1); size counts it where it is present."""
    priority = s.values[slot, PRIORITY]
    kind = s.meta[SELECT]
    if kind == PRIORITIZED:
        _set_selector_leaf(s, slot, 0.0 if change < 0 else _leaf(priority, s.powers[0]))
    elif kind in (MIN_HEAP, MAX_HEAP):
        sign = 1.0 if kind == MIN_HEAP else -1.0
        if change > 0:
            heap_push(s.sel_heap, s.values, s.stamps, sign, slot, size - 1)
        elif change == 0:
            heap_fix(s.sel_heap, s.values, s.stamps, sign, slot, size)
        else:
            heap_remove(s.sel_heap, s.values, s.stamps, sign, slot, size)
    kind = s.meta[REMOVE]
    if kind == PRIORITIZED:
        _set_remover_leaf(s, slot, 0.0 if change < 0 else _leaf(priority, s.powers[1]))
    elif kind in (MIN_HEAP, MAX_HEAP):
        sign = 1.0 if kind == MIN_HEAP else -1.0
        if change > 0:
            heap_push(s.rem_heap, s.values, s.stamps, sign, slot, size - 1)
        elif change == 0:
            heap_fix(s.rem_heap, s.values, s.stamps, sign, slot, size)
        else:
            heap_remove(s.rem_heap, s.values, s.stamps, sign, slot, size)


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
    s.meta[STAMP] += 1
    s.stamps[slot] = s.meta[STAMP]
    _order(s, slot, s.meta[SIZE], 1)
    return int(slot)


@inlined
def _unlink(s: Any, slot: int) -> None:
    """Take an item out of the order, index and selectors; its records stay until `release`."""
    item = s.items[slot]
    _order(s, slot, s.meta[SIZE], -1)
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
def _pick_random(s: Any, tree: Any, offsets: Any) -> int:
    """One proportional draw; uniform where every leaf is zero."""
    sum_ = total(tree, offsets)
    if sum_ > 0.0:
        return search(tree, offsets, next_uniform(s.rng) * sum_)
    return int(s.dense[int(next_uniform(s.rng) * s.meta[SIZE])])


@inlined
def _pick(s: Any, kind: int, tree: Any, offsets: Any, heap: Any) -> int:
    if kind == FIFO:
        return int(s.meta[HEAD])
    if kind == LIFO:
        return int(s.meta[TAIL])
    if kind == UNIFORM:
        return int(s.dense[int(next_uniform(s.rng) * s.meta[SIZE])])
    if kind == PRIORITIZED:
        return _pick_random(s, tree, offsets)
    return int(heap[0, 0])


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
        if not _acceptable(s, priority):
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
        while s.meta[SIZE] > max_size or (s.meta[BYTES] > max_bytes and s.meta[SIZE] > 0):
            if s.meta[REMOVE] == PRIORITIZED:
                victim = _pick_random(s, s.rem_tree, s.rem_offsets)
            else:
                victim = _pick(s, s.meta[REMOVE], s.rem_tree, s.rem_offsets, s.rem_heap)
            _unlink(s, victim)
            _release(s, c, victim, groups)
            removed += 1
    settle(s)
    return at - first, used, removed, refused


@inlined
def _update_one(s: Any, slot: int, priority: float) -> None:
    s.values[slot, PRIORITY] = priority
    s.meta[STAMP] += 1
    s.stamps[slot] = s.meta[STAMP]
    _order(s, slot, s.meta[SIZE], 0)


@compiled
def update(s: Any, keys: Any, priorities: Any) -> tuple[int, int]:
    """Set priorities of known keys. Returns (unknown keys, refused priorities)."""
    unknown = refused = 0
    for i in range(keys.shape[0]):
        if not _acceptable(s, priorities[i]):
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
            for i in range(n):
                slot = slots[i]
                numbers[0, i] = s.sel_tree[slot] / sum_
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
        slot = _pick(s, kind, s.sel_tree, s.sel_offsets, s.sel_heap)
        if kind == PRIORITIZED:
            sum_ = total(s.sel_tree, s.sel_offsets)
            probability = s.sel_tree[slot] / sum_ if sum_ > 0.0 else 1.0 / size
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
