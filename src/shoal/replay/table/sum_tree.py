"""A sum tree with eight children per node: one cache line per level, seven levels for two million leaves.

Inner sums are always recomputed from their children, never adjusted by differences, so they cannot drift and cannot become
negative. A batch descends level by level, which lets the processor fetch the nodes of all draws at once.

    leaves   tree[offsets[0] : offsets[1]]
    parents  tree[offsets[1] : offsets[2]]   ... the last level has at most eight nodes, their sum is the total
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.table.kernels import compiled, inlined, prefetch
from shoal.replay.table.memory_pool import zeros

__all__ = ["node_sum", "rebuild", "refresh", "search", "search_batch", "total", "tree_arrays"]

FANOUT = 8


def tree_arrays(leaves: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """A zeroed tree (aligned to cache lines) and the offsets of its levels."""
    offsets = [0]
    count = max(leaves, 1)
    while True:
        padded = -(-count // FANOUT) * FANOUT
        offsets.append(offsets[-1] + padded)
        if padded == FANOUT:
            break
        count = padded // FANOUT
    return zeros(offsets[-1]), np.array(offsets, np.int64)


@inlined
def node_sum(tree: Any, first: int) -> float:
    """The sum of the eight children from `first` on, always in the same order."""
    result = 0.0
    for child in range(8):
        result += tree[first + child]
    return result


@compiled
def total(tree: Any, offsets: Any) -> float:
    """The sum of all leaves."""
    return node_sum(tree, offsets[offsets.shape[0] - 2])


@compiled
def refresh(tree: Any, offsets: Any, dirty: Any, count: int) -> None:
    """Recompute the inner sums above the leaves dirty[:count] (overwritten); neighbours are recomputed once."""
    for level in range(offsets.shape[0] - 2):
        kept = 0
        last = -1
        for i in range(count):
            node = dirty[i] >> 3
            if node == last:
                continue
            last = node
            tree[offsets[level + 1] + node] = node_sum(tree, offsets[level] + (node << 3))
            dirty[kept] = node
            kept += 1
        count = kept


@compiled
def rebuild(tree: Any, offsets: Any) -> None:
    """Recompute every inner sum."""
    for level in range(offsets.shape[0] - 2):
        for node in range((offsets[level + 1] - offsets[level]) >> 3):
            tree[offsets[level + 1] + node] = node_sum(tree, offsets[level] + (node << 3))


@compiled
def search(tree: Any, offsets: Any, query: float) -> int:
    """One query in [0, total): the smallest leaf whose inclusive prefix sum exceeds it; never a zero leaf."""
    node = 0
    for level in range(offsets.shape[0] - 2, -1, -1):
        first = offsets[level] + (node << 3)
        chosen = 0
        for child in range(8):
            value = tree[first + child]
            if value > 0.0:
                chosen = child  # the last positive one, should rounding carry the query past the end
                if query < value:
                    break
                query -= value
        node = (node << 3) + chosen
    return node


@compiled
def search_batch(tree: Any, offsets: Any, queries: Any, leaves: Any, count: int) -> None:
    """`search` for a batch. Counting prefix sums instead of branching keeps the processor from guessing wrong."""
    for i in range(count):
        leaves[i] = 0
    start = tree.ctypes.data
    for level in range(offsets.shape[0] - 2, -1, -1):
        base = offsets[level]
        below = start + 8 * offsets[max(level - 1, 0)]
        for i in range(count):
            first = base + (leaves[i] << 3)
            query = queries[i]
            before = upto = 0.0
            chosen = 0
            for child in range(7):
                upto += tree[first + child]
                past = query >= upto
                chosen += past
                before = upto if past else before
            queries[i] = query - before
            leaf = (leaves[i] << 3) + chosen
            leaves[i] = leaf
            prefetch(below + 64 * leaf)  # the node that the next level reads; past the leaves it fetches in vain
    for i in range(count):
        if tree[leaves[i]] <= 0.0:  # rounding carried the query past the end of a node
            leaves[i] = search(tree, offsets, queries[i])
