"""The socket service: one thread that answers ipc and TCP clients of a core.

    DEALER clients ──▶ ROUTER ──▶ check ──▶ core (under the lock) ──▶ reply, at once or when a limiter allows it

Requests that wait for a limiter are kept with their deadlines and tried again after every change. Off loopback the socket
speaks CURVE, and a ZAP handler lets in only clients whose public key is known.
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

from shoal.replay.door import Door, came_through
from shoal.replay.errors import Closed, Refused, Timeout
from shoal.replay.keys import Key
from shoal.replay.local import Local
from shoal.replay.reading import MOST_BATCH, Reading
from shoal.replay.sessions import Session, Write
from shoal.replay.shared import SharedBlocks
from shoal.replay.wire import MOST_MESSAGE_BYTES, VERSION, error_fields, field, pack, read_array, unpack

__all__ = ["Service"]

LOG = logging.getLogger("shoal.replay")
SESSION_SECONDS = 60.0
SWEEP_SECONDS = 1.0
MOST_WRITERS = 1 << 16
"""Writers whose last number is remembered although they are away; beyond that the oldest are forgotten."""
MOST_LOST = 1 << 62  # a client may claim anything; what is reported must stay a number that travels


class Connected(NamedTuple):
    """Who speaks through a connection: a client, its writers' sessions and its readers."""

    client: bytes
    sessions: set[int]
    readers: set[int]


