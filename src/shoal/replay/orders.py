"""The two orders kept over a table's items: the selector's and the remover's.

A prioritized order is a sum tree, a heap a binary heap with positions; FIFO, LIFO and uniform need only the list of items.
"""

from __future__ import annotations

import math
from typing import Any

from shoal.replay.heap import heap_fix, heap_push, heap_remove
from shoal.replay.kernels import inlined, next_uniform
from shoal.replay.selectors import FIFO, LIFO, MAX_HEAP, MIN_HEAP, PRIORITIZED, UNIFORM
from shoal.replay.tree import refresh, search, total

__all__ = ["acceptable", "bounds", "order", "pick", "pick_random", "settle"]

# columns of items
KEY, TIMES, SHAPE, REC, _, _, BORN, PRIORITY = range(8)
RECORD = 8  # of words: where an item with one record keeps it
# columns of links
PREV, NEXT, DENSE = range(3)
# entries of meta
SIZE, HEAD, TAIL, FREE, USED, NEXT_KEY, STAMP, BYTES, REC_TOP, DIRTY = range(10)
SELECT, REMOVE, STAMPED = 10, 11, 12
REC_FREE = 16
# what became of an item of a request
INSERTED, UPDATED, BAD_PRIORITY, WAITING = 0, 1, 2, 3

LARGEST_LEAF = 1e290
SMALLEST_LEAF = 1e-300


@inlined
def leaf(priority: float, power: float) -> float:
    if priority == 0.0:
        return 0.0
    value = priority**power
    return value if value > SMALLEST_LEAF else SMALLEST_LEAF


@inlined
def acceptable(s: Any, priority: float) -> bool:
    """Finite, not negative, and with a leaf that sums can bear (worked out beforehand: a power costs more than the rest)."""
    return priority == 0.0 or (priority >= s.powers[2] and priority <= s.powers[3])


def bounds(*powers: float) -> tuple[float, float]:
    """The smallest and largest positive priority whose powers are all within range of float64 sums."""
    low, high = 0.0, 1.7e308
    for power in powers:
        if power > 1.0:
            high = min(high, LARGEST_LEAF ** (1.0 / power))
        elif power > 0.0:
            high = min(high, math.exp(min(709.0, math.log(LARGEST_LEAF) / power)))
        elif power < 0.0:
            low = max(low, math.exp(max(-709.0, math.log(LARGEST_LEAF) / power)))
    return low, high


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
def order(s: Any, slot: int, size: int, change: int) -> None:
    """Tell selector and remover that a slot appears (1), changes (0) or goes (-1); size counts it where it is present."""
    priority = s.values[slot, PRIORITY]
    kind = s.meta[SELECT]
    if kind == PRIORITIZED:
        _set_selector_leaf(s, slot, 0.0 if change < 0 else leaf(priority, s.powers[0]))
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
        _set_remover_leaf(s, slot, 0.0 if change < 0 else leaf(priority, s.powers[1]))
    elif kind in (MIN_HEAP, MAX_HEAP):
        sign = 1.0 if kind == MIN_HEAP else -1.0
        if change > 0:
            heap_push(s.rem_heap, s.values, s.stamps, sign, slot, size - 1)
        elif change == 0:
            heap_fix(s.rem_heap, s.values, s.stamps, sign, slot, size)
        else:
            heap_remove(s.rem_heap, s.values, s.stamps, sign, slot, size)


@inlined
def pick_random(s: Any, tree: Any, offsets: Any) -> int:
    """One proportional draw; uniform where every leaf is zero."""
    sum_ = total(tree, offsets)
    if sum_ > 0.0:
        return search(tree, offsets, next_uniform(s.rng) * sum_)
    return int(s.dense[int(next_uniform(s.rng) * s.meta[SIZE])])


@inlined
def pick(s: Any, kind: int, tree: Any, offsets: Any, heap: Any) -> int:
    if kind == FIFO:
        return int(s.meta[HEAD])
    if kind == LIFO:
        return int(s.meta[TAIL])
    if kind == UNIFORM:
        return int(s.dense[int(next_uniform(s.rng) * s.meta[SIZE])])
    if kind == PRIORITIZED:
        return pick_random(s, tree, offsets)
    return int(heap[0, 0])
