"""The client: the same calls for a server in this process, on this machine or elsewhere, and for several servers at once."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.replay.client.backend import Backend
from shoal.replay.client.dataset import Dataset
from shoal.replay.client.fork_safety import EndsAtFork
from shoal.replay.client.remote_backend import RemoteBackend
from shoal.replay.client.sharding import ShardedBackend
from shoal.replay.client.writer import Writer
from shoal.replay.errors import Closed, InvalidItem, Timeout, Unanswered
from shoal.replay.table.columns import Tree, arrays_of
from shoal.replay.table.replay_core import as_keys
from shoal.replay.table.sampled_batch import Batch, Buffers

__all__ = ["Client"]

LONGEST_SECONDS = 1e9  # as good as for ever
UNSET = -1.0
"""Use the client's own timeout."""


class ThreadBuffers(threading.local):
    """Buffers for batches, of each thread its own."""

    def __init__(self) -> None:
        self.buffers = Buffers()


class Client(EndsAtFork):
    """Writes to and samples from a replay server.

    `Client("tcp://host:port")` connects; several addresses make one client over all of them; `server.client()` stays in
    this process. timeout is the default of every call: seconds, 0 for "now", None for ever.
    """

    def __init__(self, address: Any, key: Any = None, timeout: float | None = None) -> None:
        super().__init__()
        self.timeout = timeout
        self._thread = ThreadBuffers()
        self._inserters: dict[int, list[Writer]] = {}  # idle ones of every server; a call takes one and puts it back
        self._backend: Backend
        if isinstance(address, str):
            self._backend = RemoteBackend(address, key, timeout)
        elif isinstance(address, (list, tuple)):
            self._backend = ShardedBackend.connect(address, key, timeout)
        elif isinstance(address, Backend):
            self._backend = address
        else:
            raise ConfigError(f"a client connects to an address ('tcp://127.0.0.1:7777') or to a list of them, got {address!r}")

    def writer(self, max_history: int = 1, timeout: float | None = UNSET, **options: Any) -> Writer:
        """A trajectory writer that remembers max_history steps. Not for several threads at once.

        For a server elsewhere: max_in_flight items may wait for confirmation; compression is "auto" or "none".
        """
        self._check_open()
        if unknown := options.keys() - {"max_in_flight", "compression"}:
            raise ConfigError(f"a writer has no option {min(unknown)!r}; it has max_in_flight and compression")
        if options.get("compression", "auto") not in ("auto", "none"):
            raise ConfigError(f"compression must be 'auto' or 'none', got {options['compression']!r}")
        return Writer(self._backend.sink(**options), max_history, self._wait(timeout))

    def insert(self, data: Tree, priorities: Mapping[str, float], timeout: float | None = UNSET) -> dict[str, int]:
        """One item of one step in every named table; returns the keys."""
        leaves = {path: leaf[None] for path, leaf in arrays_of(data).items()}
        if not leaves:
            raise InvalidItem("an item needs at least one column")
        keys = self._insert(leaves, 1, priorities, timeout)
        return {table: int(found[0]) for table, found in keys.items()}

    def insert_batch(
        self, data: Tree, priorities: Mapping[str, Any], timeout: float | None = UNSET
    ) -> dict[str, npt.NDArray[np.int64]]:
        """One item for every row of data, [N, ...], in every named table; returns their keys [N]."""
        leaves = arrays_of(data)
        sizes = {len(leaf) if leaf.ndim else 0 for leaf in leaves.values()}
        if len(sizes) != 1 or 0 in sizes:
            raise InvalidItem(f"insert_batch needs the same number of rows in every leaf, got {sizes}")
        return self._insert(leaves, sizes.pop(), priorities, timeout)

    def _insert(
        self, leaves: dict[str, npt.NDArray[Any]], count: int, priorities: Mapping[str, Any], timeout: float | None
    ) -> dict[str, npt.NDArray[np.int64]]:
        self._check_open()
        wait, alive = self._wait(timeout), True
        turn = self._backend.turn()
        idle = self._inserters.setdefault(turn, [])
        try:
            writer = idle.pop()
        except IndexError:
            writer = Writer(self._backend.sink(turn, wait=True), 1, self.timeout)
        try:
            return writer.insert_rows(leaves, count, priorities, wait)
        except Unanswered:
            alive = False  # the next call makes a new one, which may find a living server
            raise
        finally:
            if alive and not self._closed:
                idle.append(writer)
            else:
                _let_go(writer)

    def sample(
        self,
        table: str,
        batch_size: int = 1,
        timeout: float | None = UNSET,
        transform: Tree | None = None,
        buffers: Buffers | None = None,
    ) -> Batch:
        """A batch; waits for all of it, returns what there is when the time is over, raises Timeout with nothing.

        transform is a tree of expressions that the service applies. The arrays are reused once you no longer refer to them.
        """
        self._check_open()
        count = _checked(batch_size)
        return self._backend.sample(table, count, self._wait(timeout), buffers or self._thread.buffers, True, transform)

    def dataset(
        self,
        table: str,
        batch_size: int = 1,
        prefetch: int = 2,
        timeout: float | None = UNSET,
        transform: Tree | None = None,
        buffers: Buffers | None = None,
    ) -> Dataset:
        """Batches without end, gathered ahead by a thread; a batch counts as sampled when it is taken."""
        self._check_open()
        if not isinstance(prefetch, (int, np.integer)) or prefetch < 0:
            raise ConfigError(f"prefetch is a number of batches, 0 or more, got {prefetch!r}")
        return Dataset(self._backend, table, _checked(batch_size), prefetch, self._wait(timeout), transform, buffers)

    def update_priorities(self, table: str, keys: Any, priorities: Any, timeout: float | None = UNSET) -> None:
        """Set priorities; unknown keys are ignored and counted, bad values are refused after the others are set."""
        self._check_open()
        try:
            values = np.ascontiguousarray(priorities, np.float64).reshape(-1)
        except (TypeError, ValueError) as error:
            raise InvalidItem(f"priorities are numbers: {error}") from error
        known = as_keys(keys)
        if len(known) != len(values):
            raise InvalidItem(f"{len(known)} keys but {len(values)} priorities")
        refused = self._backend.update(table, known, values, self._wait(timeout))
        if refused:
            raise InvalidItem(f"table {table!r}: {refused} priorities were not finite or negative; the others are set")

    def delete(self, table: str, keys: Any, timeout: float | None = UNSET) -> int:
        """Delete items; returns how many there were."""
        self._check_open()
        return self._backend.delete(table, as_keys(keys), self._wait(timeout))

    def reset(self, table: str, timeout: float | None = UNSET) -> None:
        """Remove all items of a table and zero its counters."""
        self._check_open()
        self._backend.reset(table, self._wait(timeout))

    def trim(self, table: str, timeout: float | None = UNSET) -> int:
        """Bring a soft table back to its limits; returns how many items were removed."""
        self._check_open()
        return self._backend.trim(table, self._wait(timeout))

    def info(self, timeout: float | None = UNSET) -> dict[str, Any]:
        self._check_open()
        return self._backend.info(self._wait(timeout))

    def checkpoint(self, timeout: float | None = UNSET) -> str:
        """Save all tables as of one instant; returns the path."""
        self._check_open()
        return self._backend.checkpoint(self._wait(timeout))

    def close(self) -> None:
        """Disconnect; the server continues."""
        if self._closed:
            return
        self._closed = True
        for idle in list(self._inserters.values()):
            while idle:
                _let_go(idle.pop())
        self._backend.close()

    def _wait(self, timeout: float | None) -> float | None:
        """The time that a call may take: its own, or this client's."""
        try:
            if timeout is None or 0 <= timeout < LONGEST_SECONDS:
                return timeout
            if timeout < 0:
                return self.timeout
            if timeout >= LONGEST_SECONDS:
                return None
        except TypeError:
            raise InvalidItem(f"a timeout is a number of seconds, or None for ever, got {timeout!r}") from None
        raise InvalidItem(f"a timeout is a number of seconds, or None for ever, got {timeout!r}")


def _checked(batch_size: Any) -> int:
    try:
        count = int(operator.index(batch_size))
    except TypeError:
        raise InvalidItem(f"batch_size is a whole number, got {batch_size!r}") from None
    if count < 1:
        raise InvalidItem(f"batch_size must be at least 1, got {count}")
    return count


def _let_go(writer: Writer) -> None:
    """Close a writer that has no unconfirmed items."""
    with contextlib.suppress(Closed, Timeout):
        writer.close(timeout=0)
