"""Batches without end, gathered ahead by a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator

from shoal.replay.client import timings
from shoal.replay.client.backend import Backend
from shoal.replay.client.fork_safety import EndsAtFork
from shoal.replay.errors import Refused, Timeout, Unanswered
from shoal.replay.table.columns import Tree
from shoal.replay.table.sampled_batch import Batch, Buffers

__all__ = ["Dataset"]


class Dataset(EndsAtFork, Iterator[Batch]):
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
        super().__init__()
        self._backend, self._table, self._batch_size, self._timeout = backend, table, batch_size, timeout
        self._transform, self._own = transform, buffers or Buffers(most=prefetch + 4)
        self._ahead = 0 if backend.sampled_once(table) else prefetch
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(max(1, self._ahead))
        self._stop = threading.Event()
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
                if time.monotonic() - heard < max(timings.DEAD_SECONDS, self._timeout or 0.0):
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
        self._check_open()
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

    def close(self) -> None:
        if self._closed:
            return  # the parent process continues with it
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        while not self._ready.empty():
            if not self._give_back(self._ready.get_nowait()):
                break  # a dead server is asked once, not for every batch
