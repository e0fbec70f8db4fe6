"""Carries the slots of a stream to another place; the producer's copy keeps each slot until the consumer has read it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np

from shoal.runtime.ray.links.link import LinkContext
from shoal.runtime.ray.place_memory import connect_remote
from shoal.runtime.wires.lanes import CONSUMED, FREE, FULL, SEQUENCE, STATE, TAKEN, WRITTEN, Lane, tallied
from shoal.runtime.wires.stream import StreamSource, StreamWire
from shoal.slots import fence

__all__ = ["StreamLink"]


class Outward:
    """The producer's side of a lane whose consumer is in another place. The slots of a dropping stream are carried one at a time,
    so that the producer can still take its oldest back."""

    def __init__(self, link: StreamLink, producer: int, consumer: int) -> None:
        self.link, self.producer, self.consumer = link, producer, consumer
        self.lane = Lane(link.wire, producer, consumer)
        self._dropping = link.wire.full == "drop_oldest"
        self._waiting: deque[tuple[int, int]] = deque()
        self._away: tuple[int, int] | None = None
        self._lock = threading.RLock()

    def put(self, number: int, sequence: int) -> None:
        if number < 0:
            return
        if not self._dropping:
            self._carry(number, sequence)
            return
        with self._lock:
            self._waiting.append((number, sequence))
            self._next()

    def pop(self) -> tuple[int, int] | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _next(self) -> None:
        if self._away is None and self._waiting:
            self._away = self._waiting.popleft()
            self._carry(*self._away)

    def _carry(self, number: int, sequence: int) -> None:
        self.link.carry(self.producer, self.consumer, number, sequence)

    def freed(self, number: int, sequence: int) -> None:
        """The consumer has read a slot."""
        header, words = self.lane.headers[number], self.lane.words
        if header[STATE] != FULL or int(header[SEQUENCE]) != sequence:
            return  # sent twice
        words[CONSUMED] = tallied(int(words[CONSUMED]), sequence)
        words[TAKEN] = max(int(words[TAKEN]), sequence)
        fence()
        header[STATE] = FREE
        self.lane.free.put(number)
        with self._lock:
            self._away = None
            self._next()

    def again(self) -> None:
        """A consumer was restarted: send it every slot that was not read."""
        with self._lock:
            if self._dropping:
                if self._away is not None:
                    self._carry(*self._away)
                return
        full = [(int(header[SEQUENCE]), number) for number, header in enumerate(self.lane.headers) if header[STATE] == FULL]
        for sequence, number in sorted(full):
            self._carry(number, sequence)


class Inward:
    """The consumer's side of a lane whose producer is in another place: its slots are the arrays that arrived."""

    def __init__(self, link: StreamLink, producer: int, consumer: int) -> None:
        self.link, self.producer, self.consumer = link, producer, consumer
        self.lane = Lane(link.wire, producer, consumer)
        self._born = -1  # the producer's incarnation that was heard last
        self._known: dict[int, int] = {}  # slot -> the newest sequence of that incarnation
        self._owners: dict[int, int] = {}  # slot -> the incarnation whose data it holds
        self._backlog: deque[tuple[int, int, int, Any]] = deque()  # arrivals whose slot still holds a dead producer's data
        self._lock = threading.RLock()

    def arrived(self, number: int, sequence: int, incarnation: int, payload: Any) -> None:
        with self._lock:
            if incarnation > self._born:
                self._born, self._known = incarnation, {}
            if incarnation < self._born or sequence <= self._known.get(number, 0):
                return  # late messages of a dead producer, or sent twice
            self._known[number] = sequence
            self._backlog.append((number, sequence, incarnation, payload))
            self._advance()

    def _advance(self) -> None:
        """Announce arrivals in their order, as far as their slots are free."""
        while self._backlog and self._backlog[0][0] not in self._owners:
            self._install(*self._backlog.popleft())

    def _install(self, number: int, sequence: int, incarnation: int, payload: Any) -> None:
        lane = self.lane
        self._owners[number] = incarnation
        lane.slots[number] = self.link.wire.layout.views(payload)
        lane.headers[number][SEQUENCE] = sequence
        lane.words[WRITTEN] += 1
        fence()
        lane.headers[number][STATE] = FULL
        lane.full.put(number, sequence)

    def put(self, number: int, sequence: int) -> None:
        """The consumer has read a slot."""
        with self._lock:
            owner = self._owners.pop(number, None)
            if owner is None:
                return  # there never was anything in it
            self.lane.slots[number] = None  # the array goes back to the object store
            sequence = int(self.lane.headers[number][SEQUENCE])
            self.link.give_back(self.producer, self.consumer, number, sequence, owner)
            self._advance()

    def pop(self) -> None:
        """A free slot is never taken back."""


class StreamLink:
    def __init__(self, wire: StreamWire, context: LinkContext) -> None:
        self.wire, self.context = wire, context
        self.outward: dict[tuple[int, int], Outward] = {}
        self.inward: dict[tuple[int, int], Inward] = {}
        consumers = wire.members("source")
        mine = np.zeros(wire.members("sink") * consumers, bool)
        for producer in range(wire.members("sink")):
            for consumer in range(consumers):
                near = context.here(wire, "sink", producer), context.here(wire, "source", consumer)
                mine[producer * consumers + consumer] = near[0]
                if near[0] == near[1] or not wire.joins(producer, consumer):
                    continue
                full, free = wire.channels[producer * consumers + consumer]
                if near[0]:
                    self.outward[producer, consumer] = Outward(self, producer, consumer)
                    connect_remote(full, self.outward[producer, consumer])
                else:
                    self.inward[producer, consumer] = Inward(self, producer, consumer)
                    connect_remote(free, self.inward[producer, consumer])
        self._mine = mine
        self._memory = wire.array()

    def endpoint(self, end: str, member: int, incarnation: int) -> Any:
        endpoint = self.wire.attach(end, member, incarnation)
        if isinstance(endpoint, StreamSource):
            for lane in endpoint.lanes:
                if (lane.producer, member) in self.inward:
                    lane.slots = self.inward[lane.producer, member].lane.slots  # the very list that arrivals are put into
        return endpoint

    def renewed(self, end: str, member: int) -> None:
        if end == "source":
            for (_, consumer), outward in self.outward.items():
                if consumer == member:
                    outward.again()

    def carry(self, producer: int, consumer: int, number: int, sequence: int) -> None:
        wire = self.wire
        start = wire.slot_offset(producer, consumer, number)
        incarnation = self.context.incarnation(wire, "sink", producer)
        self.context.send(self.context.place_of(wire, "source", consumer),
                         (wire.name, "full", producer, consumer, number, sequence, incarnation),
                         self._memory[start : start + wire.layout.nbytes])

    def give_back(self, producer: int, consumer: int, number: int, sequence: int, incarnation: int) -> None:
        self.context.send(self.context.place_of(self.wire, "sink", producer),
                         (self.wire.name, "free", producer, consumer, number, sequence, incarnation))

    def receive(self, kind: str, numbers: tuple[Any, ...], payload: Any) -> None:
        producer, consumer, number, sequence, incarnation = numbers
        if kind == "full":
            self.inward[producer, consumer].arrived(number, sequence, incarnation, payload)
        elif incarnation == self.context.incarnation(self.wire, "sink", producer):
            self.outward[producer, consumer].freed(number, sequence)

    def numbers(self) -> dict[str, float]:
        return self.wire.numbers(self._mine)  # each lane is counted where its producer lives
