"""Carries the values of a broadcast to places that want one: each version is put once, and fetched once per node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from shoal.core import Publisher, Reader, Wait
from shoal.runtime.ray.links.link import LinkContext
from shoal.runtime.ray.place_memory import connect_remote
from shoal.runtime.wires.broadcast import BUFFERS, STAMP, VERSION, BroadcastPublisher, BroadcastReader, BroadcastWire, write_version

__all__ = ["BroadcastLink"]

RENEW_SECONDS = 0.05  # after which a place that has not used its value is given a newer one
IN_CALL = 100_000     # bytes that Ray carries inside a call; it puts larger arguments into the object store itself


class ReaderPlace:
    """What a publisher knows of another place with readers."""

    def __init__(self) -> None:
        self.wants, self.given, self.given_at = True, 0, 0.0

    def due(self, version: int) -> bool:
        """Whether to send it this version: it wants one, or has not used its own for so long that a newer one is better."""
        return version > self.given and (self.wants or time.monotonic() - self.given_at > RENEW_SECONDS)


class Announce:
    """A reader's channel in the publisher's place."""

    def __init__(self, link: BroadcastLink, place: str) -> None:
        self.link, self.place = link, place

    def put(self, version: int, _: int) -> None:
        self.link.published(self.place, version)

    def pop(self) -> None:
        """A version is never taken back."""


class LinkedPublisher(BroadcastPublisher):
    """Publishes a version above all that readers have, even those of other publishers."""

    def __init__(self, link: BroadcastLink, lock: threading.RLock) -> None:
        super().__init__(link.wire)
        self._link, self._lock = link, lock

    @property
    def version(self) -> int:
        return max(super().version, self._link.heard)

    def publish(self, tree: Any) -> int:
        with self._lock:
            return super().publish(tree)


class LinkedReader(BroadcastReader):
    """Tells the link when a value was pulled or a newer one is awaited: then its place wants the next one."""

    def __init__(self, wire: BroadcastWire, member: int, pulled: Callable[[], None]) -> None:
        super().__init__(wire, member)
        self._pulled = pulled

    def newer_than(self, version: int) -> Wait:
        if version >= self.version:
            self._pulled()
        return super().newer_than(version)

    def pull(self, into: Any) -> int:
        version = super().pull(into)
        self._pulled()
        return version


class BroadcastLink:
    def __init__(self, wire: BroadcastWire, context: LinkContext) -> None:
        self.wire, self.context = wire, context
        self._lock = threading.RLock()
        readers, publishers = range(wire.members("reader")), range(wire.members("publisher"))
        self._near = [m for m in readers if context.here(wire, "reader", m)]
        self._reader_places = {context.place_of(wire, "reader", m): ReaderPlace() for m in readers if m not in self._near}
        self._publisher_places = {context.place_of(wire, "publisher", m) for m in publishers
                                  if not context.here(wire, "publisher", m)}
        self.publishes = any(context.here(wire, "publisher", m) for m in publishers)
        if self.publishes:
            for m in readers:
                if m not in self._near:
                    connect_remote(wire.channels[m], Announce(self, context.place_of(wire, "reader", m)))
        self.greeted: set[str] = set()             # places that have said what they have
        self._header = wire.header()
        self._own = 0                              # the newest version that was published here
        self.heard = 0                             # the newest that another place has; its data may not have come here
        self._put: tuple[int, int, Any] = (0, 0, None)   # a version, its time, and the array or its reference
        self._asked = 0                            # the version that this place has said it has

    def endpoint(self, end: str, member: int, incarnation: int) -> Publisher | Reader:
        return LinkedPublisher(self, self._lock) if end == "publisher" else LinkedReader(self.wire, member, self._pulled)

    def renewed(self, end: str, member: int) -> None:
        place = self.context.place_of(self.wire, end, member)
        if end == "reader" and place in self._reader_places and self.publishes:
            with self._lock:
                self._reader_places[place] = ReaderPlace()
                self._offer(place)
        elif end == "publisher" and place in self._publisher_places and self._near:
            self._want(place)

    # ------------------------------------------------------------------ the publisher's side
    def published(self, place: str, version: int) -> None:
        with self._lock:
            self._own = version
            self._offer(place)

    def _offer(self, place: str) -> None:
        """Send a place the newest value, if it wants one and does not have it."""
        place_state = self._reader_places[place]
        version = int(self._header[VERSION])
        if version != self._own or not place_state.due(version):
            return
        if self._put[0] != version:
            words, _ = self.wire.buffer(version % BUFFERS)
            age = time.monotonic_ns() - int(words[STAMP])  # since it was published, perhaps long before a place wanted it
            self._put = (version, time.time_ns() - age, self._pack(version))
        place_state.wants, place_state.given, place_state.given_at = False, version, time.monotonic()
        self.context.send(place, (self.wire.name, "value", version, self._put[1]), self._put[2])

    def _pack(self, version: int) -> Any:
        """The value as one array; a large one is put into the object store once, for all places."""
        _, data = self.wire.buffer(version % BUFFERS)
        flat = np.empty(self.wire.layout.nbytes, np.uint8)
        self.wire.layout.copy(self.wire.layout.views(flat), data)
        return flat if flat.nbytes <= IN_CALL else ray.put(flat)

    def _heard(self, place: str, version: int) -> None:
        """A place has this version and wants a newer one."""
        with self._lock:
            newest = int(self._header[VERSION])
            self.heard = max(self.heard, version)
            if version > newest and newest and self._own == newest:
                self._number(newest, version + 1)  # a predecessor got further than we knew: ours is newer all the same
            self.greeted.add(place)
            if place in self._reader_places:
                place_state = self._reader_places[place]
                place_state.wants, place_state.given = True, version
                self._offer(place)

    def _number(self, old: int, version: int) -> None:
        words, source = self.wire.buffer(old % BUFFERS)
        flat = np.empty(self.wire.layout.nbytes, np.uint8)
        value = self.wire.layout.views(flat)
        self.wire.layout.copy(value, source)
        self._write(version, int(words[STAMP]), value)
        self._own = version
        for place in self._reader_places:
            self._offer(place)

    # ------------------------------------------------------------------ the readers' side
    def _pulled(self) -> None:
        version = int(self._header[VERSION])
        if version > self._asked:
            for place in self._publisher_places:
                self._want(place)

    def _want(self, place: str) -> None:
        self._asked = int(self._header[VERSION])
        self.context.send(place, (self.wire.name, "want", self._asked, self.context.place))

    def _arrived(self, version: int, stamp: int, payload: Any) -> None:
        with self._lock:
            if version > int(self._header[VERSION]):
                age = max(0, time.time_ns() - stamp)  # clocks of two machines
                self._write(version, time.monotonic_ns() - age, self.wire.layout.views(payload))
                for member in self._near:
                    self.wire.channels[member].put(version)
            else:
                for place in self._publisher_places:
                    self._want(place)  # its sender does not know how far we are

    def _write(self, version: int, stamp: int, value: Any) -> None:
        write_version(self._header, self.wire.buffer(version % BUFFERS), self.wire.layout, version, value, stamp)

    def receive(self, kind: str, numbers: tuple[Any, ...], payload: Any) -> None:
        if kind == "value":
            self._arrived(numbers[0], numbers[1], payload)
        else:
            self._heard(numbers[1], numbers[0])

    def numbers(self) -> dict[str, float]:
        return self.wire.numbers()
