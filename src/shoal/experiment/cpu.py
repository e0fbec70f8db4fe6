"""The processor time of a run: this process and all below it, those that have died and were reaped included."""

from __future__ import annotations

import contextlib

__all__ = ["cpu_seconds"]


def cpu_seconds() -> float:
    """User and system time so far. A process that ends hands its time to whoever reaps it, so the sum never falls."""
    import psutil

    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
