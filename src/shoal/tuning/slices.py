"""Where members train: processes on this machine, or on the nodes of a Ray cluster (ray_slices.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shoal.bench.parent_death import tied_to_parent
from shoal.tuning.member_server import MemberServer, member_environment

__all__ = ["LocalSlices", "RunningSlice", "Slices", "start_process"]

Words = Callable[[Path], list[str]]
"""The arguments of `shoal` for a run in this folder."""


class RunningSlice(Protocol):
    """A member that trains."""

    def poll(self) -> int | None: ...    # its exit code; None while it trains
    def terminate(self) -> None: ...     # let it write a checkpoint, where it can, and end


class Slices(Protocol):
    """A place for members to train at."""

    @property
    def workers(self) -> int: ...        # as many as train at the same time, unless the study says
    def start(self, words: Words, run: Path, log: Path) -> RunningSlice: ...
    def close(self) -> None: ...


def start_process(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """`shoal` in a process that ends with this one."""
    with log.open("ab") as file:
        return subprocess.Popen(tied_to_parent([sys.executable, "-m", "shoal.cli", *words]), stdout=file, stderr=file,
                                stdin=subprocess.DEVNULL, env=member_environment())


class LocalSlices:
    """Processes of this machine."""

    def __init__(self) -> None:
        self._server = MemberServer()

    @property
    def workers(self) -> int:
        return len(os.sched_getaffinity(0))

    def start(self, words: Words, run: Path, log: Path) -> RunningSlice:
        return self._server.start(words(run), log)

    def close(self) -> None:
        self._server.close()
