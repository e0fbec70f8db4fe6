"""What a run costs: the processor time and the memory of this process and all below it."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["PeakMemory", "cpu_seconds", "proportional_mb"]

EVERY_SECONDS = 5.0


def cpu_seconds() -> float:
    """User and system time so far. A process that ends hands its time to the process that reaps it, so the sum never falls."""
    import psutil

    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class PeakMemory:
    """The largest sum of proportional set sizes, which count shared pages (forked interpreters, wires) once."""

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._next = 0.0

    def sample(self, now: float, force: bool = False) -> None:
        if now < self._next and not force:
            return
        self._next = now + EVERY_SECONDS
        import psutil

        me = psutil.Process()
        total = 0.0
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError, ValueError, IndexError):
                total += proportional_mb(process.pid)
        self.peak_mb = max(self.peak_mb, total)


def proportional_mb(pid: int, kind: str = "Pss") -> float:
    """Of a process; `kind` is a word of smaps_rollup, such as Pss_Anon for all but mapped files."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    return 0.0
