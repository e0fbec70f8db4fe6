"""The client: one face for a server in this process, one on this machine, one elsewhere, and several at once."""

from __future__ import annotations

import contextlib
import operator
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.replay.batch import Batch, Buffers
from shoal.replay.columns import Tree, arrays_of
from shoal.replay.core import as_keys
from shoal.replay.errors import Closed, InvalidItem, Refused, Timeout, Unanswered
from shoal.replay.expressions import apply, check
from shoal.replay.forks import end_at_fork
from shoal.replay.local import Local, LocalSink
from shoal.replay.writer import Sink, Writer

__all__ = ["Backend", "Client", "Dataset", "LocalBackend"]

DEAD_SECONDS = 10.0
LONGEST_SECONDS = 1e9  # as good as for ever
UNSET = -1.0
"""Use the client's own timeout."""


class Backend(Protocol):
    """A way to one server, or to several."""

    def turn(self) -> int:
        """Which of several servers the next insert goes to."""

    def sink(self, turn: int | None = None, **options: Any) -> Sink: ...

    def sample(
        self, table: str, n: int, timeout: float | None, buffers: Buffers, counted: bool, transform: Tree | None
    ) -> Batch: ...

    def consume(self, table: str, keys: npt.NDArray[np.int64], consumed: bool) -> None: ...

    def update(self, table: str, keys: npt.NDArray[np.int64], priorities: Any, timeout: float | None) -> int: ...

    def delete(self, table: str, keys: npt.NDArray[np.int64], timeout: float | None) -> int: ...

    def reset(self, table: str, timeout: float | None) -> None: ...

    def trim(self, table: str, timeout: float | None) -> int: ...

    def info(self, timeout: float | None) -> dict[str, Any]: ...

    def checkpoint(self, timeout: float | None) -> str: ...

    def sampled_once(self, table: str) -> bool: ...

    def close(self) -> None: ...


class LocalBackend:
    """A server in this process."""

    def __init__(self, local: Local, save: Any) -> None:
        self._local, self._save = local, save

    def turn(self) -> int:
        return 0

    def sink(self, turn: int | None = None, **options: Any) -> Sink:
        """Options speak of a network: nothing to choose here."""
        return LocalSink(self._local)

    def sample(
        self, table: str, n: int, timeout: float | None, buffers: Buffers, counted: bool, transform: Tree | None
    ) -> Batch:
        if transform is None:
            return self._local.draw(table, n, timeout, buffers, counted)
        batch = self._local.draw(table, n, timeout, buffers, counted, partial(check, transform))
        try:
            return Batch(apply(transform, batch.data), batch.info)
        except BaseException:
            if not counted:
                self.consume(table, batch.info.keys, False)
            raise

    def consume(self, table: str, keys: npt.NDArray[np.int64], consumed: bool) -> None:
        with self._local.lock:
            core = self._local.core.table(table)
            if consumed:
                core.consume(keys)
            else:
                core.release(len(keys))
            self._local.wake()

    def update(self, table: str, keys: npt.NDArray[np.int64], priorities: Any, timeout: float | None) -> int:
        with self._local.lock:
            self._local._check_open()
            _, refused = self._local.core.update(table, keys, priorities)
            return refused

    def delete(self, table: str, keys: npt.NDArray[np.int64], timeout: float | None) -> int:
        with self._local.lock:
            self._local._check_open()
            removed = self._local.core.delete(table, keys)
            self._local.wake()
            return removed

    def reset(self, table: str, timeout: float | None) -> None:
        with self._local.lock:
            self._local._check_open()
            self._local.core.table(table).reset()
            self._local.wake()

    def trim(self, table: str, timeout: float | None) -> int:
        with self._local.lock:
            self._local._check_open()
            removed = self._local.core.table(table).trim()
            self._local.wake()
            return removed

    def info(self, timeout: float | None) -> dict[str, Any]:
        with self._local.lock:
            self._local._check_open()
            return self._local.core.info()

    def checkpoint(self, timeout: float | None) -> str:
        self._local._check_open()
        return str(self._save())

    def sampled_once(self, table: str) -> bool:
        return self._local.core.table(table).table.max_times_sampled > 0

    def close(self) -> None:
        """The server outlives its clients."""


