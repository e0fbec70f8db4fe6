"""The two orders kept over a table's items: the selector's and the remover's.

A prioritized order is a sum tree, a heap a binary heap with positions, ordered by (sign * priority, stamp): ties go to the least
recently touched. FIFO, LIFO and uniform need only the list of items.
"""

from __future__ import annotations

import math
from typing import Any

from shoal.replay.table.fields import DIRTY, HEAD, PRIORITY, REMOVE, SELECT, SIZE, TAIL
from shoal.replay.table.kernels import compiled, inlined, next_uniform
from shoal.replay.table.selectors import FIFO, LIFO, MAX_HEAP, MIN_HEAP, PRIORITIZED, UNIFORM
from shoal.replay.table.sum_tree import node_sum, refresh, search, total

__all__ = ["acceptable", "bounds", "order", "pick", "pick_random", "settle"]

LARGEST_LEAF = 1e290
SMALLEST_LEAF = 1e-300

# heap is int64[2, capacity]: row 0 the slots in heap order, row 1 the position of a slot. values[slot, PRIORITY] is the priority,
# stamps[slot] grows with every insert and update; sign is +1 for the smallest first and -1 for the largest first.


@compiled
def _before(values: Any, stamps: Any, sign: float, a: int, b: int) -> bool:
    first, second = sign * values[a, PRIORITY], sign * values[b, PRIORITY]
    if first != second:
        return bool(first < second)
    return bool(stamps[a] < stamps[b])


@compiled
def _up(heap: Any, values: Any, stamps: Any, sign: float, at: int) -> int:
    slot = heap[0, at]
    while at > 0:
        parent = (at - 1) >> 1
        other = heap[0, parent]
        if not _before(values, stamps, sign, slot, other):
            break
        heap[0, at] = other
        heap[1, other] = at
        at = parent
    heap[0, at] = slot
    heap[1, slot] = at
    return at


@compiled
def _down(heap: Any, values: Any, stamps: Any, sign: float, at: int, size: int) -> None:
    slot = heap[0, at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _before(values, stamps, sign, heap[0, child + 1], heap[0, child]):
            child += 1
        other = heap[0, child]
        if not _before(values, stamps, sign, other, slot):
            break
        heap[0, at] = other
        heap[1, other] = at
        at = child
    heap[0, at] = slot
    heap[1, slot] = at


@compiled
def heap_push(heap: Any, values: Any, stamps: Any, sign: float, slot: int, size: int) -> None:
    """Add a slot to a heap that has `size` entries."""
    heap[0, size] = slot
    _up(heap, values, stamps, sign, size)


@compiled
def heap_fix(heap: Any, values: Any, stamps: Any, sign: float, slot: int, size: int) -> None:
    """Restore the order after the priority or stamp of a slot changed."""
    at = _up(heap, values, stamps, sign, heap[1, slot])
    _down(heap, values, stamps, sign, at, size)


@compiled
def heap_remove(heap: Any, values: Any, stamps: Any, sign: float, slot: int, size: int) -> None:
    """Remove a slot from a heap that has `size` entries."""
    at = heap[1, slot]
    last = heap[0, size - 1]
    if last != slot:
        heap[0, at] = last
        heap[1, last] = at
        at = _up(heap, values, stamps, sign, at)
        _down(heap, values, stamps, sign, at, size - 1)


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
        s.rem_tree[s.rem_offsets[level + 1] + node] = node_sum(s.rem_tree, s.rem_offsets[level] + (node << 3))


@inlined
def _change_heap(s: Any, heap: Any, kind: int, slot: int, size: int, change: int) -> None:
    sign = 1.0 if kind == MIN_HEAP else -1.0
    if change > 0:
        heap_push(heap, s.values, s.stamps, sign, slot, size - 1)
    elif change == 0:
        heap_fix(heap, s.values, s.stamps, sign, slot, size)
    else:
        heap_remove(heap, s.values, s.stamps, sign, slot, size)


@inlined
def order(s: Any, slot: int, size: int, change: int) -> None:
    """Tell selector and remover that a slot appears (1), changes (0) or goes (-1); size counts it where it is present."""
    priority = s.values[slot, PRIORITY]
    kind = s.meta[SELECT]
    if kind == PRIORITIZED:
        _set_selector_leaf(s, slot, 0.0 if change < 0 else leaf(priority, s.powers[0]))
    elif kind in (MIN_HEAP, MAX_HEAP):
        _change_heap(s, s.sel_heap, kind, slot, size, change)
    kind = s.meta[REMOVE]
    if kind == PRIORITIZED:
        _set_remover_leaf(s, slot, 0.0 if change < 0 else leaf(priority, s.powers[1]))
    elif kind in (MIN_HEAP, MAX_HEAP):
        _change_heap(s, s.rem_heap, kind, slot, size, change)


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
