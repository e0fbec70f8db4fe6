"""Messages between places: whole, in batches, with at most one call under way from one place to another.

While a call is under way, other messages to the same place wait and go with the next one: the busier the wire, the larger the
calls. An array of up to 100 KB travels inside the call, a larger one through the object store (Ray's own rule for arguments),
from which it is read without a copy.

A call that fails because of the network is repeated; the receiver knows its number and takes it once. Messages to a place that
died are dropped: the supervisor names its successor, and the links tell that one what it has to know.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

__all__ = ["Message", "Messenger"]

Message = tuple[Any, ...]  # wire, kind, numbers
AGAIN_SECONDS = 0.5


class Peer:
    """One process of another place."""

    def __init__(self, handle: Any, incarnation: int) -> None:
        self.handle, self.incarnation = handle, incarnation
        self.queue: deque[tuple[Message, Any]] = deque()
        self.batch: list[tuple[Message, Any]] = []  # the messages that are under way
        self.number = 0
        self.gone = False
        self.lock = threading.Lock()


class Messenger:
    def __init__(self, place: str, incarnation: int, receive: Callable[[Message, Any], None]) -> None:
        self._me, self._incarnation, self._receive = place, incarnation, receive
        self._peers: dict[str, Peer] = {}
        self._early: dict[str, list[tuple[Message, Any]]] = {}  # messages to places that the supervisor has not named yet
        self._taken: dict[tuple[str, int], int] = {}  # sender and incarnation -> the last number taken
        self._back: queue.SimpleQueue[tuple[Peer, Any]] = queue.SimpleQueue()  # calls that have returned
        self._lock = threading.Lock()
        self.calls = self.bytes = 0  # calls made to other places, bytes received from them
        threading.Thread(target=self._carry, name="messenger", daemon=True).start()

    def connect(self, place: str, handle: Any, incarnation: int) -> None:
        """The supervisor names the present process of a place."""
        with self._lock:
            known = self._peers.get(place)
            if known is not None and known.incarnation >= incarnation:
                return
            if known is not None:
                known.gone = True
            peer = self._peers[place] = Peer(handle, incarnation)
            early = self._early.pop(place, [])
        for message, payload in early:
            self._add(peer, message, payload)

    def send(self, place: str, message: Message, payload: Any = None) -> None:
        """Send a message to another place, or to this one: then at once and by reference."""
        if place == self._me:
            self._receive(message, payload)
            return
        with self._lock:
            peer = self._peers.get(place)
            if peer is None:
                self._early.setdefault(place, []).append((message, payload))
        if peer is not None:
            self._add(peer, message, payload)

    def _add(self, peer: Peer, message: Message, payload: Any) -> None:
        with peer.lock:
            if peer.gone:
                return
            peer.queue.append((message, payload))
            if not peer.batch:
                self._submit(peer)

    def _submit(self, peer: Peer, again: bool = False) -> None:
        """Send all messages that wait; the caller holds the peer's lock."""
        if not again:
            peer.batch = list(peer.queue)
            peer.queue.clear()
            peer.number += 1
        payloads = [payload for _, payload in peer.batch if payload is not None]
        headers = [(message, payload is not None) for message, payload in peer.batch]
        self.calls += 1
        try:
            reply = peer.handle.deliver.remote(self._me, self._incarnation, peer.number, headers, *payloads)
        except Exception as error:  # the cluster is away at this moment: treat it as the result of the call
            if not again:
                print(f"messages to another place wait: {error}", file=sys.stderr)
            self._back.put((peer, ActorUnavailableError(str(error), None)))
            return
        reply.future().add_done_callback(partial(self._sent, peer))

    def _sent(self, peer: Peer, future: Any) -> None:
        """A call has returned; this runs in a thread of Ray, which must not be held up."""
        self._back.put((peer, future.exception()))

    def _carry(self) -> None:
        """Send the messages that waited for an earlier call."""
        while True:
            peer, error = self._back.get()
            if isinstance(error, ActorUnavailableError):
                time.sleep(AGAIN_SECONDS)
            elif error is not None and not isinstance(error, RayActorError):
                print(f"a call to another place failed: {error}", file=sys.stderr)
            try:
                with peer.lock:
                    if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                        peer.gone = True
                    if peer.gone:
                        peer.queue.clear()
                    elif isinstance(error, ActorUnavailableError):
                        self._submit(peer, again=True)
                    else:
                        peer.batch = []
                        if peer.queue:
                            self._submit(peer)
            except Exception:  # the cluster goes down; the supervisor deals with that
                traceback.print_exc(file=sys.stderr)

    def arrive(self, sender: str, incarnation: int, number: int, headers: list[tuple[Message, bool]],
               payloads: tuple[Any, ...]) -> None:
        """A call from another place."""
        if number <= self._taken.get((sender, incarnation), 0):
            return
        self._taken[sender, incarnation] = number
        self.bytes += sum(payload.nbytes for payload in payloads)
        arrays = iter(payloads)
        for message, loaded in headers:
            self._receive(message, next(arrays) if loaded else None)
