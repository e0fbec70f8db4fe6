"""The transport-free core: tables over one chunk store, with non-blocking operations, no threads and no locks.

In-process clients call it under a lock (`locked_core`), the socket service calls it from its loop (`socket_service`), and a role
can offer it through a runtime's call wire.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.replay.errors import InvalidItem, NotFound
from shoal.replay.table import fields
from shoal.replay.table.chunks import CHUNK_BYTES, ChunkStore
from shoal.replay.table.columns import Column
from shoal.replay.table.kernels import run_plan
from shoal.replay.table.limiters import RateLimiter
from shoal.replay.table.memory_pool import MemoryPool
from shoal.replay.table.sampled_batch import Batch, BatchLayout, BatchMemory, Info
from shoal.replay.table.table import Table
from shoal.replay.table.table_core import Drawn, TableCore

__all__ = ["Core", "PendingInserts"]

MOST_SEED = 1 << 63
_owners: weakref.WeakKeyDictionary[RateLimiter, weakref.ref[Any]] = weakref.WeakKeyDictionary()  # -> the core that it counts for


class PendingInserts:
    """Items on their way into one table: as many as the limiter allows go in at every `push`."""

    def __init__(
        self,
        table: TableCore,
        columns: tuple[Column, ...],
        grouped: bool,
        priorities: npt.NDArray[np.float64],
        records: npt.NDArray[np.int32],
        keys: npt.NDArray[np.int64] | None = None,
    ) -> None:
        n = len(priorities)
        self.table, self.priorities, self.records = table, priorities, records
        self._columns, self._grouped = columns, grouped
        table.layout(columns, grouped)  # refuses columns that do not fit, before anything waits
        self.fresh = keys is None
        self.keys = np.empty(n, np.int64) if keys is None else keys
        self.status = np.empty(n, np.int8)
        self.handled = 0
        self._refused_before = table.refused_items

    def push(self) -> bool:
        """Insert what is allowed now; True when nothing is left to do."""
        layout = self.table.layout(self._columns, self._grouped)  # a reset may have come while they waited
        self.handled += self.table.try_insert(
            layout, self.priorities, self.records, self.keys, self.status, self.handled, self.fresh
        )
        return self.handled == len(self.priorities)

    @property
    def refused(self) -> bool:
        """Whether an item was refused."""
        return self.table.refused_items != self._refused_before

    def refusals(self) -> list[tuple[int, str]]:
        """Positions and reasons of the items that were refused."""
        if not self.refused:
            return []
        bad = np.flatnonzero(self.status[: self.handled] == fields.BAD_PRIORITY)
        return [
            (int(at), f"priority {self.priorities[at]} of item {at} for table {self.table.table.name!r} must be finite, "
             "not negative, and within range of the selector's exponent")
            for at in bad
        ]  # fmt: skip


class Core:
    """Everything a replay server holds."""

    def __init__(
        self,
        tables: Iterable[Table],
        storage: str = "memory",
        directory: str | os.PathLike[str] | None = None,
        compression: dict[str, str] | None = None,
        seed: int = 0,
        first_key: int = 1,
    ) -> None:
        if not isinstance(seed, (int, np.integer)) or not 0 <= seed < MOST_SEED:
            raise ConfigError(f"a seed is a whole number from 0 to 2**63 - 1, got {seed!r}")
        self.closed = False
        self.store = ChunkStore(MemoryPool(storage, directory), compression)
        self.tables: dict[str, TableCore] = {}
        self.writers: dict[int, int] = {}  # writer -> the number of its last item
        self.lost = 0
        self.chunk_bytes = CHUNK_BYTES  # of the chunks that writers should make
        self.started = time.time()
        for at, table in enumerate(tables):
            if table.name in self.tables:
                raise ConfigError(f"two tables are called {table.name!r}")
            self._claim(table)
            self.tables[table.name] = TableCore(table, self.store, seed + 0x9E3779B9 * at, first_key)
            if table.max_bytes is not None:
                self.chunk_bytes = max(1, min(self.chunk_bytes, table.max_bytes // 8))
        if not self.tables:
            raise ConfigError("a replay server needs at least one table")

    def _claim(self, table: Table) -> None:
        """A limiter counts for one table of one server. The limiters of a closed server start again from zero."""
        owner = _owners.get(table.limiter)
        living: Core | None = None if owner is None else owner()
        if living is not None and not living.closed:
            raise ConfigError(
                f"table {table.name!r}: its limiter already counts for another table; give every table a limiter of its own, "
                "and close a server before its tables are served by another"
            )
        _owners[table.limiter] = weakref.ref(self)
        table.limiter.begin()

    def table(self, name: str) -> TableCore:
        try:
            return self.tables[name]
        except KeyError:
            raise NotFound(f"no table {name!r}; there are {sorted(self.tables)}") from None

    def try_sample(
        self, name: str, n: int, buffers: BatchMemory, counted: bool = True, layout: BatchLayout | None = None,
        limited: bool = True,
    ) -> Batch | None:
        """Draw and gather up to n items, or None when the limiter allows none. For callers without threads.

        `layout` is where n items that are all alike go: a part of a larger batch. Draws that are not `limited` are unknown to the
        limiter.
        """
        gathered = self._gathered(name, n, buffers, counted, layout, limited)
        return None if gathered is None else Batch(gathered[0].layout.views(gathered[1]), gathered[0].info)

    def try_gather(
        self, name: str, n: int, buffers: BatchMemory, counted: bool = True, layout: BatchLayout | None = None,
        limited: bool = True,
    ) -> Info | None:
        """The same, for callers who know where the items lie in their memory."""
        gathered = self._gathered(name, n, buffers, counted, layout, limited)
        return None if gathered is None else gathered[0].info

    def _gathered(
        self, name: str, n: int, buffers: BatchMemory, counted: bool, layout: BatchLayout | None, limited: bool
    ) -> tuple[Drawn, npt.NDArray[np.uint8]] | None:
        table = self.table(name)
        drawn = table.try_draw(n, counted, limited)
        if drawn is None:
            return None
        if layout is not None:
            drawn = drawn._replace(layout=layout)
        memory = buffers.take(drawn.layout.nbytes)
        if drawn.info.lengths is not None:
            memory[: drawn.layout.nbytes] = 0
        plan, rows = table.plan(drawn, memory.ctypes.data)
        run_plan(plan, rows)
        table.finish(drawn)
        self.store.trim()
        return drawn, memory

    def update(self, name: str, keys: Any, priorities: Any) -> tuple[int, int]:
        keys, values = as_keys(keys), np.ascontiguousarray(priorities, np.float64).reshape(-1)
        if len(keys) != len(values):
            raise InvalidItem(f"{len(keys)} keys but {len(values)} priorities")
        return self.table(name).update(keys, values)

    def delete(self, name: str, keys: Any) -> int:
        return self.table(name).delete(as_keys(keys))

    def info(self) -> dict[str, Any]:
        """Tables and the store, as plain values."""
        return {
            "tables": {name: table.info() for name, table in self.tables.items()},
            "chunks": self.store.live,
            "stored_bytes": self.store.stored_bytes,
            "mapped_bytes": self.store.pool.mapped_bytes,
            "writers": len(self.writers),
            "lost": self.lost,
            "seconds": time.time() - self.started,
        }

    def close(self) -> None:
        self.closed = True
        self.store.pool.close()


def as_keys(keys: Any) -> npt.NDArray[np.int64]:
    """Keys as a flat int64 array."""
    array = np.asarray(keys)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidItem(f"keys are integers, got {array.dtype}")
    return np.ascontiguousarray(array, np.int64).reshape(-1)
