"""The door of a server: its socket, who may come in (CURVE and ZAP), and who has left.

A client that dies closes its connection. The socket's monitor tells the descriptor of a connection that ended, messages tell the
descriptor they came through: so a dead writer or reader is forgotten at once, not after a silence.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.monitor
import zmq.utils.z85

from shoal.errors import ConfigError
from shoal.replay.keys import Key
from shoal.replay.wire import MOST_MESSAGE_BYTES, check_address, is_loopback

__all__ = ["Door"]


class Door:
    """The sockets of one server. For the thread that serves."""

    def __init__(self, address: str, key: Key | None) -> None:
        check_address(address)
        if key is not None and not isinstance(key, Key):
            raise ConfigError(f"a server's key is a replay.Key, not {type(key).__name__}")
        if key is None and not is_loopback(address):
            raise ConfigError(f"{address} is not loopback: give the server a key (shoal replay keys, or Key.generate)")
        self._key = key
        self._context = zmq.Context()
        self._zap = self._open_zap() if key is not None else None
        self._socket = self._open_socket()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            with _alone_at(address):
                self._socket.bind(address)
        except (zmq.ZMQError, OSError) as error:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._context.destroy(0)
            raise ConfigError(f"{address} cannot be served: {error}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for thing in (self._socket, self.wake_fd, self._monitor, self._zap):
            if thing is not None:
                self._poller.register(thing, zmq.POLLIN)

    def _open_socket(self) -> zmq.Socket[bytes]:
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
        return socket

    def _open_zap(self) -> zmq.Socket[bytes]:
        zap = self._context.socket(zmq.REP)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind("inproc://zeromq.zap.01")
        return zap

    def wait(self, milliseconds: int) -> tuple[bool, list[int]]:
        """Wait for something to do; whether the server was woken, and the connections that have ended."""
        ready = dict(self._poller.poll(milliseconds))
        if self._zap is not None and self._zap in ready:
            self._answer_zap()
        ended = self.ended() if self._monitor in ready else []
        woken = self.wake_fd in ready
        if woken:
            os.eventfd_read(self.wake_fd)
        return woken, ended

    def ended(self) -> list[int]:
        """The connections that have ended and were not told of yet."""
        found = []
        while True:
            try:
                found.append(int(zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)["value"]))
            except zmq.Again:
                return found

    def _answer_zap(self) -> None:
        """Let in clients whose public key is known."""
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

    def send(self, client: bytes, frames: list[Any]) -> None:
        self._socket.send_multipart([client, *frames], copy=False)

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
    """Whoever binds an ipc path takes it from its owner without a word: so ask first whether one lives, and let no other bind
    meanwhile. The file that a dead server left is replaced."""
    path = address.removeprefix("ipc://")
    if path == address or path.startswith(("@", "*")) or not Path(path).parent.is_dir():
        yield
        return
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if _answers(path):
            raise OSError("another server lives there; stop it, or choose another path")
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
            return True  # so many wait that there is no room for another
        except OSError:
            return False  # nothing there, or left by a dead process
        return True


def came_through(frames: list[Any]) -> int:
    """The descriptor of the connection that a message came through; -1 where that is not known."""
    try:
        return int(frames[0].get(zmq.SRCFD))
    except (zmq.ZMQError, AttributeError):
        return -1
