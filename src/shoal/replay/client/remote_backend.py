"""A server at an address: requests over a pool of connections, and batches in memory shared with an ipc server."""

from __future__ import annotations

import math
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.client import timings
from shoal.replay.client.expressions import transform_to
from shoal.replay.client.remote_sink import RemoteItemSink
from shoal.replay.client.server_connection import Connection
from shoal.replay.errors import Closed, Refused, Unanswered
from shoal.replay.service.keys import Key
from shoal.replay.table.columns import Tree, unflatten
from shoal.replay.table.sampled_batch import Batch, Buffers, Info
from shoal.slots.memory import LocalMemory

__all__ = ["RemoteBackend"]

MOST_BLOCKS = 6
IDLE_REFERENCES = 2  # the attribute's and getrefcount's own


class BatchBlock:
    """Memory that this client shares with an ipc server: made by slots/, gone with this process."""

    def __init__(self, connection: Connection, nbytes: int, timeout: float | None) -> None:
        memory = LocalMemory(nbytes)
        self.array: npt.NDArray[np.uint8] = memory.array()
        self.number = secrets.randbits(62)
        try:
            connection.request(
                {"op": "share", "block": self.number, "pid": os.getpid(), "fd": memory.fd, "nbytes": nbytes}, (), timeout
            )
        finally:
            os.close(memory.fd)  # both sides have it mapped

    def idle(self) -> bool:
        """Whether no array of an earlier batch lies in it."""
        return sys.getrefcount(self.array) == IDLE_REFERENCES


