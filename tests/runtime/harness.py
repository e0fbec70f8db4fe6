"""Runs small programs on either runtime, with real processes, and gives tests hands to kill with."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.architectures import ARCHITECTURES
from shoal.experiment import preload as experiment
from shoal.runtime import Faults, Program, Supervisor, run
from shoal.runtime.fork_server_client import ForkServerClient

RUNTIMES = ("inline", "local")
PRELOAD = ("numpy", "cloudpickle", "setproctitle", "torch", "psutil", "pytest", "shoal.runtime.local")  # what tests import


class Files:
    """The simplest store."""

    def save(self, path, state):
        with open(path, "wb") as file:
            np.savez(file, **state)

    def load(self, path):
        with np.load(path) as data:
            return dict(data)


PATIENCE = 300.0  # until what a test waits for has not come and will not: a busy machine may take long


class Watch:
    """A session that ends when `until(control)` is true, or after `seconds`; where something is waited for, not before PATIENCE
    is over. `act` is called at every tick."""

    def __init__(self, until: Callable[[Supervisor], Any] | None = None, act: Callable[[Supervisor], None] | None = None,
                 seconds: float = 40.0) -> None:
        self.until, self.act, self.seconds = until, act, seconds if until is None else max(seconds, PATIENCE)
        self.reason = ""
        self.events: list[dict[str, Any]] = []
        self.saves: list[tuple[Path, bool]] = []
        self.final: dict[str, dict[str, float]] = {}
        self.wires: dict[str, dict[str, float]] = {}
        self.unbalanced = 0
        self.folder: Path | None = None
        self.error: str | None = None

    def begin(self, control: Supervisor) -> None:
        self.start = time.monotonic()

    @property
    def age(self) -> float:
        return time.monotonic() - self.start

    def tick(self, control: Supervisor) -> None:
        self.events += control.events()
        self.unbalanced += not all(numbers["conserved"] for numbers in control.wires().values())
        if self.act:
            self.act(control)
        if self.until and self.until(control):
            control.stop("until")
        elif self.age > self.seconds:
            control.stop("seconds")

    def save_soon(self) -> bool:
        return False

    def saved(self, folder: Path, ok: bool) -> None:
        self.saves.append((folder, ok))
        if ok:
            self.folder = folder

    def newest(self, instance: str | None = None) -> Path | None:
        return self.folder

    def end(self, control: Supervisor, reason: str, error: str | None) -> None:
        self.events += control.events()
        self.final, self.wires, self.error = control.snapshot(), control.wires(), error

    def texts(self, kind: str) -> list[str]:
        return [event["text"] for event in self.events if event["kind"] == kind]


class SharedForkServer:
    """One fork server for all tests, started when the first one needs it."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload, self._fork_server = tuple(preload), None

    def get(self) -> ForkServerClient:
        if self._fork_server is None:
            self._fork_server = ForkServerClient(self._preload)
        return self._fork_server

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None


Shared = SharedForkServer(PRELOAD)  # for small programs
Farm = SharedForkServer((*experiment.PRELOAD, *(path.partition(":")[0] for path in ARCHITECTURES.values()),
                         "tests.architectures.graphs"))  # for experiments


def drive(program: Program, kind: str, folder: Path, watch: Watch | None = None, faults: Faults | None = None) -> Watch:
    watch = watch or Watch()
    watch.reason = run(program, watch, kind, folder / "logs", faults, Shared.get() if kind == "local" else None)
    return watch


def up(control: Any, *places: str) -> bool:
    """Whether all roles of these places are ready (the inline runtime's always are)."""
    if not hasattr(control, "children"):
        return True
    children = [control.children[place] for place in places or control.children]
    return all(child.pid and child.started and child.ready.issuperset(child.started) for child in children)


def kill(control: Any, place: str, sig: int = signal.SIGKILL) -> int | None:
    """Really kill the process of a place."""
    pid = control.children[place].pid
    if pid is not None:
        os.kill(pid, sig)
    return pid


class Killer:
    """Kills the named places in turn, each time when all of them are up and `progress` has grown by `every`."""

    def __init__(self, victims: tuple[str, ...], times: int, progress: str = "steps", every: float = 10, seed: int = 1) -> None:
        self.victims, self.times, self.progress, self.every = victims, times, progress, every
        self.kills, self._at = 0, every
        self.pids: set[int | None] = set()
        self._rng = np.random.default_rng(seed)

    def __call__(self, control: Any) -> None:
        if self.kills < self.times and control.total(self.progress) >= self._at and self._fresh(control):
            time.sleep(self._rng.uniform(0, 0.02))  # any moment of its work
            self.pids.add(kill(control, self.victims[self.kills % len(self.victims)]))
            self.kills += 1
            self._at = control.total(self.progress) + self.every

    def done(self, control: Any) -> bool:
        """All killed, and gone on for as long again."""
        return self.kills >= self.times and control.total(self.progress) >= self._at and self._fresh(control)

    def _fresh(self, control: Any) -> bool:
        return up(control, *self.victims) and not any(control.children[v].pid in self.pids for v in self.victims)


class Saver:
    """Asks for a checkpoint whenever `progress` has grown by `every` and all roles are up."""

    def __init__(self, folder: Path, every: float, progress: str = "learner_steps") -> None:
        self.folder, self.every, self.progress, self._at = folder, every, progress, 0.0

    def __call__(self, control: Any) -> None:
        if control.complete() and control.total(self.progress) >= self._at:
            self._at = control.total(self.progress) + self.every
            folder = self.folder / f"save-{int(self._at)}"
            folder.mkdir()
            control.checkpoint(folder)


def gone(pid: int) -> bool:
    """Whether a process is dead (a zombie is)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def eventually(condition: Callable[[], Any], seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())
