"""Looking at a process from outside: what it costs, and, in the faults suite, who in it is to die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

__all__ = ["Watch", "kill_on_the_way"]

LOOK_SECONDS = 0.5
AIM_SECONDS = 0.02


class Watch:
    """Processor time and peak memory (proportional set sizes) of a process and all below it, until it ends.

    The time of processes that come and go between two looks is found again in whoever reaps them.
    """

    def __init__(self) -> None:
        self.cpu_seconds = self.peak_mb = 0.0

    def follow(self, pid: int, over: threading.Event) -> None:
        import psutil

        from shoal.experiment.memory import proportional_mb

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


def kill_on_the_way(pid: int, victims: tuple[str, ...], metrics: Path, every: int, kills: list[dict[str, Any]],
                    over: threading.Event) -> None:
    """SIGKILL each victim in turn, `every` env steps apart; each is noted in `kills`."""
    for number, victim in enumerate(victims, 1):
        while not over.is_set():
            steps = _env_steps(metrics)
            found = _process(pid, victim) if steps >= number * every else None
            if found is not None:
                os.kill(found, signal.SIGKILL)
                kills.append({"victim": victim, "env_steps": steps})
                break
            over.wait(AIM_SECONDS)


def _env_steps(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    lines = metrics.read_text(encoding="utf-8").splitlines()
    for line in reversed(lines):
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if "env_steps" in row:
                return int(row["env_steps"])
    return 0


def _process(parent: int, victim: str) -> int | None:
    """A process below `parent` by the name that `ps` shows."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(parent).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(child.cmdline()).strip() == f"shoal: {victim}" and child.status() != psutil.STATUS_ZOMBIE:
                    return int(child.pid)
    return None