class PooledConnection:
    """A connection of the pool with the shared blocks that batches arrive in."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.expected = 1 << 16  # bytes of a batch
        self._blocks: list[BatchBlock] = []
        self._incarnation: int | None = None

    def take(self, timeout: float | None) -> BatchBlock:
        """A block that no earlier batch uses any more; a server that was restarted needs new ones."""
        if self._incarnation != self.connection.incarnation:
            self._blocks.clear()
            self._incarnation = self.connection.incarnation
        for block in self._blocks:
            if block.array.nbytes >= self.expected and block.idle():
                return block
        while len(self._blocks) >= MOST_BLOCKS:
            self.connection.send({"op": "unshare", "block": self._blocks.pop(0).number})
        self._blocks.append(BatchBlock(self.connection, self.expected, timeout))
        return self._blocks[-1]

    def drop(self, block: BatchBlock) -> None:
        """A request into it was given up: the server may still write there, so no other batch may lie in it."""
        self._blocks = [other for other in self._blocks if other is not block]
        self.connection.send({"op": "unshare", "block": block.number})


class RemoteBackend:
    """A server at an address. Threads share a pool of connections; each call has one for itself."""

    def __init__(self, address: str, key: Key | None, timeout: float | None, patience: float = math.inf) -> None:
        self._address, self._key, self._timeout, self._patience = address, key, timeout, patience
        self._lock = threading.Lock()
        self._idle: list[PooledConnection] = []
        self._owner = secrets.randbits(62)
        self._maps = address.startswith("ipc://")
        self._closed = False
        self._limited: frozenset[str] | None = None
        self._put(self._take())

    def _take(self) -> PooledConnection:
        with self._lock:
            if self._closed:
                raise Closed("this client was closed")
            if self._idle:
                return self._idle.pop()
            return PooledConnection(Connection(self._address, self._key, self._patience))

    def _put(self, line: PooledConnection) -> None:
        with self._lock:
            if self._closed:
                line.connection.close()
            else:
                self._idle.append(line)

    def _ask(
        self, header: dict[str, Any], buffers: Sequence[Any] = (), timeout: float | None = None
    ) -> tuple[dict[str, Any], list[Any]]:
        line = self._take()
        try:
            return line.connection.request(header, buffers, timeout)
        except Unanswered:
            line.connection.reopen()
            raise
        finally:
            self._put(line)

    def turn(self) -> int:
        return 0

    def sink(self, turn: int | None = None, **options: Any) -> RemoteItemSink:
        return RemoteItemSink(Connection(self._address, self._key), **options)

    def sample(
        self, table: str, n: int, timeout: float | None, buffers: Buffers, counted: bool, transform: Tree | None
    ) -> Batch:
        header: dict[str, Any] = {
            "op": "sample", "table": table, "n": n, "timeout": timeout, "counted": counted, "owner": self._owner,
            "transform": transform_to(transform),
        }  # fmt: skip
        line, shared = self._take(), None
        try:
            shared = self._shared(line, timeout) if self._maps and transform is None else None
            if shared is not None:
                header["into"] = shared.number
            fields, parts = line.connection.request(header, (), timeout)
            batch = read_batch(fields, parts, None if shared is None else shared.array)
            if "offsets" not in fields and shared is not None:
                line.expected = max(line.expected, sum(len(part) for part in parts) + 64 * len(parts))
            return batch
        except Unanswered:
            line.connection.reopen()
            if shared is not None:
                line.drop(shared)
            raise
        finally:
            self._put(line)

    def _shared(self, line: PooledConnection, timeout: float | None) -> BatchBlock | None:
        """Memory for a batch; None where the server cannot map it, and batches go through the socket."""
        if line.connection.incarnation is None:
            line.connection.request({"op": "hello"}, (), timeout)
        try:
            return line.take(timeout)
        except Refused:
            self._maps = False
            return None

    def consume(self, table: str, keys: npt.NDArray[np.int64], consumed: bool) -> None:
        header = {"op": "consume", "table": table, "owner": self._owner, "count": len(keys), "consumed": consumed}
        self._ask(header, [np.ascontiguousarray(keys)], min(5.0, timings.DEAD_SECONDS))

    def update(self, table: str, keys: npt.NDArray[np.int64], priorities: Any, timeout: float | None) -> int:
        fields, _ = self._ask({"op": "update", "table": table, "count": len(keys)}, [keys, priorities], timeout)
        return int(fields["refused"])

    def delete(self, table: str, keys: npt.NDArray[np.int64], timeout: float | None) -> int:
        fields, _ = self._ask({"op": "delete", "table": table, "count": len(keys)}, [keys], timeout)
        return int(fields["removed"])

    def reset(self, table: str, timeout: float | None) -> None:
        self._ask({"op": "reset", "table": table}, (), timeout)

    def trim(self, table: str, timeout: float | None) -> int:
        fields, _ = self._ask({"op": "trim", "table": table}, (), timeout)
        return int(fields["removed"])

    def info(self, timeout: float | None) -> dict[str, Any]:
        fields, _ = self._ask({"op": "info"}, (), timeout)
        info: dict[str, Any] = fields["info"]
        return info

    def checkpoint(self, timeout: float | None) -> str:
        fields, _ = self._ask({"op": "checkpoint"}, (), timeout)
        return str(fields["path"])

    def sampled_once(self, table: str) -> bool:
        if self._limited is None:
            fields, _ = self._ask({"op": "hello"}, (), self._timeout)
            self._limited = frozenset(fields["limited"])
        return table in self._limited

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for line in self._idle:
                line.connection.close()
            self._idle.clear()


def read_batch(fields: dict[str, Any], parts: list[Any], shared: npt.NDArray[np.uint8] | None) -> Batch:
    """A batch from a reply: arrays over its frames, or over the shared block they were gathered into."""
    keys, times = np.frombuffer(parts[0], np.int64), np.frombuffer(parts[3], np.int64)
    probabilities, priorities = np.frombuffer(parts[1], np.float64), np.frombuffer(parts[2], np.float64)
    lengths = fields["lengths"]
    if lengths is not None:
        lengths = {path: np.array(values, np.int64) for path, values in lengths.items()}
    info = Info(keys, probabilities, priorities, times, fields["table_size"], lengths)
    flat = {}
    for at, (path, dtype, shape) in enumerate(fields["columns"]):
        if "offsets" in fields and shared is not None:
            flat[path] = np.ndarray(shape, np.dtype(dtype), shared, fields["offsets"][at])
        else:
            flat[path] = np.frombuffer(parts[4 + at], np.dtype(dtype)).reshape(shape)
    return Batch(unflatten(flat), info)
