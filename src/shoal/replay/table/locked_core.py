"""A core that many threads may use: its lock, waiting for limiters, and copies made outside the lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.replay.errors import Closed, InvalidItem, Timeout
from shoal.replay.table.kernels import run_plan
from shoal.replay.table.replay_core import Core, PendingInserts
from shoal.replay.table.sampled_batch import Batch, Buffers, joined

__all__ = ["LockedCore"]

T = TypeVar("T")
Check = Callable[[dict[str, tuple[tuple[int, ...], Any]]], None]
"""Refuses the (shape, dtype) of columns."""


class LockedCore:
    """A core behind a lock."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.lock = threading.Lock()
        self.saving = threading.Lock()  # one checkpoint at a time
        self.changed = threading.Condition(self.lock)
        self.closed = False
        self.on_change: Callable[[], None] | None = None  # tells the socket service that requests may continue
        self._waiters = 0

    def check_open(self) -> None:
        if self.closed:
            raise Closed("the replay server was closed")

    def wake(self) -> None:
        """Tables changed; the lock is held."""
        if self._waiters:
            self.changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def change(self, work: Callable[[Core], T]) -> T:
        """Do something to the tables that waiting requests may have waited for."""
        with self.lock:
            self.check_open()
            done = work(self.core)
            self.wake()
            return done

    def wait_for(self, side: str, table: str, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Call ready() now and after every change until it is true or the time is over; the lock is held."""
        self.check_open()
        if ready():
            return True
        if timeout is not None and timeout <= 0:
            return False
        deadline = None if timeout is None else time.monotonic() + timeout
        limiter = self.core.table(table).limiter
        limiter.begin_wait(side)
        self._waiters += 1
        try:
            while True:
                rest = None if deadline is None else deadline - time.monotonic()
                if rest is not None and rest <= 0:
                    return False
                self.changed.wait(None if rest is None else min(rest, threading.TIMEOUT_MAX))
                self.check_open()
                if ready():
                    return True
        finally:
            self._waiters -= 1
            limiter.end_wait(side)

    def insert(self, pending: PendingInserts, timeout: float | None) -> npt.NDArray[np.int64]:
        """Insert items, waiting for the limiter; what was refused raises after the others are in. The lock is held."""

        def push() -> bool:
            before = pending.handled
            done = pending.push()
            if pending.handled > before:
                self.wake()
            return done

        name = pending.table.table.name
        done = self.wait_for("insert", name, push, timeout)
        refusals = pending.refusals()
        if refusals:
            raise InvalidItem("; ".join(reason for _, reason in refusals[:5]))
        if not done:
            raise Timeout(
                f"table {name!r}: the limiter let {pending.handled} of {len(pending.priorities)} items in within {timeout} s; "
                "the others are not inserted"
            )
        return pending.keys

    def draw(
        self, table: str, n: int, timeout: float | None, buffers: Buffers, counted: bool = True, check: Check | None = None
    ) -> Batch:
        """Up to n items: waits for all of them, and returns what there is when the time is over.

        `check` refuses columns before any item of them is taken.
        """
        if n < 1:
            raise InvalidItem(f"batch_size must be at least 1, got {n}")
        parts: list[Batch] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        missing = n
        while missing:
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            part = self.draw_some(table, missing, rest, buffers, counted, check)
            if part is None:
                break
            parts.append(part)
            missing -= len(part)
        if not parts:
            raise Timeout(f"table {table!r}: nothing could be sampled within {timeout} s")
        return parts[0] if len(parts) == 1 else joined(parts)

    def draw_some(
        self, name: str, n: int, timeout: float | None, buffers: Buffers, counted: bool, check: Check | None = None
    ) -> Batch | None:
        """Draw under the lock, copy outside it."""
        drawn: Any = None
        core = self.core

        def ready() -> bool:
            nonlocal drawn
            if check is not None and table.size:
                check(table.shapes())
            drawn = table.try_draw(n, counted)
            return drawn is not None

        with self.lock:
            table = core.table(name)
            if not self.wait_for("sample", name, ready, timeout):
                return None
            memory = buffers.take(drawn.layout.nbytes)
            if drawn.info.lengths is not None:
                memory[: drawn.layout.nbytes] = 0
            plan, rows = table.plan(drawn, memory.ctypes.data)
            ticket = core.store.begin_read()
            table.finish(drawn)
            self.wake()
        run_plan(plan, rows)
        with self.lock:
            core.store.end_read(ticket)
            core.store.trim()
        return Batch(drawn.layout.views(memory), drawn.info)
