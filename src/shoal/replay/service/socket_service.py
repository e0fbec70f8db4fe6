"""The socket service: one thread answers the ipc and TCP clients of a core.

    DEALER clients ──▶ ROUTER ──▶ check ──▶ core (under the lock) ──▶ reply, at once or when a limiter allows it

Requests that wait for a limiter keep their deadlines and are tried again after every change. Off loopback the socket uses CURVE,
and a ZAP handler lets in only clients whose public key is known.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from shoal.replay.errors import Closed, Refused, Timeout
from shoal.replay.service.keys import Key
from shoal.replay.service.messages import (
    MOST_MESSAGE_BYTES,
    VERSION,
    confirmed_items,
    error_fields,
    field,
    pack,
    read_array,
    read_given_up,
    unpack,
)
from shoal.replay.service.sample_requests import MOST_BATCH, SampleRequests
from shoal.replay.service.server_endpoint import ServerEndpoint
from shoal.replay.service.shared_memory import SharedBlocks
from shoal.replay.service.writer_sessions import WriteRequest, WriterSession
from shoal.replay.table.locked_core import LockedCore

__all__ = ["Service"]

LOG = logging.getLogger("shoal.replay")
SESSION_SECONDS = 60.0
SWEEP_SECONDS = 1.0
MOST_WRITERS = 1 << 16
"""Writers whose last number is remembered although they are away; beyond that the oldest are forgotten."""
MOST_SESSIONS = 64  # writers that use one connection
MOST_READERS = 64   # and readers
MOST_SAVES = 64  # checkpoints that were asked for and are not made yet, each by a thread of its own
MOST_LOST = 1 << 62  # a client may claim anything; what is reported must stay a number that travels


class Connected(NamedTuple):
    """The client of a connection, with its writers' sessions and its readers."""

    client: bytes
    sessions: set[int]
    readers: set[int]


