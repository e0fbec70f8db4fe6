"""Watches a driver from outside: what it prints, and what it costs."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import psutil

from shoal.experiment.process_usage import proportional_mb

__all__ = ["ProcessMonitor", "last_json"]

LOOK_SECONDS = 0.5


class ProcessMonitor:
    """Processor time and peak memory (proportional set sizes) of a process and all below it, until it ends.

    The time of a process that starts and ends between two looks is counted in the parent that reaps it.
    """

    def __init__(self) -> None:
        self.cpu_seconds = self.peak_mb = 0.0

    def follow(self, pid: int, over: threading.Event) -> None:
        while not over.is_set():
            total = memory = 0.0
            with contextlib.suppress(psutil.Error):
                top = psutil.Process(pid)
                for process in (top, *top.children(recursive=True)):
                    with contextlib.suppress(psutil.Error, OSError, ValueError):
                        times = process.cpu_times()
                        total += times.user + times.system + times.children_user + times.children_system
                        memory += proportional_mb(process.pid)
            self.cpu_seconds, self.peak_mb = max(self.cpu_seconds, total), max(self.peak_mb, memory)
            over.wait(LOOK_SECONDS)


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object: a driver's report, whatever else it printed."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError:
                continue
            return found
    return None
