"""Asynchronous successive halving (Li et al. 2018, arXiv 1810.05934): many members get a small budget, the best of them more.

Rung k ends after `first` * `reduction`^k env steps. Of the members that finished a rung, the best `1 / reduction` go on to the next
one. Nobody waits for a rung to be full: a member is promoted as soon as it is among the best of those that have finished by then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["rungs", "to_promote"]


def rungs(first: int, most: int, reduction: int) -> list[int]:
    """The env steps at which rungs end; the last one ends at `most`."""
    ends = []
    while first < most:
        ends.append(first)
        first *= reduction
    return [*ends, most]


def to_promote(results: Mapping[int, Sequence[float]], busy: Collection[int], reduction: int, count: int) -> int | None:
    """The member that goes on to its next rung, from the highest rung where one may; None where nobody may.

    `results` has by member its fitness at the end of each rung that it finished, `busy` are members that are training now, and
    `count` is the number of rungs.
    """
    for rung in reversed(range(count - 1)):
        there = [member for member, found in results.items() if len(found) > rung]
        best = sorted(there, key=lambda member: (-results[member][rung], member))[: len(there) // reduction]
        for member in best:
            if len(results[member]) == rung + 1 and member not in busy:
                return member
    return None
