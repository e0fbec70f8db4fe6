"""From counts and times to rates: env steps/s of a run, medians and ranges of several.

A run reports marks: (seconds since its first environment step, env steps so far). Its rate is taken between the first and the last
change of the count after the warm-up. shoal's marks are snapshots, which see a change up to a second late, so a window that is too
short to give a rate within COARSEST has none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["Spread", "marks_of", "rate", "snapshots", "tail"]

Marks = Sequence[Sequence[float]]
LUMPY = 1.9  # a look that saw this many times as much as another means that the count jumps
COARSEST = 0.15  # how far off a rate may be because the count is only polled


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        whole = [value for value in values if math.isfinite(value)]
        if not whole:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(statistics.median(whole), min(whole), max(whole), len(whole))


def rate(marks: Marks, warm_seconds: float, looked: bool = False) -> float:
    """Env steps/s between the first and the last change of the count after the warm-up; NaN where it changes less than twice.

    A run that counts a whole unroll at once would otherwise gain or lose one of them by where the window happens to end. Marks are
    made at the changes themselves, or (`looked`) by polling: then there is no rate where it could be off by more than COARSEST.
    """
    seen = [(before, mark) for before, mark in pairwise(marks) if mark[0] >= warm_seconds]
    changed = [both for both in seen if both[1][1] > both[0][1]]
    if len(changed) < 2:
        return math.nan
    (early, first), (late, last) = changed[0], changed[-1]
    seconds, steps = last[0] - first[0], last[1] - first[1]
    look = max(first[0] - early[0], last[0] - late[0])
    if seconds <= 0 or (looked and min(_jump(seen) / steps, look / seconds) > COARSEST):
        return math.nan
    return steps / seconds


def _jump(seen: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """How much is counted at once, as far as looks can tell: the common divisor of all differences, or how much more one look saw
    than another, for its time, where that is about twice as much (less is the unevenness of any run). A window may hold one jump
    too many or too few, but it is never longer or shorter than by one look."""
    usual = (seen[-1][1][0] - seen[0][0][0]) / len(seen)
    found = [(mark[1] - before[1]) * usual / max(mark[0] - before[0], usual / 10) for before, mark in seen]
    uneven = max(found) - min(found) if max(found) > LUMPY * min(found) else 0.0
    return max(math.gcd(*(int(mark[1] - before[1]) for before, mark in seen)), uneven)


def snapshots(path: Path) -> list[dict[str, Any]]:
    """The snapshots in a run's metrics.jsonl; none before the file exists."""
    from shoal.telemetry.outputs import read_lines

    return [row for row in read_lines(path) if row.get("kind") == "snapshot"] if path.exists() else []


def marks_of(shots: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """A run's marks from its snapshots. The last snapshot is taken while the run ends, so it does not count."""
    return [(shot["seconds"], shot["env_steps"]) for shot in shots if shot["seconds"] and not shot.get("last")]


def tail(text: str, lines: int = 3) -> str:
    """The last lines that are not empty, joined into one."""
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])
