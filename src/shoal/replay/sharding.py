"""One client over several servers: writers are spread, samples drawn in proportion, updates routed by key.

The top bits of a key say which shard it came from; servers never see them. Shares follow the servers' sizes, or the sums of their
priorities where the selector is prioritized, and are asked for again every half second.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.replay.batch import Batch, Buffers
from shoal.replay.columns import Column, Spec, Tree
from shoal.replay.errors import NotFound, Timeout
from shoal.replay.local import joined

__all__ = ["ShardedBackend"]

SHARD_BIT = 56
MOST_SHARDS = 64
SHARES_SECONDS = 0.5


class ShardSink:
    """The sink of one shard, whose keys say so."""

    def __init__(self, sink: Any, shard: int) -> None:
        self._sink, self._shard = sink, shard

    def open(self, specs: Sequence[Spec], rows: int) -> Any:
        return self._sink.open(specs, rows)

    def close(self, group: Any, filled: int) -> None:
        self._sink.close(group, filled)

    def insert(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: npt.NDArray[np.int32],
        priorities: npt.NDArray[np.float64], timeout: float | None,
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        keys: npt.NDArray[np.int64] = self._sink.insert(table, columns, grouped, records, priorities, timeout)
        return keys + (self._shard << SHARD_BIT)

    def insert_one(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: Sequence[Any], priority: float,
        timeout: float | None,
    ) -> int | None:  # fmt: skip
        key = self._sink.insert_one(table, columns, grouped, records, priority, timeout)
        return None if key is None else key + (self._shard << SHARD_BIT)

    @property
    def lost(self) -> int:
        return int(getattr(self._sink, "lost", 0))

    def flush(self, timeout: float | None) -> None:
        self._sink.flush(timeout)

    def finish(self, timeout: float | None) -> None:
        self._sink.finish(timeout)


class ShardedBackend:
    """Several backends as one."""

    def __init__(self, backends: Sequence[Any], seed: int = 0) -> None:
        if not 1 <= len(backends) <= MOST_SHARDS:
            raise ConfigError(f"a sharded client has 1 to {MOST_SHARDS} servers, got {len(backends)}")
        self._backends = list(backends)
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._rng = np.random.default_rng(seed)
        self._sizes: dict[str, int] = {}  # items on all shards
        self._shares: dict[str, tuple[float, npt.NDArray[np.float64]]] = {}

    @classmethod
    def connect(cls, addresses: Sequence[str], key: Any, timeout: float | None) -> ShardedBackend:
        from shoal.replay.remote import RemoteBackend

        return cls([RemoteBackend(address, key, timeout) for address in addresses])

    def sink(self, **options: Any) -> ShardSink:
        """Writers take turns over the shards."""
        shard = next(self._turns) % len(self._backends)
        return ShardSink(self._backends[shard].sink(**options), shard)

    def _share(self, table: str) -> npt.NDArray[np.float64]:
        """Every shard's part of the samples."""
        with self._lock:
            found = self._shares.get(table)
            if found is not None and time.monotonic() - found[0] < SHARES_SECONDS:
                return found[1]
        infos = [backend.info(5.0)["tables"] for backend in self._backends]
        if any(table not in info for info in infos):
            raise NotFound(f"no table {table!r} on every shard")
        masses = np.array([info[table]["mass"] for info in infos])
        sizes = np.array([info[table]["size"] for info in infos], np.float64)
        self._sizes[table] = int(sizes.sum())
        weights = masses if masses.sum() > 0 else sizes
        share = weights / weights.sum() if weights.sum() > 0 else np.full(len(weights), 1 / len(weights))
        with self._lock:
            self._shares[table] = (time.monotonic() if sizes.all() else 0.0, share)
        return share

    def sample(
        self, table: str, n: int, timeout: float | None, buffers: Buffers, counted: bool, transform: Tree | None
    ) -> Batch:
        deadline = None if timeout is None else time.monotonic() + timeout
        parts: list[Batch] = []
        missing = n
        while missing:
            share = self._share(table)
            with self._lock:
                counts = self._rng.multinomial(missing, share)
            for shard, count in enumerate(counts.tolist()):
                if count:  # no shard is waited for long: items may come to another one
                    rest = SHARES_SECONDS if deadline is None else min(SHARES_SECONDS, max(0.0, deadline - time.monotonic()))
                    self._add(parts, shard, float(share[shard]), table, count, rest, buffers, counted, transform)
            missing = n - sum(len(part) for part in parts)
            if deadline is not None and time.monotonic() >= deadline:
                break
        if not parts:
            raise Timeout(f"table {table!r}: nothing could be sampled from {len(self._backends)} shards")
        batch = parts[0] if len(parts) == 1 else joined(parts)
        batch.info.table_size = self._sizes.get(table, batch.info.table_size)
        return batch

    def _add(
        self, parts: list[Batch], shard: int, share: float, table: str, count: int, timeout: float | None,
        buffers: Buffers, counted: bool, transform: Tree | None,
    ) -> None:  # fmt: skip
        try:
            batch = self._backends[shard].sample(table, count, timeout, buffers, counted, transform)
        except Timeout:
            return
        batch.info.keys = batch.info.keys + (shard << SHARD_BIT)
        batch.info.probabilities = batch.info.probabilities * share
        parts.append(batch)

    def _split(self, keys: npt.NDArray[np.int64]) -> list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """(shard, positions, the server's own keys) for the shards that occur."""
        shards = keys >> SHARD_BIT
        own = keys & ((1 << SHARD_BIT) - 1)
        return [
            (int(shard), np.flatnonzero(shards == shard), own[shards == shard])
            for shard in np.unique(shards)
            if 0 <= shard < len(self._backends)
        ]

    def consume(self, table: str, keys: npt.NDArray[np.int64], consumed: bool) -> None:
        for shard, _, own in self._split(keys):
            self._backends[shard].consume(table, own, consumed)

    def update(self, table: str, keys: npt.NDArray[np.int64], priorities: Any, timeout: float | None) -> int:
        return sum(
            self._backends[shard].update(table, own, np.ascontiguousarray(priorities[at]), timeout)
            for shard, at, own in self._split(keys)
        )

    def delete(self, table: str, keys: npt.NDArray[np.int64], timeout: float | None) -> int:
        return sum(self._backends[shard].delete(table, own, timeout) for shard, _, own in self._split(keys))

    def reset(self, table: str, timeout: float | None) -> None:
        for backend in self._backends:
            backend.reset(table, timeout)

    def trim(self, table: str, timeout: float | None) -> int:
        return sum(backend.trim(table, timeout) for backend in self._backends)

    def info(self, timeout: float | None) -> dict[str, Any]:
        """The shards' own reports, and sizes and bytes summed over them."""
        shards = [backend.info(timeout) for backend in self._backends]
        names = list(shards[0]["tables"])
        summed = ("size", "bytes", "mass", "inserts", "samples", "deletes", "unknown_updates")
        tables = {name: {what: sum(s["tables"][name][what] for s in shards) for what in summed} for name in names}
        return {"tables": tables, "lost": sum(s["lost"] for s in shards), "shards": shards}

    def checkpoint(self, timeout: float | None) -> str:
        return ",".join(backend.checkpoint(timeout) for backend in self._backends)

    def sampled_once(self, table: str) -> bool:
        return any(backend.sampled_once(table) for backend in self._backends)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
