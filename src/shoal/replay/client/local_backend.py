"""A server in this process: its clients call the core under its lock, its writers fill the chunk store itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.client.backend import ItemSink, RowRecord
from shoal.replay.client.expressions import apply, check
from shoal.replay.errors import NotFound
from shoal.replay.table.chunks import ChunkGroup
from shoal.replay.table.columns import Column, Spec, Tree
from shoal.replay.table.locked_core import LockedCore
from shoal.replay.table.replay_core import PendingInserts
from shoal.replay.table.sampled_batch import Batch, Buffers

__all__ = ["LocalBackend", "LocalItemSink"]


class LocalBackend:
    """A server in this process."""

    def __init__(self, locked: LockedCore, save: Callable[[], Path] | None) -> None:
        self._locked, self._save = locked, save

    def turn(self) -> int:
        return 0

    def sink(self, turn: int | None = None, **options: Any) -> ItemSink:
        """Options speak of a network: nothing to choose here."""
        return LocalItemSink(self._locked)

    def sample(
        self, table: str, n: int, timeout: float | None, buffers: Buffers, counted: bool, transform: Tree | None
    ) -> Batch:
        if transform is None:
            return self._locked.draw(table, n, timeout, buffers, counted)
        batch = self._locked.draw(table, n, timeout, buffers, counted, partial(check, transform))
        try:
            return Batch(apply(transform, batch.data), batch.info)
        except BaseException:
            if not counted:
                self.consume(table, batch.info.keys, False)
            raise

    def consume(self, table: str, keys: npt.NDArray[np.int64], consumed: bool) -> None:
        with self._locked.lock:
            core = self._locked.core.table(table)
            if consumed:
                core.consume(keys)
            else:
                core.release(len(keys))
            self._locked.wake()

    def update(self, table: str, keys: npt.NDArray[np.int64], priorities: Any, timeout: float | None) -> int:
        with self._locked.lock:
            self._locked.check_open()
            _, refused = self._locked.core.update(table, keys, priorities)
            return refused

    def delete(self, table: str, keys: npt.NDArray[np.int64], timeout: float | None) -> int:
        return self._locked.change(lambda core: core.delete(table, keys))

    def reset(self, table: str, timeout: float | None) -> None:
        self._locked.change(lambda core: core.table(table).reset())

    def trim(self, table: str, timeout: float | None) -> int:
        return self._locked.change(lambda core: core.table(table).trim())

    def info(self, timeout: float | None) -> dict[str, Any]:
        with self._locked.lock:
            self._locked.check_open()
            return self._locked.core.info()

    def checkpoint(self, timeout: float | None) -> str:
        self._locked.check_open()
        if self._save is None:
            raise NotFound("this server has no checkpoint_dir")
        return str(self._save())

    def sampled_once(self, table: str) -> bool:
        return self._locked.core.table(table).table.max_times_sampled > 0

    def close(self) -> None:
        """The server outlives its clients."""


class LocalItemSink:
    """A writer's chunks lie in the store itself; items go in at once."""

    def __init__(self, locked: LockedCore) -> None:
        self._locked = locked

    def chunk_bytes(self) -> int:
        return self._locked.core.chunk_bytes

    def open(self, specs: Sequence[Spec], rows: int) -> ChunkGroup:
        with self._locked.lock:
            self._locked.check_open()
            return self._locked.core.store.open(specs, rows)

    def close(self, group: ChunkGroup, filled: int) -> None:
        with self._locked.lock:
            if not self._locked.closed:
                self._locked.core.store.close(group, filled)

    def insert(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: npt.NDArray[np.int32],
        priorities: npt.NDArray[np.float64], timeout: float | None,
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        locked = self._locked
        with locked.lock:
            if locked.closed:
                locked.check_open()
            pending = PendingInserts(locked.core.table(table), columns, grouped, priorities, records)
            if pending.push() and not pending.refused:
                locked.wake()
                return pending.keys
            if pending.handled:
                locked.wake()
            return locked.insert(pending, timeout)

    def insert_one(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: Sequence[RowRecord], priority: float,
        timeout: float | None,
    ) -> int:  # fmt: skip
        return int(self.insert(table, columns, grouped, np.array([records], np.int32), np.array([priority]), timeout)[0])

    lost = 0  # the server is this process

    def flush(self, timeout: float | None) -> None:
        """Items are in as soon as they are made."""

    def finish(self, timeout: float | None) -> None:
        """Nothing is on its way."""