class Service:
    """Answers clients until it is closed."""

    _speaking: Connected | None = None

    def __init__(self, local: Local, address: str, key: Key | None, checkpoint: Callable[[], Any]) -> None:
        self._local, self._checkpoint = local, checkpoint
        self._door = Door(address, key)
        self.address = self._door.address
        self.incarnation = secrets.randbits(62)
        self._sessions: dict[int, Session] = {}
        self._blocked: dict[int, tuple[bytes, Session]] = {}  # sessions whose first write waits for a limiter
        self._connections: dict[int, Connected] = {}  # descriptor -> who came through it
        self._shared = SharedBlocks() if address.startswith("ipc://") else None
        self._reading = Reading(local, self._shared, self._send)
        self.refused_messages = 0
        self._finished: deque[tuple[bytes, dict[str, Any]]] = deque()
        self._awake = False
        self._closing = False
        local.on_change = self._on_change
        self._thread = threading.Thread(target=self._run, name="shoal-replay", daemon=True)
        self._thread.start()

    def _on_change(self) -> None:
        """Tables changed in another thread (the lock is held): look at waiting requests."""
        if not self._awake and threading.current_thread() is not self._thread:
            self._awake = True
            self._door.wake()

    # -- the loop

    def _run(self) -> None:
        swept = time.monotonic()
        while not self._closing:
            woken, ended = self._door.wait(self._patience())
            if woken:
                self._awake = False
            for descriptor in ended:
                self._safely(self._forget, descriptor)
            for _ in range(256):
                frames = self._door.receive()
                if frames is None:
                    break
                self._note(frames)
                self._safely(self._receive, frames[0].bytes, frames[1:])
            self._safely(self._retry)
            if time.monotonic() - swept > SWEEP_SECONDS:
                swept = time.monotonic()
                self._safely(self._sweep, swept)
        self._refuse_all()

    def _safely(self, work: Callable[..., None], *arguments: Any) -> None:
        """What goes wrong with one client must not end the service of all."""
        try:
            work(*arguments)
        except Exception:  # whatever it is: the other clients are served on, and the log has the traceback
            LOG.exception("the replay service goes on after an error")

    def _note(self, frames: list[Any]) -> None:
        """Remember through which connection a client speaks."""
        descriptor = came_through(frames)
        known = self._connections.get(descriptor)
        if descriptor >= 0 and (known is None or known.client != frames[0].bytes):
            for ended in self._door.ended():  # among them the one that had this descriptor before
                self._safely(self._forget, ended)
            known = self._connections[descriptor] = Connected(frames[0].bytes, set(), set())
        self._speaking = known

    def _forget(self, descriptor: int) -> None:
        """A connection has ended: what its client held is given back. One that only lost its line opens a new session."""
        gone = self._connections.pop(descriptor, None)
        if gone is None:
            return
        self._reading.forget_client(gone.client)
        for number in gone.sessions:
            session = self._sessions.pop(number, None)
            if session is not None:
                self._drop(session)
        for owner in gone.readers:
            if not any(owner in other.readers for other in self._connections.values()):
                self._reading.forget(owner)

    def _drop(self, session: Session) -> None:
        with self._local.lock:
            session.drop(self._local.core)
        self._blocked.pop(id(session), None)

    def _patience(self) -> int:
        """Milliseconds until the next deadline or sweep."""
        now = time.monotonic()
        nearest = min(SWEEP_SECONDS, self._reading.nearest(now))
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
            if operation != "write" and self._deadline(header) < time.monotonic():
                raise Timeout(f"{operation} came after its deadline and was not applied")
            reply = handler(self, client, header, buffers)
            answer = reply if reply is None or isinstance(reply, list) else pack(reply)
        except Exception as error:
            self.refused_messages += isinstance(error, Refused)
            if not isinstance(error, (Refused, Timeout)):
                LOG.debug("request failed", exc_info=True)
            late = {"late": True} if isinstance(error, Timeout) else {}
            answer = pack({"id": number if isinstance(number, int) else -1, **error_fields(error), **late})
        if answer is not None:
            self._send(client, answer)

    def _send(self, client: bytes, frames: list[Any]) -> None:
        self._door.send(client, frames)

    # -- operations

    def _hello(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        """Who the server is; a writer says how many of its items were confirmed and learns what was lost."""
        with self._local.lock:
            core = self._local.core
            reply = {
                "id": field(header, "id", int, 0),
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
                session = self._sessions.get(number)
                if session is None:
                    last = core.writers.get(writer, 0)
                    session = self._sessions[number] = Session(writer, max(0, confirmed - last))
                    core.lost = min(core.lost + session.lost, MOST_LOST)
                    core.writers[writer] = max(last, confirmed)
                    self._forget_writers()
                session.seen = time.monotonic()
                if self._speaking is not None:
                    self._speaking.sessions.add(number)
                reply |= {"serial": session.serial, "lost": session.lost, "last": core.writers.get(writer, 0)}
            return reply

    def _forget_writers(self) -> None:
        """Writers that died never say goodbye. One may still come back, so they are forgotten only when there are very many."""
        writers = self._local.core.writers
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
    def _deadline(header: dict[str, Any]) -> float:
        """When a client gives up, as a time of this process's clock: it knows that from `hello`."""
        until = header.get("until")
        if until is None:
            return math.inf
        if not isinstance(until, (int, float)) or isinstance(until, bool) or not abs(until) < 1e12:
            raise Refused("field 'until' must be a time")
        return float(until)

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
        if self._speaking is not None and isinstance(header.get("owner"), int):
            self._speaking.readers.add(header["owner"])
        self._reading.sample(client, header)

    def _consume(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        return self._reading.consume(header, buffers)

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

    def _trim(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        with self._local.lock:
            removed = self._local.core.table(field(header, "table", str)).trim()
            self._local.wake()
        return {"id": field(header, "id", int, 0), "removed": removed}

    def _info(self, client: bytes, header: dict[str, Any], buffers: list[Any]) -> dict[str, Any]:
        with self._local.lock:
            info = self._local.core.info()
        refused = self.refused_messages + self._reading.refused
        info |= {"sessions": len(self._sessions), "refused_messages": refused, "address": self.address}
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
            if self._closing:
                return  # the descriptor that wakes the loop may be another file's by now
            self._finished.append((client, reply))
            self._awake = True
            self._door.wake()

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
        "update": _update, "delete": _delete, "reset": _reset, "trim": _trim, "info": _info, "checkpoint": _save, "bye": _bye,
    }  # fmt: skip

    # -- what waits

    def _retry(self) -> None:
        """Look again at whoever waits: writes first, then samples, while either lets the other go on."""
        for client, session in list(self._blocked.values()):
            self._go_on(client, session)
        self._reading.retry()
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
                self._drop(session)
                del self._sessions[number]
        self._reading.sweep(now, SESSION_SECONDS)
        if self._shared is not None:
            self._shared.sweep()

    def _refuse_all(self) -> None:
        """The server closes: whoever waits is told."""
        closed = Closed("the replay server was closed")
        for client, session in self._blocked.values():
            for write in session.writes:
                self._send(client, pack({"id": write.id, **error_fields(closed)}))
        self._reading.refuse_all(closed)

    def close(self) -> None:
        with self._local.lock:
            self._closing = True
        self._door.wake()
        self._thread.join()
        with self._local.lock:  # whoever is about to wake the loop has done so
            self._local.on_change = None
        self._door.close()
