"""One socket to a server: requests with deadlines, and what the server says of itself."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import zmq

from shoal.errors import ConfigError
from shoal.replay.client import timings
from shoal.replay.errors import Unanswered
from shoal.replay.service.keys import Key, check_key
from shoal.replay.service.messages import MOST_MESSAGE_BYTES, check_address, is_loopback, pack, raise_error, unpack
from shoal.replay.table.chunks import CHUNK_BYTES

__all__ = ["Connection"]


class Connection:
    """One socket to a server. For one thread at a time."""

    def __init__(self, address: str, key: Key | None, patience: float = math.inf) -> None:
        check_address(address)
        check_key("client", key, is_loopback(address), address)
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
            raise ConfigError(f"{self.address} is not an address to connect to: {error}") from error
        return socket

    def send(self, header: dict[str, Any], buffers: Sequence[Any] = ()) -> int:
        """Send a request without waiting; returns its number, a new one unless it has one."""
        number: int = header.setdefault("id", self._number + 1)
        self._number = max(self._number, number)
        try:
            self._socket.send_multipart(pack(header, buffers), zmq.NOBLOCK, copy=False)
        except zmq.Again:  # the handshake failed for good, or a reply was too large
            self.reopen()
            raise Unanswered(
                f"{self.address} does not let this client in: make its key on the server's machine with `shoal replay keys`"
            ) from None
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
        """Learn what a server says of itself. The quickest answer measures its clock best."""
        known = header["incarnation"] == self._clock_of
        trip = self.heard - sent
        if not known or trip <= max(self._round_trip, timings.CLOCK_SECONDS):
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
        deadline = None if timeout is None else began + timeout + timings.GRACE_SECONDS
        self.heard, asked, relearned = began, began, False
        number = self.ping() if self.incarnation is None else self._ask(header, buffers, deadline)
        while True:
            now = time.monotonic()
            if (deadline is not None and now > deadline) or now - self.heard > self._silence(deadline):
                raise Unanswered(f"{self.address} does not answer")
            if now - asked > timings.PING_SECONDS:
                self.ping()
                asked = now
            reply = self.receive(timings.PING_SECONDS if deadline is None else min(timings.PING_SECONDS, deadline - now + 0.001))
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
        asked = header | {"until": gives_up - timings.LATE_SECONDS + self.clock_offset}
        return self.send(asked if again is None else asked | {"id": again}, buffers)

    def _silence(self, deadline: float | None) -> float:
        """Seconds without any answer after which the server is taken for dead."""
        return timings.DEAD_SECONDS if deadline is None else self._patience

    def reopen(self) -> None:
        """Drop all unanswered requests: the server forgets them with the connection."""
        self._socket.close()
        self._socket = self._open()

    def close(self) -> None:
        self._socket.close()