class Service:
    """Answers clients until it is closed."""

    _speaking: Connected | None = None

    def __init__(self, locked: LockedCore, address: str, key: Key | None, checkpoint: Callable[[], Any]) -> None:
        self._locked, self._checkpoint = locked, checkpoint
        self._endpoint = ServerEndpoint(address, key)
        self.address = self._endpoint.address
        self.incarnation = secrets.randbits(62)
        self._sessions: dict[int, WriterSession] = {}
        self._blocked: dict[int, tuple[bytes, WriterSession]] = {}  # sessions whose first write waits for a limiter
        self._connections: dict[int, Connected] = {}  # descriptor -> who came through it
        self._shared = SharedBlocks() if address.startswith("ipc://") else None
        self._samples = SampleRequests(locked, self._shared, self._endpoint)
        self.refused_messages = 0
        self._saves = 0
        self._finished: deque[tuple[bytes, dict[str, Any]]] = deque()  # checkpoints that were made, to be answered
        self._awake = False
        self._closing = False
        locked.on_change = self._on_change
        self._thread = threading.Thread(target=self._run, name="shoal-replay", daemon=True)
        self._thread.start()

    def _on_change(self) -> None:
        """Tables changed in another thread (the lock is held): wake the loop to try waiting requests."""
        if not self._awake and threading.current_thread() is not self._thread:
            self._awake = True
            self._endpoint.wake()

    # -- the loop

    def _run(self) -> None:
        swept = time.monotonic()
        while not self._closing:
            woken, ended = self._endpoint.wait(self._patience())
            if woken:
                self._awake = False
            for descriptor in ended:
                self._safely(self._forget, descriptor)
            for _ in range(256):
                frames = self._endpoint.receive()
                if frames is None:
                    break
                self._note(frames)
                self._safely(self._receive, frames[0].bytes, frames[1:])
            self._safely(self._retry)
            if time.monotonic() - swept > SWEEP_SECONDS:
                swept = time.monotonic()
                self._safely(self._endpoint.sweep)
                self._safely(self._sweep, swept)
        self._refuse_all()

    def _safely(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do some work; an error with one client must not end the service for all."""
        try:
            work(*arguments)
        except Exception:  # of any kind: the log has the traceback, and the other clients are served
            LOG.exception("the replay service continues after an error")

    def _note(self, frames: list[Any]) -> None:
        """Remember which client uses a connection."""
        descriptor = self._endpoint.came_through(frames)
        known = self._connections.get(descriptor)
        if descriptor >= 0 and (known is None or known.client != frames[0].bytes):
            for ended in self._endpoint.ended():  # among them the one that had this descriptor before
                self._safely(self._forget, ended)
            known = self._connections[descriptor] = Connected(frames[0].bytes, set(), set())
        self._speaking = known

    def _forget(self, descriptor: int) -> None:
        """A connection has ended: release what its client held. A client that only lost its connection opens a new session."""
        gone = self._connections.pop(descriptor, None)
        if gone is None:
            return
        self._samples.forget_client(gone.client)
        self._endpoint.forget(gone.client)
        for number in gone.sessions:
            session = self._sessions.pop(number, None)
            if session is not None:
                self._drop(session)
        for owner in gone.readers:
            if not any(owner in other.readers for other in self._connections.values()):
                self._samples.forget(owner)

    def _drop(self, session: WriterSession) -> None:
        with self._locked.lock:
            session.drop(self._locked.core)
        self._blocked.pop(id(session), None)

    def _patience(self) -> int:
        """Milliseconds until the next deadline or sweep."""
        now = time.monotonic()
        nearest = min(SWEEP_SECONDS, self._samples.nearest(now))
        for _, session in self._blocked.values():
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
            field(header, "id", int, 0)  # before anything is changed
            if operation != "write" or header.get("keys"):
                self._endpoint.check_read(client)
            if operation != "write" and self._deadline(header) < time.monotonic():
                raise Timeout(f"{operation} came after its deadline and was not applied")
            reply = handler(self, client, header, buffers)
            answer = None if reply is None else pack({"id": number, **reply})
        except Exception as error:
            self.refused_messages += isinstance(error, Refused)
            if not isinstance(error, (Refused, Timeout)):
                LOG.debug("request failed", exc_info=True)
            late = {"late": True} if isinstance(error, Timeout) else {}
            answer = pack({"id": number if isinstance(number, int) else -1, **error_fields(error), **late})
        if answer is not None:
            self._endpoint.send(client, answer)

    # -- operations

    def _hello(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        """Introduce the server. A writer says how many of its items were confirmed and learns how many were lost."""
        with self._locked.lock:
            core = self._locked.core
            reply: dict[str, Any] = {
                "version": VERSION,
                "incarnation": self.incarnation,
                "clock": time.monotonic(),
                "chunk_bytes": core.chunk_bytes,
                "limited": [name for name, t in core.tables.items() if t.table.max_times_sampled > 0],
            }
            if "session" in header:
                number = field(header, "session", int, 0, 1 << 62)
                writer = field(header, "writer", int, 0, 1 << 62)
                confirmed = field(header, "confirmed", int, 0, 1 << 62)
                given_up = read_given_up(header)
                session = self._sessions.get(number)
                if session is None:
                    if self._speaking is not None and len(self._speaking.sessions) >= MOST_SESSIONS:
                        raise Refused(f"a connection has at most {MOST_SESSIONS} writers")
                    last = core.writers.get(writer, 0)
                    session = self._sessions[number] = WriterSession(writer, confirmed_items(last, confirmed, given_up))
                    core.lost = min(core.lost + session.lost, MOST_LOST)
                    core.writers[writer] = max(last, confirmed)
                    self._forget_writers()
                session.seen = time.monotonic()
                if self._speaking is not None:
                    self._speaking.sessions.add(number)
                reply |= {"serial": session.serial, "lost": session.lost, "last": core.writers.get(writer, 0)}
            return reply

    def _forget_writers(self) -> None:
        """Writers that died never say goodbye, and one may still come back: forget some only when there are very many."""
        writers = self._locked.core.writers
        if len(writers) > MOST_WRITERS + len(self._sessions):
            present = {session.writer for session in self._sessions.values()}
            away = [writer for writer in writers if writer not in present]
            for writer in away[: len(away) // 2]:
                del writers[writer]

    def _share(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        if self._shared is None:
            raise Refused("shared memory is for ipc:// clients")
        block = field(header, "block", int, 0, 1 << 62)
        self._shared.attach(
            block, field(header, "pid", int, 1), field(header, "fd", int, 0), field(header, "nbytes", int, 1, MOST_MESSAGE_BYTES)
        )
        return {"block": block}

    def _unshare(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        if self._shared is not None:
            self._shared.detach(field(header, "block", int, 0, 1 << 62))
        return {}

    def _write(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any] | None:
        session = self._sessions.get(field(header, "session", int, 0, 1 << 62))
        if session is None or header.get("serial") != session.serial:
            return {"error": "Closed", "reason": "unknown session", "unknown": True}
        session.seen = time.monotonic()
        deadline = self._deadline(header)
        with self._locked.lock:
            write = WriteRequest(session, header, buffers, deadline, self._shared)
            session.check_room(write)
            write.fill(self._locked.core)
        session.writes.append(write)
        if len(session.writes) == 1:
            self._blocked[id(session)] = (client, session)
            self._advance(client, session)
        return None

    @staticmethod
    def _deadline(header: dict[str, Any]) -> float:
        """When the client gives up, on this process's clock, which the client knows from `hello`."""
        until = header.get("until")
        if until is None:
            return math.inf
        if not isinstance(until, (int, float)) or isinstance(until, bool) or not abs(until) < 1e12:
            raise Refused("field 'until' must be a time")
        return float(until)

    def _advance(self, client: bytes, session: WriterSession) -> None:
        """Apply a session's writes in order until one waits for a limiter."""
        core = self._locked.core
        while session.writes:
            write = session.writes[0]
            late = write.late(time.monotonic())
            with self._locked.lock:
                before = write.inserted
                done = not late and write.advance(core)
                if late:
                    write.abandon(core)
                if write.inserted > before:
                    self._locked.wake()
            if not done and not late:
                return
            session.writes.popleft()
            reply = {"id": write.id, "confirmed": core.writers.get(session.writer, 0), "refused": write.refused[:100]}
            if late:
                reply |= {"error": "Timeout", "reason": f"the limiter let {write.inserted} items in before the deadline"}
            keys = [np.concatenate(write.keys)] if write.wants_keys and write.keys else []
            self._endpoint.send(client, pack(reply, keys))
        self._blocked.pop(id(session), None)

    def _sample(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> None:
        if self._speaking is not None and isinstance(header.get("owner"), int):
            self._speaking.readers.add(header["owner"])
            if len(self._speaking.readers) > MOST_READERS:
                self._speaking.readers.discard(header["owner"])
                raise Refused(f"a connection has at most {MOST_READERS} readers")
        self._samples.sample(client, header)

    def _consume(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        self._samples.consume(header, buffers)
        return {}

    def _update(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        count = field(header, "count", int, 0, MOST_BATCH)
        if len(buffers) != 2:
            raise Refused("update carries keys and priorities")
        keys, values = read_array(buffers[0], np.int64, count), read_array(buffers[1], np.float64, count)
        with self._locked.lock:
            unknown, refused = self._locked.core.update(field(header, "table", str), keys, values)
        return {"unknown": unknown, "refused": refused}

    def _delete(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        count = field(header, "count", int, 0, MOST_BATCH)
        if len(buffers) != 1:
            raise Refused("delete carries keys")
        table, keys = field(header, "table", str), read_array(buffers[0], np.int64, count)
        return {"removed": self._locked.change(lambda core: core.delete(table, keys))}

    def _reset(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        table = field(header, "table", str)
        self._locked.change(lambda core: core.table(table).reset())
        return {}

    def _trim(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        table = field(header, "table", str)
        return {"removed": self._locked.change(lambda core: core.table(table).trim())}

    def _info(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        with self._locked.lock:
            info = self._locked.core.info()
        refused = self.refused_messages + self._samples.refused
        info |= {"sessions": len(self._sessions), "refused_messages": refused, "address": self.address}
        return {"info": info}

    def _save(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> None:
        """Write a checkpoint in a thread of its own, so that the loop continues."""
        number = field(header, "id", int, 0)
        if self._saves >= MOST_SAVES:
            raise Refused(f"{self._saves} checkpoints are already asked for")
        self._saves += 1
        threading.Thread(target=self._save_and_tell, args=(client, number), daemon=True).start()

    def _save_and_tell(self, client: bytes, number: int) -> None:
        try:
            reply: dict[str, Any] = {"id": number, "path": str(self._checkpoint())}
        except Exception as error:
            reply = {"id": number, **error_fields(error)}
        with self._locked.lock:
            if self._closing:
                return  # the loop's descriptor may belong to another file by now
            self._finished.append((client, reply))
            self._awake = True
            self._endpoint.wake()

    def _bye(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        """A writer was closed: forget its groups and its last number."""
        session = self._sessions.pop(field(header, "session", int, 0, 1 << 62), None)
        if session is not None:
            with self._locked.lock:
                session.drop(self._locked.core)
                self._locked.core.writers.pop(session.writer, None)
            self._blocked.pop(id(session), None)
        return {}

    OPERATIONS: ClassVar[dict[str, Callable[..., Any]]] = {
        "hello": _hello, "share": _share, "unshare": _unshare, "write": _write, "sample": _sample, "consume": _consume,
        "update": _update, "delete": _delete, "reset": _reset, "trim": _trim, "info": _info, "checkpoint": _save, "bye": _bye,
    }  # fmt: skip

    # -- what waits

    def _retry(self) -> None:
        """Try waiting requests again: writes, then samples, then writes that those samples made room for."""
        for client, session in list(self._blocked.values()):
            self._advance(client, session)
        self._samples.retry()
        if self._blocked and self._any_insertable():
            for client, session in list(self._blocked.values()):
                self._advance(client, session)
        while self._finished:
            client, reply = self._finished.popleft()
            self._saves -= 1
            self._endpoint.send(client, pack(reply))

    def _any_insertable(self) -> bool:
        return any(table.limiter.can_insert() for table in self._locked.core.tables.values())

    def _sweep(self, now: float) -> None:
        """Forget sessions and reservations of clients that were silent for long; a living client opens a new session."""
        for number, session in list(self._sessions.items()):
            if now - session.seen > SESSION_SECONDS and not session.writes:
                self._drop(session)
                del self._sessions[number]
        self._samples.sweep(now, SESSION_SECONDS)
        if self._shared is not None:
            self._shared.sweep()

    def _refuse_all(self) -> None:
        """The server closes: tell all waiting clients."""
        closed = Closed("the replay server was closed")
        for client, session in self._blocked.values():
            for write in session.writes:
                self._endpoint.send(client, pack({"id": write.id, **error_fields(closed)}))
        self._samples.refuse_all(closed)

    def close(self) -> None:
        with self._locked.lock:
            self._closing = True
        self._endpoint.wake()
        self._thread.join()
        with self._locked.lock:  # a thread that is about to wake the loop has done so after this
            self._locked.on_change = None
        self._endpoint.close()
