"""Carries the values of a broadcast to places that want one: one put per version, fetched once per node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from shoal.core import Wait
from shoal.runtime.ray.ferries.base import Ground
from shoal.runtime.wires.broadcast import AFTER, BEFORE, STAMP, VERSION, Broadcast, Publisher, Reader
from shoal.slots import fence

__all__ = ["BroadcastFerry"]

RENEW_SECONDS = 0.05  # after which a place that has not used its value is given a newer one
IN_CALL = 100_000     # bytes that Ray carries inside a call; it puts larger arguments into the object store itself


class Home:
    """A place with readers, as a publisher knows it."""

    def __init__(self) -> None:
        self.wants, self.given, self.given_at = True, 0, 0.0

    def due(self, version: int) -> bool:
        """It wants a value, or has one that it has not used for so long that a newer one would be better."""
        return version > self.given and (self.wants or time.monotonic() - self.given_at > RENEW_SECONDS)


class Announce:
    """A reader's channel in the publisher's place."""

    def __init__(self, ferry: BroadcastFerry, place: str) -> None:
        self.ferry, self.place = ferry, place

    def put(self, version: int, _: int) -> None:
        self.ferry.published(self.place, version)

    def pop(self) -> None:
        """Nobody takes a version back."""


class FarPublisher(Publisher):
    """Publishes above whatever readers have, also where a predecessor or another publisher published that."""

    def __init__(self, ferry: BroadcastFerry, lock: threading.RLock) -> None:
        super().__init__(ferry.wire)
        self._ferry, self._lock = ferry, lock

    @property
    def version(self) -> int:
        return max(super().version, self._ferry.heard)

    def publish(self, tree: Any) -> int:
        with self._lock:
            return super().publish(tree)


class FarReader(Reader):
    """Says when a value was taken, or a newer one is waited for: then its place wants the next one."""

    def __init__(self, wire: Broadcast, member: int, pulled: Callable[[], None]) -> None:
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


class BroadcastFerry:
    def __init__(self, wire: Broadcast, ground: Ground) -> None:
        self.wire, self.ground = wire, ground
        self._lock = threading.RLock()
        readers, publishers = range(wire.members("reader")), range(wire.members("publisher"))
        self._homes = {ground.place_of(wire, "reader", m): Home() for m in readers if not ground.here(wire, "reader", m)}
        self._presses = {ground.place_of(wire, "publisher", m) for m in publishers if not ground.here(wire, "publisher", m)}
        self._near = [m for m in readers if ground.here(wire, "reader", m)]
        self.publishes = any(ground.here(wire, "publisher", m) for m in publishers)
        if self.publishes:
            for m in readers:
                if m not in self._near:
                    wire.channels[m].far = Announce(self, ground.place_of(wire, "reader", m))  # type: ignore[attr-defined]
        self.greeted: set[str] = set()             # places that have said what they have
        self._header = wire.header()
        self._own = 0                              # the newest version that was published here
        self.heard = 0                             # the newest that another place has; its data may not have come here
        self._put: tuple[int, int, Any] = (0, 0, None)   # a version, its time, and the array or its reference
        self._asked = 0                            # the version that this place has said it has

    def endpoint(self, end: str, member: int, incarnation: int) -> Publisher | Reader:
        return FarPublisher(self, self._lock) if end == "publisher" else FarReader(self.wire, member, self._pulled)

    def renewed(self, end: str, member: int) -> None:
        place = self.ground.place_of(self.wire, end, member)
        if end == "reader" and place in self._homes and self.publishes:
            with self._lock:
                self._homes[place] = Home()
                self._offer(place)
        elif end == "publisher" and place in self._presses and self._near:
            self._want(place)

    # ------------------------------------------------------------------ the publisher's side
    def published(self, place: str, version: int) -> None:
        with self._lock:
            self._own = version
            self._offer(place)

    def _offer(self, place: str) -> None:
        """Give a place the newest value, if it wants one and does not have it."""
        home = self._homes[place]
        version = int(self._header[VERSION])
        if version != self._own or not home.due(version):
            return
        if self._put[0] != version:
            words, _ = self.wire.buffer(version % 3)
            age = time.monotonic_ns() - int(words[STAMP])  # since it was published, perhaps long before somebody wanted it
            self._put = (version, time.time_ns() - age, self._pack(version))
        home.wants, home.given, home.given_at = False, version, time.monotonic()
        self.ground.send(place, (self.wire.name, "value", version, self._put[1]), self._put[2])

    def _pack(self, version: int) -> Any:
        """The value as one array; a large one is put into the object store once, for all places."""
        _, data = self.wire.buffer(version % 3)
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
            if place in self._homes:
                home = self._homes[place]
                home.wants, home.given = True, version
                self._offer(place)

    def _number(self, old: int, version: int) -> None:
        words, source = self.wire.buffer(old % 3)
        flat = np.empty(self.wire.layout.nbytes, np.uint8)
        value = self.wire.layout.views(flat)
        self.wire.layout.copy(value, source)
        self._write(version, int(words[STAMP]), value)
        self._own = version
        for place in self._homes:
            self._offer(place)

    # ------------------------------------------------------------------ the readers' side
    def _pulled(self) -> None:
        version = int(self._header[VERSION])
        if version > self._asked:
            for place in self._presses:
                self._want(place)

    def _want(self, place: str) -> None:
        self._asked = int(self._header[VERSION])
        self.ground.send(place, (self.wire.name, "want", self._asked, self.ground.place))

    def _arrived(self, version: int, stamp: int, payload: Any) -> None:
        with self._lock:
            if version > int(self._header[VERSION]):
                age = max(0, time.time_ns() - stamp)  # clocks of two machines
                self._write(version, time.monotonic_ns() - age, self.wire.layout.views(payload))
                for member in self._near:
                    self.wire.channels[member].put(version)
            else:
                for place in self._presses:
                    self._want(place)  # its sender does not know how far we are

    def _write(self, version: int, stamp: int, value: Any) -> None:
        words, data = self.wire.buffer(version % 3)
        words[AFTER] = -1
        words[BEFORE] = version
        fence()
        self.wire.layout.copy(data, value)
        words[STAMP] = stamp
        fence()
        words[AFTER] = version
        fence()
        self._header[VERSION] = version

    def receive(self, kind: str, numbers: tuple[Any, ...], payload: Any) -> None:
        if kind == "value":
            self._arrived(numbers[0], numbers[1], payload)
        else:
            self._heard(numbers[1], numbers[0])

    def numbers(self) -> dict[str, float]:
        return self.wire.numbers()