class Client:
    """Writes to and samples from a replay server.

    `Client("tcp://host:port")` connects; several addresses make one client over all of them; `server.client()` stays in
    this process. timeout is the default of every call: seconds, 0 for "now", None for ever.
    """

    def __init__(self, address: Any, key: Any = None, timeout: float | None = None) -> None:
        self.timeout = timeout
        self._buffers = threading.local()
        self._inserters: dict[int, list[Writer]] = {}  # idle ones of every server: a call takes one for itself
        self._closed, self._why = False, "this client was closed"
        self._backend: Backend
        if isinstance(address, str):
            from shoal.replay.remote import RemoteBackend

            self._backend = RemoteBackend(address, key, timeout)
        elif isinstance(address, (list, tuple)):
            from shoal.replay.sharding import ShardedBackend

            self._backend = ShardedBackend.connect(address, key, timeout)
        elif hasattr(address, "sampled_once"):
            self._backend = address
        else:
            raise ConfigError(f"a client connects to an address or a list of them, got {address!r}")
        end_at_fork(self)

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
            alive = False  # another one may find a server that lives
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

        transform is a tree of expressions that the service applies. The arrays are reused once nobody refers to them.
        """
        self._check_open()
        count = _checked(batch_size)
        return self._backend.sample(table, count, self._wait(timeout), buffers or self._own_buffers(), True, transform)

    def _own_buffers(self) -> Buffers:
        buffers: Buffers | None = getattr(self._buffers, "buffers", None)
        if buffers is None:
            buffers = self._buffers.buffers = Buffers()
        return buffers

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
        """Let go of the server; a local one goes on."""
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

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(self._why)

    def inherited(self, reason: str) -> None:
        """The parent process goes on with it."""
        self._closed, self._why = True, reason

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checked(batch_size: Any) -> int:
    try:
        count = int(operator.index(batch_size))
    except TypeError:
        raise InvalidItem(f"batch_size is a whole number, got {batch_size!r}") from None
    if count < 1:
        raise InvalidItem(f"batch_size must be at least 1, got {count}")
    return count


def _let_go(writer: Writer) -> None:
    """Close a writer that has nothing under way."""
    with contextlib.suppress(Closed, Timeout):
        writer.close(timeout=0)


class Dataset(Iterator[Batch]):
    """An endless iterator over batches. Close it (or use it in a `with`) to give back what was gathered ahead.

    Batches gathered ahead are reserved: they hold back others like samples, and count as samples when they are taken. A
    table whose items are sampled a limited number of times is read without reading ahead.
    """

    def __init__(
        self,
        backend: Backend,
        table: str,
        batch_size: int,
        prefetch: int,
        timeout: float | None,
        transform: Tree | None,
        buffers: Buffers | None,
    ) -> None:
        self._backend, self._table, self._batch_size, self._timeout = backend, table, batch_size, timeout
        self._transform, self._own = transform, buffers or Buffers(most=prefetch + 4)
        self._ahead = 0 if backend.sampled_once(table) else prefetch
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(max(1, self._ahead))
        self._stop = threading.Event()
        self._inherited: str | None = None
        end_at_fork(self)
        self._thread: threading.Thread | None = None
        if self._ahead:
            self._thread = threading.Thread(target=self._fill, name=f"shoal-dataset-{table}", daemon=True)
            self._thread.start()

    def _fill(self) -> None:
        """Gather ahead; short waits let close() be noticed."""
        heard = time.monotonic()
        while not self._stop.is_set():
            try:
                batch: Batch | BaseException = self._backend.sample(
                    self._table, self._batch_size, 0.1, self._own, False, self._transform
                )
            except Timeout as error:
                if not isinstance(error, Unanswered):
                    heard = time.monotonic()
                if time.monotonic() - heard < max(DEAD_SECONDS, self._timeout or 0.0):
                    continue
                batch = error  # a dead server is not waited for, also where the timeout is None
            except BaseException as error:  # handed to the consumer
                batch = error
            else:
                heard = time.monotonic()
            while not self._stop.is_set():
                try:
                    self._ready.put(batch, timeout=0.1)
                    break
                except queue.Full:
                    continue
            else:
                self._give_back(batch)
            if isinstance(batch, BaseException):
                return

    def _give_back(self, batch: Batch | BaseException) -> bool:
        """Whether the server is there to take it."""
        if isinstance(batch, Batch):
            with contextlib.suppress(Refused):  # the server has forgotten it
                try:
                    self._backend.consume(self._table, batch.info.keys, False)
                except Timeout:
                    return False
        return True

    def __next__(self) -> Batch:
        if self._inherited is not None:
            raise Closed(self._inherited)
        if self._stop.is_set():
            raise StopIteration
        if not self._ahead:
            return self._backend.sample(
                self._table, self._batch_size, self._timeout, self._own, True, self._transform
            )
        while True:
            try:
                batch = self._ready.get(timeout=self._timeout)
            except queue.Empty:
                raise Timeout(f"table {self._table!r}: no batch within {self._timeout} s") from None
            if isinstance(batch, BaseException):
                self._stop.set()
                raise batch
            try:
                self._backend.consume(self._table, batch.info.keys, True)
            except Refused:
                continue  # the server was restarted, or forgot a reader that was busy for long
            return batch

    def inherited(self, reason: str) -> None:
        """The parent process goes on with it."""
        self._inherited = reason

    def close(self) -> None:
        if self._inherited is not None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        while not self._ready.empty():
            if not self._give_back(self._ready.get_nowait()):
                break  # a dead server is asked once, not for every batch

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
