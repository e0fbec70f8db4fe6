"""A binary heap of slots with positions, ordered by (sign * priority, stamp): ties go to the least recently touched."""

from __future__ import annotations

from typing import Any

from shoal.replay.table.fields import PRIORITY
from shoal.replay.table.kernels import compiled

__all__ = ["heap_fix", "heap_push", "heap_remove"]

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
