"""The socket service: one thread that answers ipc and TCP clients of a core.

    DEALER clients ──▶ ROUTER ──▶ check ──▶ core (under the lock) ──▶ reply, at once or when a limiter allows it

Requests that wait for a limiter are kept with their deadlines and tried again after every change. Off loopback the socket
speaks CURVE, and a ZAP handler lets in only clients whose public key is known.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import zmq
import zmq.utils.z85

from shoal.errors import ConfigError
from shoal.replay.batch import Batch, Buffers
from shoal.replay.columns import flatten
from shoal.replay.errors import Closed, Refused, Timeout
from shoal.replay.expressions import apply, transform_from
from shoal.replay.local import Local, joined
from shoal.replay.sessions import Session, Write
from shoal.replay.shared import SharedBlocks
from shoal.replay.wire import (
    MOST_MESSAGE_BYTES,
    VERSION,
    Key,
    error_fields,
    field,
    is_loopback,
    pack,
    read_array,
    seconds,
    unpack,
)

__all__ = ["Service"]

LOG = logging.getLogger("shoal.replay")
SESSION_SECONDS = 60.0
SWEEP_SECONDS = 1.0
MOST_BATCH = 1 << 20


class Waiting:
    """A sample request that waits for its limiter."""

    def __init__(self, client: bytes, header: dict[str, Any], deadline: float | None) -> None:
        self.client, self.id, self.deadline = client, field(header, "id", int, 0), deadline
        self.table = field(header, "table", str)
        self.n: int = field(header, "n", int, 1, MOST_BATCH)
        self.counted = field(header, "counted", bool)
        self.transform = transform_from(header.get("transform"))
        self.into = header.get("into")
        self.owner = header.get("owner")
        self.parts: list[Batch] = []
        self.blocked = False

    @property
    def missing(self) -> int:
        return self.n - sum(len(part) for part in self.parts)


class Service:
    """Answers clients until it is closed."""

    def __init__(self, local: Local, address: str, key: Key | None, checkpoint: Callable[[], Any]) -> None:
        if not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"a replay address begins with tcp:// or ipc://, got {address!r}")
        if key is None and not is_loopback(address):
            raise ConfigError(f"{address} is not loopback: give the server a key (replay.Key.generate) and its clients' keys")
        self._local, self._key, self._checkpoint = local, key, checkpoint
        self.incarnation = secrets.randbits(62)
        self._sessions: dict[int, Session] = {}
        self._blocked: dict[int, tuple[bytes, Session]] = {}  # sessions whose first write waits for a limiter
        self._waiting: dict[str, deque[Waiting]] = {}
        self._reserved: dict[int, tuple[float, dict[str, int]]] = {}  # reader -> last seen, draws per table
        self._shared = SharedBlocks() if address.startswith("ipc://") else None
        self._buffers = Buffers(most=32)
        self.refused_messages = 0
        self._finished: deque[tuple[bytes, dict[str, Any]]] = deque()
        self._context = zmq.Context()
        self._zap = self._open_zap() if key is not None else None
        self._socket = self._open_socket(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = False
        self._closing = False
        local.on_change = self._on_change
        self._thread = threading.Thread(target=self._run, name="shoal-replay", daemon=True)
        self._thread.start()

    # -- sockets

    def _open_socket(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        if self._key is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._key.public)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"shoal")
        socket.bind(address)
        return socket

    def _open_zap(self) -> zmq.Socket[bytes]:
        zap = self._context.socket(zmq.REP)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind("inproc://zeromq.zap.01")
        return zap

    def _answer_zap(self) -> None:
        """Let in clients whose public key is known."""
        assert self._zap is not None and self._key is not None
        request = self._zap.recv_multipart()
        version, number, mechanism = request[0], request[1], request[5]
        public = zmq.utils.z85.encode(request[6]) if mechanism == b"CURVE" and len(request) > 6 else b""
        known = public in self._key.clients
        status = (b"200", b"OK", public) if known else (b"400", b"unknown client key", b"")
        self._zap.send_multipart([version, number, *status, b""])

    def _on_change(self) -> None:
        """Tables changed in another thread (the lock is held): look at waiting requests."""
        if not self._awake and threading.current_thread() is not self._thread:
            self._awake = True
            os.eventfd_write(self._wake, 1)

    # -- the loop

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        if self._zap is not None:
            poller.register(self._zap, zmq.POLLIN)
        swept = time.monotonic()
        while not self._closing:
            ready = dict(poller.poll(self._patience()))
            if self._zap is not None and self._zap in ready:
                self._answer_zap()
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._awake = False
            for _ in range(256):
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._receive(frames[0].bytes, frames[1:])
            self._retry()
            if time.monotonic() - swept > SWEEP_SECONDS:
                swept = time.monotonic()
                self._sweep(swept)
        self._refuse_all()

    def _patience(self) -> int:
        """Milliseconds until the next deadline or sweep."""
        now, nearest = time.monotonic(), SWEEP_SECONDS
        for queue in self._waiting.values():
            nearest = min([nearest, *(w.deadline - now for w in queue if w.deadline is not None)])
        for _, session in self._blocked.values():
            if session.writes[0].deadline is not None:
                nearest = min(nearest, session.writes[0].deadline - now)
        return max(0, int(nearest * 1000) + 1)

    def _receive(self, client: bytes, frames: list[Any]) -> None:
        number: Any = -1
        try:
            header, buffers = unpack(frames)
            number = header.get("id", -1)
            operation = header.get("op")
            handler = self.OPERATIONS.get(operation) if isinstance(operation, str) else None
            if handler is None:
                raise Refused(f"unknown operation {operation!r}"[:200])
            reply = handler(self, client, header, buffers)
        except Exception as error:
            self.refused_messages += isinstance(error, Refused)
            if not isinstance(error, (Refused, Timeout)):
                LOG.debug("request failed", exc_info=True)
            reply = {"id": number if isinstance(number, int) else -1, **error_fields(error)}
        if reply is not None:
            self._send(client, reply if isinstance(reply, list) else pack(reply))

    def _send(self, client: bytes, frames: list[Any]) -> None:
        self._socket.send_multipart([client, *frames], copy=False)

    # -- operations

    def _hello(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        """Who the server is; a writer says how many of its items were confirmed and learns what was lost."""
        with self._local.lock:
            core = self._local.core
            reply = {
                "id": field(header, "id", int, 0),
                "version": VERSION,
                "incarnation": self.incarnation,
                "clock": time.time(),
                "limited": [name for name, t in core.tables.items() if t.table.max_times_sampled > 0],
            }
            if "session" in header:
                number = field(header, "session", int, 0, 1 << 62)
                writer = field(header, "writer", int, 0, 1 << 62)
                confirmed = field(header, "confirmed", int, 0, 1 << 62)
                session = self._sessions.get(number)
                if session is None:
                    last = core.writers.get(writer, 0)
                    session = self._sessions[number] = Session(writer, max(0, confirmed - last))
                    core.lost += session.lost
                    core.writers[writer] = max(last, confirmed)
                session.seen = time.monotonic()
                reply |= {"serial": session.serial, "lost": session.lost, "last": core.writers.get(writer, 0)}
            return reply

    def _share(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        if self._shared is None:
            raise Refused("shared memory is for ipc:// clients")
        block = field(header, "block", int, 0, 1 << 62)
        self._shared.attach(
            block, field(header, "pid", int, 1), field(header, "fd", int, 0), field(header, "nbytes", int, 1, MOST_MESSAGE_BYTES)
        )
        return {"id": field(header, "id", int, 0), "block": block}

    def _unshare(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        if self._shared is not None:
            self._shared.detach(field(header, "block", int, 0, 1 << 62))
        return {"id": field(header, "id", int, 0)}

    def _write(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any] | None:
        session = self._sessions.get(field(header, "session", int, 0, 1 << 62))
        if session is None or header.get("serial") != session.serial:
            return {"id": field(header, "id", int, 0), "error": "Closed", "reason": "unknown session", "unknown": True}
        session.seen = time.monotonic()
        deadline = self._deadline(header)
        with self._local.lock:
            write = Write(session, header, buffers, deadline, self._shared)
            write.fill(self._local.core)
        session.writes.append(write)
        if len(session.writes) == 1:
            self._blocked[id(session)] = (client, session)
            self._go_on(client, session)
        return None

    @staticmethod
    def _deadline(header: dict[str, Any]) -> float | None:
        """A client's deadline (on the server's wall clock) as a time of this process's monotonic clock."""
        until = header.get("until")
        if until is None:
            return None
        if not isinstance(until, (int, float)) or isinstance(until, bool) or not abs(until) < 1e12:
            raise Refused("field 'until' must be a time")
        return time.monotonic() + (until - time.time())

    def _go_on(self, client: bytes, session: Session) -> None:
        """Apply a session's writes in their order until one waits for a limiter."""
        core = self._local.core
        while session.writes:
            write = session.writes[0]
            late = write.late(time.monotonic())
            with self._local.lock:
                before = write.inserted
                done = not late and write.advance(core)
                if late:
                    write.abandon(core)
                if write.inserted > before:
                    self._local.wake()
            if not done and not late:
                return
            session.writes.popleft()
            reply = {"id": write.id, "confirmed": core.writers.get(session.writer, 0), "refused": write.refused[:100]}
            if late:
                reply |= {"error": "Timeout", "reason": f"the limiter let {write.inserted} items in before the deadline"}
            keys = [np.concatenate(write.keys)] if write.wants_keys and write.keys else []
            self._send(client, pack(reply, keys))
        self._blocked.pop(id(session), None)

    def _sample(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> None:
        timeout = seconds(header)
        waiting = Waiting(client, header, None if timeout is None else time.monotonic() + timeout)
        with self._local.lock:
            self._local.core.table(waiting.table)
        queue = self._waiting.setdefault(waiting.table, deque())
        queue.append(waiting)
        if len(queue) == 1:
            self._serve(waiting.table)

    def _serve(self, table: str) -> None:
        """Answer sample requests of a table in their order, as far as its limiter allows."""
        queue = self._waiting[table]
        limiter = self._local.core.table(table).limiter
        while queue:
            waiting = queue[0]
            try:
                part = self._local._draw_some(table, waiting.missing, 0, self._memory_for(waiting), waiting.counted)
                if part is not None:
                    waiting.parts.append(part)
                late = waiting.deadline is not None and time.monotonic() >= waiting.deadline
                if waiting.missing and not late:
                    if not waiting.blocked:
                        waiting.blocked = True
                        limiter.begin_wait("sample")
                    return
                reply = self._batch_reply(waiting)
            except Exception as error:
                reply = pack({"id": waiting.id, **error_fields(error)})
            if waiting.blocked:
                limiter.end_wait("sample")
            queue.popleft()
            self._send(waiting.client, reply)

    def _memory_for(self, waiting: Waiting) -> Buffers:
        """The client's own shared block where it has one, else the service's buffers."""
        if self._shared is not None and isinstance(waiting.into, int) and waiting.transform is None:
            block = self._shared.block(waiting.into)
            if block is not None and not waiting.parts:
                return Buffers(lambda nbytes: block if nbytes <= block.nbytes else np.empty(nbytes, np.uint8), most=1)
        return self._buffers

    def _batch_reply(self, waiting: Waiting) -> list[Any]:
        if not waiting.parts:
            raise Timeout(f"table {waiting.table!r}: nothing could be sampled in time")
        batch = waiting.parts[0] if len(waiting.parts) == 1 else joined(waiting.parts)
        data = batch.data if waiting.transform is None else apply(waiting.transform, batch.data)
        info = batch.info
        flat = flatten(data)
        header = {
            "id": waiting.id,
            "count": len(batch),
            "table_size": info.table_size,
            "columns": [[path, array.dtype.str, list(array.shape)] for path, array in flat.items()],
            "lengths": None if info.lengths is None else {p: n.tolist() for p, n in info.lengths.items()},
        }
        numbers = [info.keys, info.probabilities, info.priorities, info.times_sampled]
        if not waiting.counted and isinstance(waiting.owner, int):
            draws = self._reserved.setdefault(waiting.owner, (0.0, {}))[1]
            draws[waiting.table] = draws.get(waiting.table, 0) + len(batch)
            self._reserved[waiting.owner] = (time.monotonic(), draws)
        block = self._shared.block(waiting.into) if self._shared is not None and isinstance(waiting.into, int) else None
        offsets = None if block is None else _offsets_in(block, list(flat.values()))
        if offsets is not None:
            return pack(header | {"offsets": offsets}, [np.ascontiguousarray(x) for x in numbers])
        return pack(header, [np.ascontiguousarray(x) for x in (*numbers, *flat.values())])

    def _consume(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        """A reader took batches that were drawn ahead, or gives them back."""
        name, owner = field(header, "table", str), field(header, "owner", int, 0)
        count = field(header, "count", int, 1, MOST_BATCH)
        if len(buffers) != 1:
            raise Refused("consume carries the keys")
        keys = read_array(buffers[0], np.int64, count)
        _, draws = self._reserved.get(owner, (0.0, {}))
        if draws.get(name, 0) < count:
            raise Refused("more was consumed than was drawn")
        draws[name] -= count
        self._reserved[owner] = (time.monotonic(), draws)
        with self._local.lock:
            table = self._local.core.table(name)
            if field(header, "consumed", bool):
                table.consume(keys)
            else:
                table.release(count)
            self._local.wake()
        return {"id": field(header, "id", int, 0)}

    def _update(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        count = field(header, "count", int, 0, MOST_BATCH)
        if len(buffers) != 2:
            raise Refused("update carries keys and priorities")
        keys, values = read_array(buffers[0], np.int64, count), read_array(buffers[1], np.float64, count)
        with self._local.lock:
            unknown, refused = self._local.core.update(field(header, "table", str), keys, values)
        return {"id": field(header, "id", int, 0), "unknown": unknown, "refused": refused}

    def _delete(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        count = field(header, "count", int, 0, MOST_BATCH)
        if len(buffers) != 1:
            raise Refused("delete carries keys")
        with self._local.lock:
            removed = self._local.core.delete(field(header, "table", str), read_array(buffers[0], np.int64, count))
            self._local.wake()
        return {"id": field(header, "id", int, 0), "removed": removed}

    def _reset(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        with self._local.lock:
            self._local.core.table(field(header, "table", str)).reset()
            self._local.wake()
        return {"id": field(header, "id", int, 0)}

    def _info(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        with self._local.lock:
            info = self._local.core.info()
        info |= {"sessions": len(self._sessions), "refused_messages": self.refused_messages, "address": self.address}
        return {"id": field(header, "id", int, 0), "info": info}

    def _save(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> None:
        """Checkpoints are written by a thread of their own: the loop goes on."""
        number = field(header, "id", int, 0)
        threading.Thread(target=self._save_and_tell, args=(client, number), daemon=True).start()

    def _save_and_tell(self, client: bytes, number: int) -> None:
        try:
            reply: dict[str, Any] = {"id": number, "path": str(self._checkpoint())}
        except Exception as error:
            reply = {"id": number, **error_fields(error)}
        with self._local.lock:
            self._finished.append((client, reply))
            self._awake = True
            os.eventfd_write(self._wake, 1)

    def _bye(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        """A writer is closed: its groups and its number are forgotten."""
        session = self._sessions.pop(field(header, "session", int, 0, 1 << 62), None)
        if session is not None:
            with self._local.lock:
                session.drop(self._local.core)
                self._local.core.writers.pop(session.writer, None)
            self._blocked.pop(id(session), None)
        return {"id": field(header, "id", int, 0)}

    OPERATIONS: ClassVar[dict[str, Callable[..., Any]]] = {
        "hello": _hello, "share": _share, "unshare": _unshare, "write": _write, "sample": _sample, "consume": _consume,
        "update": _update, "delete": _delete, "reset": _reset, "info": _info, "checkpoint": _save, "bye": _bye,
    }  # fmt: skip

    # -- what waits

    def _retry(self) -> None:
        """Look again at whoever waits: writes first, then samples, while either lets the other go on."""
        for client, session in list(self._blocked.values()):
            self._go_on(client, session)
        for table in [name for name, queue in self._waiting.items() if queue]:
            self._serve(table)
        if self._blocked and self._any_insertable():
            for client, session in list(self._blocked.values()):
                self._go_on(client, session)
        while self._finished:
            client, reply = self._finished.popleft()
            self._send(client, pack(reply))

    def _any_insertable(self) -> bool:
        return any(table.limiter.can_insert() for table in self._local.core.tables.values())

    def _sweep(self, now: float) -> None:
        """Forget sessions and reservations of clients that have been silent for long; a live one opens a new session."""
        for number, session in list(self._sessions.items()):
            if now - session.seen > SESSION_SECONDS and not session.writes:
                with self._local.lock:
                    session.drop(self._local.core)
                del self._sessions[number]
        for owner, (seen, draws) in list(self._reserved.items()):
            if now - seen > SESSION_SECONDS:
                with self._local.lock:
                    for name, count in draws.items():
                        self._local.core.table(name).release(count)
                    self._local.wake()
                del self._reserved[owner]
        if self._shared is not None:
            self._shared.sweep()

    def _refuse_all(self) -> None:
        """The server closes: whoever waits is told."""
        closed = error_fields(Closed("the replay server was closed"))
        for client, session in self._blocked.values():
            for write in session.writes:
                self._send(client, pack({"id": write.id, **closed}))
        for queue in self._waiting.values():
            for waiting in queue:
                self._send(waiting.client, pack({"id": waiting.id, **closed}))

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._local.on_change = None
        self._socket.close()
        if self._zap is not None:
            self._zap.close()
        self._context.term()
        os.close(self._wake)


def _offsets_in(block: np.ndarray[Any, Any], arrays: list[np.ndarray[Any, Any]]) -> list[int] | None:
    """Where arrays lie in a block of memory, or None if they lie elsewhere."""
    start = block.ctypes.data
    offsets = [int(array.ctypes.data) - start for array in arrays]
    return offsets if all(0 <= offset < block.nbytes for offset in offsets) else None
