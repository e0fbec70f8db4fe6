"""One client over several servers: writers are spread, samples drawn in proportion, updates routed by key.

The top bits of a key say which shard it came from; servers never see them. Shares follow the servers' sizes, or the sums of their
priorities where the selector is prioritized, and are asked for again every half second.

A shard that does not answer is left out: samples come from the others, new writers go to them, updates of its items are counted and
passed over. A thread asks it again until it answers, and takes it in.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.replay.client import timings
from shoal.replay.client.backend import Backend, ItemSink, RowRecord
from shoal.replay.client.remote_backend import RemoteBackend
from shoal.replay.errors import Closed, NotFound, Refused, Timeout, Unanswered
from shoal.replay.table.chunks import ChunkGroup
from shoal.replay.table.columns import Column, Spec, Tree
from shoal.replay.table.sampled_batch import Batch, Buffers, joined

__all__ = ["ShardedBackend"]

SHARD_BIT = 56
MOST_SHARDS = 64
SHARES_SECONDS = 0.5
PROBE_SECONDS = 0.5
LOG = logging.getLogger("shoal.replay")
T = TypeVar("T")


class ShardItemSink:
    """The sink of one shard, whose keys say so."""

    def __init__(self, sink: ItemSink, shard: int, leave_out: Callable[[int, Exception], None]) -> None:
        self._sink, self._shard, self._leave_out = sink, shard, leave_out

    def chunk_bytes(self) -> int:
        return self._sink.chunk_bytes()

    def open(self, specs: Sequence[Spec], rows: int) -> ChunkGroup:
        return self._sink.open(specs, rows)

    def close(self, group: ChunkGroup, filled: int) -> None:
        self._sink.close(group, filled)

    def insert(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: npt.NDArray[np.int32],
        priorities: npt.NDArray[np.float64], timeout: float | None,
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        try:
            keys = self._sink.insert(table, columns, grouped, records, priorities, timeout)
        except Unanswered as error:
            self._leave_out(self._shard, error)
            raise
        return keys + (self._shard << SHARD_BIT)

    def insert_one(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: Sequence[RowRecord], priority: float,
        timeout: float | None,
    ) -> int | None:  # fmt: skip
        key = self._sink.insert_one(table, columns, grouped, records, priority, timeout)
        return None if key is None else key + (self._shard << SHARD_BIT)

    @property
    def lost(self) -> int:
        return self._sink.lost

    def flush(self, timeout: float | None) -> None:
        self._sink.flush(timeout)

    def finish(self, timeout: float | None) -> None:
        self._sink.finish(timeout)


class ShardedBackend:
    """Several backends as one."""

    def __init__(self, backends: Sequence[Backend], names: Sequence[str] | None = None, seed: int = 0) -> None:
        if not 1 <= len(backends) <= MOST_SHARDS:
            raise ConfigError(f"a sharded client has 1 to {MOST_SHARDS} servers, got {len(backends)}")
        self._backends = list(backends)
        self._names = list(names) if names is not None else [f"shard {i}" for i in range(len(backends))]
        self._turns, self._insert_turns = itertools.count(), itertools.count()
        self._lock = threading.Lock()
        self._back = threading.Condition(self._lock)  # a shard answers again
        self._rng = np.random.default_rng(seed)
        self._sizes: dict[str, int] = {}  # items on all shards
        self._shares: dict[str, tuple[float, npt.NDArray[np.float64]]] = {}
        self._down: dict[int, str] = {}  # shards that do not answer, and why
        self._missed_updates = 0  # priorities for items of shards that were down
        self._closed = threading.Event()

    @classmethod
    def connect(cls, addresses: Sequence[str], key: Any, timeout: float | None) -> ShardedBackend:
        return cls([RemoteBackend(address, key, timeout, timings.DEAD_SECONDS) for address in addresses], addresses)

    # -- who lives

    def _living(self) -> list[int]:
        with self._lock:
            living = [shard for shard in range(len(self._backends)) if shard not in self._down]
            if not living:
                raise Unanswered(f"none of {len(self._backends)} shards answers: {'; '.join(self._down.values())}")
        return living

    def _await_one(self, deadline: float | None) -> bool:
        """Whether a shard lives, or comes back in time."""
        rest = timings.DEAD_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
        with self._lock:
            self._back.wait_for(lambda: len(self._down) < len(self._backends) or self._closed.is_set(), rest)
            return len(self._down) < len(self._backends)

    def _ask(self, shard: int, question: Callable[[Backend], T]) -> T | None:
        """The answer of a shard; None where it does not answer, and is left out from now on."""
        try:
            return question(self._backends[shard])
        except (Unanswered, Closed) as error:
            self.leave_out(shard, error)
            return None

    def leave_out(self, shard: int, error: Exception) -> None:
        """A shard does not answer: continue without it until it does."""
        if self._closed.is_set():
            raise error
        with self._lock:
            if shard in self._down:
                return
            self._down[shard] = str(error)
            self._shares.clear()
        LOG.warning("%s does not answer: going on with the other shards", self._names[shard])
        threading.Thread(target=self._probe, args=(shard,), name="shoal-shard", daemon=True).start()

    def _probe(self, shard: int) -> None:
        """Take a shard in again as soon as it answers."""
        while not self._closed.wait(PROBE_SECONDS):
            try:
                self._backends[shard].info(PROBE_SECONDS)
            except (Timeout, Closed):
                continue
            with self._lock:
                del self._down[shard]
                self._shares.clear()
                self._back.notify_all()
            LOG.warning("%s answers again", self._names[shard])
            return

    def _all(self, question: Callable[[Backend], T]) -> list[T]:
        """The answers of all shards; where one is down the others have done it, and an error says so."""
        answers = [self._ask(shard, question) for shard in self._living()]
        with self._lock:
            if self._down:
                names = ", ".join(self._names[shard] for shard in sorted(self._down))
                raise Unanswered(f"{names} did not answer; the other shards have done it")
        return [answer for answer in answers if answer is not None]

    # -- writing and sampling

    def turn(self) -> int:
        """The shard of the next insert: they take turns over the shards that live."""
        living = self._living()
        return living[next(self._insert_turns) % len(living)]

    def sink(self, turn: int | None = None, **options: Any) -> ShardItemSink:
        """A sink of the shard whose turn it is; writers take turns of their own."""
        if turn is None:
            living = self._living()
            turn = living[next(self._turns) % len(living)]
        return ShardItemSink(self._backends[turn].sink(**options), turn, self.leave_out)

    def _share(self, table: str) -> npt.NDArray[np.float64]:
        """Every shard's part of the samples."""
        with self._lock:
            found = self._shares.get(table)
            if found is not None and time.monotonic() - found[0] < SHARES_SECONDS:
                return found[1]
        masses, sizes = np.zeros(len(self._backends)), np.zeros(len(self._backends))
        for shard in self._living():
            info = self._ask(shard, lambda backend: backend.info(SHARES_SECONDS)["tables"])
            if info is not None and table not in info:
                raise NotFound(f"no table {table!r} on every shard")
            if info is not None:
                masses[shard], sizes[shard] = info[table]["mass"], info[table]["size"]
        living = self._living()
        self._sizes[table] = int(sizes.sum())
        weights = masses if masses.sum() > 0 else sizes
        if not weights.any():
            weights[living] = 1.0
        share: npt.NDArray[np.float64] = weights / weights.sum()
        with self._lock:
            self._shares[table] = (time.monotonic() if sizes[living].all() else 0.0, share)
        return share

    def sample(
        self, table: str, n: int, timeout: float | None, buffers: Buffers, counted: bool, transform: Tree | None
    ) -> Batch:
        deadline = None if timeout is None else time.monotonic() + timeout
        parts: list[Batch] = []
        missing = n
        while missing:
            try:
                share = self._share(table)
            except Unanswered:  # none lives: one may come back in time
                if self._await_one(deadline):
                    continue
                if parts:
                    break
                raise
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
        except (Unanswered, Closed) as error:
            self.leave_out(shard, error)
            return
        except Timeout:
            return
        batch.info.keys = batch.info.keys + (shard << SHARD_BIT)
        batch.info.probabilities = batch.info.probabilities * share
        parts.append(batch)

    # -- by key

    def _split(self, keys: npt.NDArray[np.int64]) -> list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """(shard, positions, the server's own keys) for the shards that occur."""
        shards = keys >> SHARD_BIT
        own = keys & ((1 << SHARD_BIT) - 1)
        return [
            (int(shard), np.flatnonzero(shards == shard), own[shards == shard])
            for shard in np.unique(shards)
            if 0 <= shard < len(self._backends)
        ]

    def _each(
        self, keys: npt.NDArray[np.int64], question: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64], Backend], int]
    ) -> tuple[int, int]:
        """Ask the shards of these keys (positions, own keys, backend); returns the sum of the answers, and keys without one."""
        total = missed = 0
        living = set(self._living())
        for shard, at, own in self._split(keys):
            answer = self._ask(shard, functools.partial(question, at, own)) if shard in living else None
            if answer is None:
                missed += len(own)
            else:
                total += answer
        return total, missed

    def consume(self, table: str, keys: npt.NDArray[np.int64], consumed: bool) -> None:
        """What a shard that is down had reserved has gone with it."""
        refused: list[Refused] = []

        def consume(_: Any, own: npt.NDArray[np.int64], backend: Backend) -> int:
            try:
                backend.consume(table, own, consumed)
            except Refused as error:  # restarted: the others' parts are settled all the same
                refused.append(error)
                return 0
            return 1

        settled, _ = self._each(keys, consume)
        if refused and not settled:
            raise refused[0]

    def update(self, table: str, keys: npt.NDArray[np.int64], priorities: Any, timeout: float | None) -> int:
        refused, missed = self._each(
            keys, lambda at, own, backend: int(backend.update(table, own, np.ascontiguousarray(priorities[at]), timeout))
        )
        self._missed_updates += missed
        return refused

    def delete(self, table: str, keys: npt.NDArray[np.int64], timeout: float | None) -> int:
        return self._each(keys, lambda _, own, backend: int(backend.delete(table, own, timeout)))[0]

    # -- all of them

    def reset(self, table: str, timeout: float | None) -> None:
        self._all(lambda backend: backend.reset(table, timeout))

    def trim(self, table: str, timeout: float | None) -> int:
        return sum(self._all(lambda backend: int(backend.trim(table, timeout))))

    def info(self, timeout: float | None) -> dict[str, Any]:
        """The reports of the shards that answer, sizes and counts summed over them, and the shards that are down."""
        answers = [self._ask(shard, lambda backend: backend.info(timeout)) for shard in self._living()]
        self._living()
        shards = [answer for answer in answers if answer is not None]
        names = list(shards[0]["tables"])
        summed = ("size", "bytes", "mass", "inserts", "samples", "deletes", "unknown_updates")
        tables = {name: {what: sum(s["tables"][name][what] for s in shards) for what in summed} for name in names}
        with self._lock:
            down = {self._names[shard]: reason for shard, reason in self._down.items()}
        return {
            "tables": tables, "lost": sum(s["lost"] for s in shards), "shards": shards, "down": down,
            "missed_updates": self._missed_updates,
        }  # fmt: skip

    def checkpoint(self, timeout: float | None) -> str:
        return ",".join(self._all(lambda backend: str(backend.checkpoint(timeout))))

    def sampled_once(self, table: str) -> bool:
        return any(self._ask(shard, lambda backend: backend.sampled_once(table)) for shard in self._living())

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._back.notify_all()
        for backend in self._backends:
            backend.close()

