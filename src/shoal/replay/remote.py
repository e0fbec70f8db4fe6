"""The client's side of the socket: connections, requests with deadlines, and memory shared with an ipc server."""

from __future__ import annotations

import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from shoal.errors import ConfigError
from shoal.replay.batch import Batch, Buffers, Info
from shoal.replay.chunks import CHUNK_BYTES
from shoal.replay.columns import Tree, unflatten
from shoal.replay.errors import Closed, Refused, Unanswered
from shoal.replay.expressions import transform_to
from shoal.replay.keys import Key
from shoal.replay.wire import MOST_MESSAGE_BYTES, check_address, is_loopback, pack, raise_error, unpack

__all__ = ["Connection", "RemoteBackend"]

GRACE_SECONDS = 1.0
LATE_SECONDS = 0.5
"""A server answers so much later than asked, and no request later: the rest of the grace is for the way of the answer."""
PING_SECONDS = 0.5
CLOCK_SECONDS = 0.05
"""An answer that quick tells the server's clock well enough."""
DEAD_SECONDS = 10.0
"""A server that has not answered anything for so long is taken for dead where the timeout is None; so is a shard among others."""
MOST_BLOCKS = 6
IDLE_REFERENCES = 2  # the attribute's and getrefcount's own


class Connection:
    """One socket to a server. For one thread at a time."""

    def __init__(self, address: str, key: Key | None, patience: float = math.inf) -> None:
        check_address(address)
        if key is not None and not isinstance(key, Key):
            raise ConfigError(f"a client's key is a replay.Key, not {type(key).__name__}")
        if key is None and not is_loopback(address):
            raise ConfigError(f"{address} is not loopback: give the client a key (shoal replay keys, or Key.generate(server=...))")
        self.address, self._key, self._patience = address, key, patience
        self._number = 0
        self.incarnation: int | None = None
        self.clock_offset, self._round_trip = 0.0, math.inf
        self.chunk_bytes = CHUNK_BYTES
        self.limited: frozenset[str] = frozenset()
        self.heard = time.monotonic()
        self._clock_of: int | None = None  # the incarnation whose clock is known
        self._pinged: dict[int, float] = {}
        self._socket = self._open()

    def _open(self) -> zmq.Socket[bytes]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._key is not None:
            if self._key.server is None:
                raise ConfigError("a client's key needs the server's public key: replay.Key.generate(server=...)")
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._key.server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._key.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"{self.address} is no address to connect to: {error}") from error
        return socket

    def send(self, header: dict[str, Any], buffers: Sequence[Any] = ()) -> int:
        """Send a request without waiting; returns its number, a new one unless it has one."""
        number: int = header.setdefault("id", self._number + 1)
        self._number = max(self._number, number)
        try:
            self._socket.send_multipart(pack(header, buffers), zmq.NOBLOCK, copy=False)
        except zmq.Again:  # the handshake failed for good, or a reply was too large
            self.reopen()
            raise Unanswered(f"{self.address} does not let this client in: is its key known there?") from None
        return number

    def receive(self, seconds: float) -> tuple[dict[str, Any], list[Any]] | None:
        """The next reply, or None."""
        if not self._socket.poll(max(0, int(seconds * 1000))):
            return None
        header, buffers = unpack(self._socket.recv_multipart(copy=False))
        self.heard = time.monotonic()
        sent = self._pinged.pop(header.get("id", -1), None)
        if sent is not None and "incarnation" in header:
            self._learn(header, sent)
        return header, buffers

    def _learn(self, header: dict[str, Any], sent: float) -> None:
        """What a server says of itself; its clock is known best by the quickest answer."""
        known = header["incarnation"] == self._clock_of
        trip = self.heard - sent
        if not known or trip <= max(self._round_trip, CLOCK_SECONDS):
            self._clock_of, self._round_trip = header["incarnation"], trip
            self.clock_offset = float(header["clock"]) - (self.heard + sent) / 2
        self.limited, self.chunk_bytes = frozenset(header["limited"]), int(header["chunk_bytes"])

    def share(self, block: int, fd: int, nbytes: int) -> int:
        """Offer memory of this process to the server."""
        return self.send({"op": "share", "block": block, "pid": os.getpid(), "fd": fd, "nbytes": nbytes})

    def ping(self, **fields: Any) -> int:
        """Ask who the server is."""
        number = self.send({"op": "hello", **fields})
        self._pinged[number] = time.monotonic()
        return number

    def request(
        self, header: dict[str, Any], buffers: Sequence[Any] = (), timeout: float | None = None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Send and wait for the reply; a server that was restarted meanwhile is asked again.

        The request says when this client gives up, on the server's clock: one that comes later is not applied. Where the server
        finds it late its clock may have changed (another host at the same address): it is learned, and the server asked once more.
        """
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout + GRACE_SECONDS
        self.heard, asked, relearned = began, began, False
        number = self.ping() if self.incarnation is None else self._ask(header, buffers, deadline)
        while True:
            now = time.monotonic()
            if (deadline is not None and now > deadline) or now - self.heard > self._silence(deadline):
                raise Unanswered(f"{self.address} does not answer")
            if now - asked > PING_SECONDS:
                self.ping()
                asked = now
            reply = self.receive(PING_SECONDS if deadline is None else min(PING_SECONDS, deadline - now + 0.001))
            if reply is None:
                continue
            fields = reply[0]
            if "incarnation" in fields and fields["incarnation"] != self.incarnation:
                first, self.incarnation = self.incarnation is None, fields["incarnation"]
                if first or fields["id"] > number:  # a greeting asked for before this request says nothing of it
                    number = self._ask(header, buffers, deadline, None if first else number)
            elif fields.get("id") == number:
                if "late" in fields and not relearned:
                    relearned, self.incarnation, self._clock_of = True, None, None
                    number = self.ping()
                    continue
                raise_error(fields)
                return reply

    def _ask(self, header: dict[str, Any], buffers: Sequence[Any], deadline: float | None, again: int | None = None) -> int:
        """Send a request with its deadline; under the same number again, in case the server has it after all."""
        silence = time.monotonic() + self._silence(deadline)
        gives_up = silence if deadline is None else min(deadline, silence)
        asked = header | {"until": gives_up - LATE_SECONDS + self.clock_offset}
        return self.send(asked if again is None else asked | {"id": again}, buffers)

    def _silence(self, deadline: float | None) -> float:
        """Seconds without any answer after which the server is taken for dead."""
        return DEAD_SECONDS if deadline is None else self._patience

    def reopen(self) -> None:
        """Leave what was asked for and not answered: the server forgets who waited through this connection."""
        self._socket.close()
        self._socket = self._open()

    def close(self) -> None:
        self._socket.close()


class Shared:
    """Memory that this client shares with an ipc server: made by slots/, gone with this process."""

    def __init__(self, connection: Connection, nbytes: int, timeout: float | None) -> None:
        from shoal.slots.medium import LocalMemory

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


class Line:
    """A connection of the pool with the shared blocks that batches arrive in."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.expected = 1 << 16  # bytes of a batch
        self._blocks: list[Shared] = []
        self._incarnation: int | None = None

    def take(self, timeout: float | None) -> Shared:
        """A block that no earlier batch uses any more; a server that was restarted needs new ones."""
        if self._incarnation != self.connection.incarnation:
            self._blocks.clear()
            self._incarnation = self.connection.incarnation
        for block in self._blocks:
            if block.array.nbytes >= self.expected and block.idle():
                return block
        while len(self._blocks) >= MOST_BLOCKS:
            self.connection.send({"op": "unshare", "block": self._blocks.pop(0).number})
        self._blocks.append(Shared(self.connection, self.expected, timeout))
        return self._blocks[-1]

    def drop(self, block: Shared) -> None:
        """A request into it was given up: the server may still write there, so no other batch may lie in it."""
        self._blocks = [other for other in self._blocks if other is not block]
        self.connection.send({"op": "unshare", "block": block.number})


class RemoteBackend:
    """A server at an address. Threads share a pool of connections; each call has one for itself."""

    def __init__(self, address: str, key: Key | None, timeout: float | None, patience: float = math.inf) -> None:
        self._address, self._key, self._timeout, self._patience = address, key, timeout, patience
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._owner = secrets.randbits(62)
        self._maps = address.startswith("ipc://")
        self._closed = False
        self._limited: frozenset[str] | None = None
        self._put(self._take())

    def _take(self) -> Line:
        with self._lock:
            if self._closed:
                raise Closed("this client was closed")
            if self._idle:
                return self._idle.pop()
            return Line(Connection(self._address, self._key, self._patience))

    def _put(self, line: Line) -> None:
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

    def sink(self, turn: int | None = None, **options: Any) -> Any:
        from shoal.replay.delivery import RemoteSink

        return RemoteSink(Connection(self._address, self._key), **options)

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

    def _shared(self, line: Line, timeout: float | None) -> Shared | None:
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
        self._ask(header, [np.ascontiguousarray(keys)], min(5.0, DEAD_SECONDS))

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
