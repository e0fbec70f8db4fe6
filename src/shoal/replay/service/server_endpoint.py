"""The socket of a server: which clients may connect (CURVE and ZAP), and which have left.

When a client dies its connection closes. The socket's monitor names the descriptor of a connection that ended, and a message
names the descriptor it came through, so the service forgets a dead writer or reader at once and not after a silence.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.monitor
import zmq.utils.z85

from shoal.errors import ConfigError
from shoal.replay.errors import Refused
from shoal.replay.service.connection_watch import ConnectionWatch
from shoal.replay.service.keys import Key, check_key
from shoal.replay.service.messages import MOST_MESSAGE_BYTES, check_address, is_loopback

__all__ = ["ServerEndpoint"]

MOST_UNREAD_MESSAGES = 1000
MOST_UNREAD_BYTES = 1 << 28
"""Replies that a client has not read: further ones are dropped, and it gets no further batches. An honest client waits for one."""
TRACKED_BYTES = 1 << 16  # of smaller messages not even the most that zmq keeps are many


class ServerEndpoint:
    """The sockets of one server. Only its own thread may use them, except for `wake`."""

    def __init__(self, address: str, key: Key | None) -> None:
        check_address(address)
        check_key("server", key, is_loopback(address), address)
        self._key = key
        self._context = zmq.Context()
        self._zap = self._open_zap() if key is not None else None
        self._socket = self._open_socket()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            with _alone_at(address):
                self._socket.bind(address)
        except (zmq.ZMQError, OSError) as error:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._context.destroy(0)
            raise ConfigError(f"{address} cannot be served: {error}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._watch = ConnectionWatch()
        self._unread: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}  # client -> frames that zmq still holds for it
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for thing in (self._socket, self.wake_fd, self._monitor, self._zap):
            if thing is not None:
                self._poller.register(thing, zmq.POLLIN)

    def _open_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, MOST_UNREAD_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        if self._key is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._key.public)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"shoal")
        return socket

    def _open_zap(self) -> zmq.Socket[bytes]:
        zap = self._context.socket(zmq.REP)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind("inproc://zeromq.zap.01")
        return zap

    def wait(self, milliseconds: int) -> tuple[bool, list[int]]:
        """Wait for messages or a wake-up; returns whether the server was woken, and the connections that have ended."""
        ready = dict(self._poller.poll(milliseconds))
        if self._zap is not None and self._zap in ready:
            self._answer_zap()
        ended = self.ended() if self._monitor in ready else []
        woken = self.wake_fd in ready
        if woken:
            os.eventfd_read(self.wake_fd)
        return woken, ended

    def ended(self) -> list[int]:
        """The connections that have ended since the last call."""
        found: list[int] = []
        while True:
            try:
                event = zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return found
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._watch.begin(descriptor)
            else:
                self._watch.end(descriptor)
                found.append(descriptor)

    def _answer_zap(self) -> None:
        """Let in a client if its public key is known."""
        assert self._zap is not None and self._key is not None
        request = self._zap.recv_multipart()
        version, number, mechanism = request[0], request[1], request[5]
        public = zmq.utils.z85.encode(request[6]) if mechanism == b"CURVE" and len(request) > 6 else b""
        known = public in self._key.clients
        status = (b"200", b"OK", public) if known else (b"400", b"unknown client key", b"")
        self._zap.send_multipart([version, number, *status, b""])

    def receive(self) -> list[Any] | None:
        """The next message as [client, frames...], or None."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def came_through(self, frames: list[Any]) -> int:
        """The descriptor of the connection that a message came through; -1 where that is not known."""
        try:
            descriptor = int(frames[0].get(zmq.SRCFD))
        except (zmq.ZMQError, AttributeError):
            return -1
        self._watch.finished(descriptor)
        return descriptor

    def send(self, client: bytes, frames: list[Any]) -> None:
        """Queue a message for a client. The largest frame of a large one is followed until it has left, to know what a client does
        not read."""
        sizes = [len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in frames]
        if (nbytes := sum(sizes)) >= TRACKED_BYTES:
            at = sizes.index(max(sizes))
            frames[at] = zmq.Frame(frames[at], track=True, copy=False, copy_threshold=0)
            self._unread.setdefault(client, deque()).append((frames[at].tracker, nbytes))
        self._socket.send_multipart([client, *frames], copy=False)

    def check_read(self, client: bytes) -> None:
        """Refuse more to a client that does not read what it asked for."""
        unread = self._unread.get(client)
        while unread and unread[0][0].done:
            unread.popleft()
        if unread:
            nbytes = sum(size for _, size in unread)
            if nbytes > MOST_UNREAD_BYTES:
                raise Refused(f"{nbytes} bytes of replies wait for this client: read them before asking for more")
        else:
            self._unread.pop(client, None)

    def forget(self, client: bytes) -> None:
        """A client's connection has ended."""
        self._unread.pop(client, None)

    def sweep(self) -> None:
        """Cut connections that send a message without end."""
        self._watch.sweep()

    def wake(self) -> None:
        """From any thread: make `wait` return."""
        os.eventfd_write(self.wake_fd, 1)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        if self._zap is not None:
            self._zap.close()
        self._context.term()
        os.close(self.wake_fd)


@contextlib.contextmanager
def _alone_at(address: str) -> Iterator[None]:
    """Binding an ipc path would silently take it from a living server: ask first whether one listens there, and keep others from
    binding meanwhile. The file of a dead server is replaced."""
    path = address.removeprefix("ipc://")
    if path == address or path.startswith(("@", "*")) or not Path(path).parent.is_dir():
        yield
        return
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if _answers(path):
            raise OSError("another server listens there; stop it, or choose another path")
        yield
    finally:
        os.close(folder)


def _answers(path: str) -> bool:
    """Whether a process listens at a path."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its queue of connections is full
        except OSError:
            return False  # nothing there, or left by a dead process
        return True
