"""Runs small programs on either runtime, with real processes, and gives tests hands to kill with."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.runtime import Faults, Program, Supervisor, run

RUNTIMES = ("inline", "local")


class Watch:
    """A session that ends after `seconds`, or when `until(control)` is true; `act` is called at every tick."""

    def __init__(self, until: Callable[[Supervisor], bool] | None = None, act: Callable[[Supervisor], None] | None = None,
                 seconds: float = 30.0) -> None:
        self.until, self.act, self.seconds = until, act, seconds
        self.events: list[dict[str, Any]] = []
        self.saves: list[tuple[Path, bool]] = []
        self.final: dict[str, dict[str, float]] = {}
        self.wires: dict[str, dict[str, float]] = {}
        self.totals: dict[str, float] = {}
        self.unbalanced = 0
        self.folder: Path | None = None

    def begin(self, control: Supervisor) -> None:
        self.start = time.monotonic()

    def tick(self, control: Supervisor) -> None:
        self.events += control.events()
        self.unbalanced += not all(numbers["conserved"] for numbers in control.wires().values())
        if self.act:
            self.act(control)
        if self.until and self.until(control):
            control.stop("until")
        elif time.monotonic() - self.start > self.seconds:
            control.stop("seconds")

    def saved(self, folder: Path, ok: bool) -> None:
        self.saves.append((folder, ok))
        if ok:
            self.folder = folder

    def newest(self) -> Path | None:
        return self.folder

    def end(self, control: Supervisor, reason: str, error: str | None) -> None:
        self.events += control.events()
        self.final, self.wires = control.snapshot(), control.wires()


def drive(program: Program, kind: str, folder: Path, watch: Watch | None = None, faults: Faults | None = None) -> Watch:
    watch = watch or Watch()
    watch.reason = run(program, watch, kind, folder / "logs", faults)
    return watch


def kill(control: Any, place: str, sig: int = signal.SIGKILL) -> int | None:
    """Really kill the process of a place."""
    pid = control.children[place].pid
    if pid is not None:
        os.kill(pid, sig)
    return pid
