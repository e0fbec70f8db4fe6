"""The in-process way to a core: a lock, a condition for those who wait, and copies made outside the lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.batch import Batch, Buffers
from shoal.replay.chunks import Group
from shoal.replay.columns import Column, Spec
from shoal.replay.core import Core, Pending
from shoal.replay.errors import Closed, InvalidItem, Timeout
from shoal.replay.kernels import run_plan
from shoal.replay.patterns import Record

__all__ = ["Local", "LocalSink"]


Check = Callable[[dict[str, tuple[tuple[int, ...], Any]]], None]
"""Refuses the (shape, dtype) of columns."""


class Local:
    """A core that many threads may use."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.lock = threading.Lock()
        self.saving = threading.Lock()  # one checkpoint at a time
        self.changed = threading.Condition(self.lock)
        self.closed = False
        self.on_change: Callable[[], None] | None = None  # tells the socket service that requests may go on
        self._waiters = 0

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("the replay server was closed")

    def wake(self) -> None:
        """Tables changed; the lock is held."""
        if self._waiters:
            self.changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def wait_for(self, side: str, table: str, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Call ready() now and after every change until it is true or the time is over; the lock is held."""
        self._check_open()
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
                self._check_open()
                if ready():
                    return True
        finally:
            self._waiters -= 1
            limiter.end_wait(side)

    def insert(self, pending: Pending, timeout: float | None) -> npt.NDArray[np.int64]:
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
            part = self._draw_some(table, missing, rest, buffers, counted, check)
            if part is None:
                break
            parts.append(part)
            missing -= len(part)
        if not parts:
            raise Timeout(f"table {table!r}: nothing could be sampled within {timeout} s")
        return parts[0] if len(parts) == 1 else joined(parts)

    def _draw_some(
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


def joined(parts: Sequence[Batch]) -> Batch:
    """Several batches as one; shorter time axes are padded with zeros."""
    from shoal.replay.columns import flatten, unflatten

    flats = [flatten(part.data) for part in parts]
    data = {}
    for path in flats[0]:
        arrays = [flat[path] for flat in flats]
        if any(array.shape[1:] != arrays[0].shape[1:] for array in arrays):
            longest = max(array.shape[1] for array in arrays)
            arrays = [np.pad(a, [(0, 0), (0, longest - a.shape[1])] + [(0, 0)] * (a.ndim - 2)) for a in arrays]
        data[path] = np.concatenate(arrays)
    infos = [part.info for part in parts]
    info = infos[0].__class__(
        np.concatenate([i.keys for i in infos]),
        np.concatenate([i.probabilities for i in infos]),
        np.concatenate([i.priorities for i in infos]),
        np.concatenate([i.times_sampled for i in infos]),
        infos[-1].table_size,
    )
    if any(i.lengths is not None for i in infos) or len({tuple(f[p].shape[1:2] for p in f) for f in flats}) > 1:
        timed = [path for path, array in flats[0].items() if array.ndim > 1]
        info.lengths = {
            path: np.concatenate([
                i.lengths[path] if i.lengths and path in i.lengths else np.full(len(i.keys), f[path].shape[1])
                for i, f in zip(infos, flats, strict=True)
            ])
            for path in timed
        }
    return Batch(unflatten(data), info)


class LocalSink:
    """A writer's chunks lie in the store itself; items go in at once."""

    def __init__(self, local: Local) -> None:
        self._local = local

    def chunk_bytes(self) -> int:
        return self._local.core.chunk_bytes

    def open(self, specs: Sequence[Spec], rows: int) -> Group:
        with self._local.lock:
            self._local._check_open()
            return self._local.core.store.open(specs, rows)

    def close(self, group: Group, filled: int) -> None:
        with self._local.lock:
            if not self._local.closed:
                self._local.core.store.close(group, filled)

    def insert(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: npt.NDArray[np.int32],
        priorities: npt.NDArray[np.float64], timeout: float | None,
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        local = self._local
        with local.lock:
            if local.closed:
                local._check_open()
            pending = Pending(local.core.table(table), columns, grouped, priorities, records)
            if pending.push() and not pending.refused:
                local.wake()
                return pending.keys
            if pending.handled:
                local.wake()
            return local.insert(pending, timeout)

    def insert_one(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: Sequence[Record], priority: float,
        timeout: float | None,
    ) -> int:  # fmt: skip
        return int(self.insert(table, columns, grouped, np.array([records], np.int32), np.array([priority]), timeout)[0])

    def flush(self, timeout: float | None) -> None:
        """Items are in as soon as they are made."""

    def finish(self, timeout: float | None) -> None:
        """Nothing is on its way."""
