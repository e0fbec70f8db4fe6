"""How many of the cores that a program may use are in use, as the kernel counts. Roles cannot tell: a role that sleeps within its
step is busy but its core is not, and where all cores are taken, the time of a phase also holds that of other processes.

A core may be used by a place, by a process that an environment has started, or by another program. So this asks the kernel how
long the cores were idle; only where it does not say (no /proc/stat), it adds up the processor time of the places."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

__all__ = ["CoreUse", "waiting_threads"]

WINDOW_SECONDS = 60.0
TICKS = os.sysconf("SC_CLK_TCK")
STAT = Path("/proc/stat")
SPINS = 2_000
"""Of a thread of a computation that waits for the others, before it sleeps. OpenMP's own 300,000 take cores from actors; with none
(OMP_WAIT_POLICY=PASSIVE) two threads make no more small updates than one (docs/performance.md)."""


def waiting_threads() -> dict[str, str]:
    """Environment variables for processes that compute beside others; what the user has set wins."""
    return {} if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() else {"GOMP_SPINCOUNT": str(SPINS)}


class CoreUse:
    """Call `look` about once a second."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._spent: dict[int, float] = {}  # pid -> seconds, at the last look
        self._total = 0.0
        self._seen: deque[tuple[float, float, int, int]] = deque()  # time; until then: seconds, ticks, idle ticks

    def look(self, pids: Iterable[int], now: float) -> float:
        """The average number of cores in use in the last minute; NaN at first. `pids` are the processes of the places."""
        self._seen.append((now, self._count(pids), *core_ticks(self._cores)))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_SECONDS:
            self._seen.popleft()
        seconds, spent, ticks, idle = (last - first for first, last in zip(self._seen[0], self._seen[-1], strict=True))
        if seconds <= 0:
            return math.nan
        if ticks <= 0:
            return spent / seconds
        return len(self._cores) * min(1.0, max(0.0, 1 - idle / ticks))

    def _count(self, pids: Iterable[int]) -> float:
        """Processor seconds of all processes so far, including those that have died."""
        spent = {}
        for pid in pids:
            with contextlib.suppress(OSError):  # it has just died
                spent[pid] = processor_seconds(pid)
        self._total += sum(max(0.0, seconds - self._spent.get(pid, 0.0)) for pid, seconds in spent.items())
        self._spent = spent
        return self._total


def processor_seconds(pid: int) -> float:
    """User and system time of a process, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold spaces and brackets
    return (int(fields[11]) + int(fields[12])) / TICKS


def core_ticks(cores: Collection[int]) -> tuple[int, int]:
    """Clock ticks of these cores since the machine started: all, and idle ones; zeros where the kernel does not say."""
    everything = idle = 0
    with contextlib.suppress(OSError):
        for line in STAT.read_text().splitlines():
            name, *fields = line.split(maxsplit=9) if line.startswith("cpu") else [""]
            if name[3:].isdigit() and int(name[3:]) in cores:
                ticks = [int(field) for field in fields[:8]]  # user nice system idle iowait irq softirq steal; guests are users
                everything += sum(ticks)
                idle += ticks[3] + ticks[4]  # a core that waits for a disk has time for others
    return everything, idle
