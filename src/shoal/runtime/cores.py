"""How many cores the places of a program use: what the kernel has counted, not what roles say. A role that sleeps within its
step is busy, its core is not; and where all cores are taken, everybody's time by phase holds that of others too."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

__all__ = ["CoreUse"]

WINDOW_SECONDS = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


class CoreUse:
    """Looked at about once a second."""

    def __init__(self) -> None:
        self._spent: dict[int, float] = {}  # pid -> seconds, at the last look
        self._total = 0.0
        self._seen: deque[tuple[float, float]] = deque()  # (time, seconds of all until then)

    def look(self, pids: Iterable[int], now: float) -> float:
        """Cores used by these processes in the last minute, on average; NaN at first."""
        spent = {}
        for pid in pids:
            with contextlib.suppress(OSError):  # it has just died
                spent[pid] = processor_seconds(pid)
        self._total += sum(max(0.0, seconds - self._spent.get(pid, 0.0)) for pid, seconds in spent.items())
        self._spent = spent
        self._seen.append((now, self._total))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        return (self._total - before) / (now - then) if now > then else math.nan


def processor_seconds(pid: int) -> float:
    """User and system time of a process, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold spaces and brackets
    return (int(fields[11]) + int(fields[12])) / TICKS
