"""Carries the slots of a stream: the producer's copy keeps each until the consumer has read it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np

from shoal.runtime.ray.ferries.base import Ground
from shoal.runtime.wires.stream import CONSUMED, FREE, FULL, SEQUENCE, STATE, TAKEN, WRITTEN, Lane, Stream, tallied
from shoal.slots import fence

__all__ = ["StreamFerry"]


class Outward:
    """Producer's side of a lane whose consumer is elsewhere. A dropping stream's slots are carried one at a time, so that the
    producer can still take its oldest back."""

    def __init__(self, ferry: StreamFerry, producer: int, consumer: int) -> None:
        self.ferry, self.producer, self.consumer = ferry, producer, consumer
        self.lane = Lane(ferry.wire, producer, consumer)
        self._dropping = ferry.wire.full == "drop_oldest"
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
        self.ferry.carry(self.producer, self.consumer, number, sequence)

    def freed(self, number: int, sequence: int) -> None:
        """The consumer has read a slot."""
        header, words = self.lane.headers[number], self.lane.words
        if header[STATE] != FULL or int(header[SEQUENCE]) != sequence:
            return  # said twice
        words[CONSUMED] = tallied(int(words[CONSUMED]), sequence)
        words[TAKEN] = max(int(words[TAKEN]), sequence)
        fence()
        header[STATE] = FREE
        self.lane.free.put(number)
        with self._lock:
            self._away = None
            self._next()

    def again(self) -> None:
        """Another consumer has taken the place of one that died: it is told of every slot that was not read."""
        with self._lock:
            if self._dropping:
                if self._away is not None:
                    self._carry(*self._away)
                return
        full = [(int(header[SEQUENCE]), number) for number, header in enumerate(self.lane.headers) if header[STATE] == FULL]
        for sequence, number in sorted(full):
            self._carry(number, sequence)


class Inward:
    """Consumer's side of a lane whose producer is elsewhere: slots are the arrived arrays themselves."""

    def __init__(self, ferry: StreamFerry, producer: int, consumer: int) -> None:
        self.ferry, self.producer, self.consumer = ferry, producer, consumer
        self.lane = Lane(ferry.wire, producer, consumer)
        self._born = -1  # the producer's incarnation that was heard last
        self._known: dict[int, int] = {}  # slot -> the newest sequence of that incarnation
        self._owners: dict[int, int] = {}  # slot -> the incarnation whose data it holds
        self._backlog: deque[tuple[int, int, int, Any]] = deque()  # what waits for a slot that still holds a dead one's data
        self._lock = threading.RLock()

    def arrived(self, number: int, sequence: int, incarnation: int, payload: Any) -> None:
        with self._lock:
            if incarnation > self._born:
                self._born, self._known = incarnation, {}
            if incarnation < self._born or sequence <= self._known.get(number, 0):
                return  # late words of a dead producer, or said twice
            self._known[number] = sequence
            self._backlog.append((number, sequence, incarnation, payload))
            self._advance()

    def _advance(self) -> None:
        """Announce what has come, in its order, as far as the slots are free."""
        while self._backlog and self._backlog[0][0] not in self._owners:
            self._install(*self._backlog.popleft())

    def _install(self, number: int, sequence: int, incarnation: int, payload: Any) -> None:
        lane = self.lane
        self._owners[number] = incarnation
        lane.slots[number] = self.ferry.wire.layout.views(payload)
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
                return  # a hint that there never was anything in it
            self.lane.slots[number] = None  # the array goes back to the object store
            sequence = int(self.lane.headers[number][SEQUENCE])
            self.ferry.give_back(self.producer, self.consumer, number, sequence, owner)
            self._advance()

    def pop(self) -> None:
        """Nobody takes a free slot back."""


class StreamFerry:
    def __init__(self, wire: Stream, ground: Ground) -> None:
        self.wire, self.ground = wire, ground
        self.outward: dict[tuple[int, int], Outward] = {}
        self.inward: dict[tuple[int, int], Inward] = {}
        consumers = wire.members("source")
        mine = np.zeros(wire.members("sink") * consumers, bool)
        for producer in range(wire.members("sink")):
            for consumer in range(consumers):
                near = ground.here(wire, "sink", producer), ground.here(wire, "source", consumer)
                mine[producer * consumers + consumer] = near[0]
                if near[0] == near[1] or not wire.joins(producer, consumer):
                    continue
                full, free = wire.channels[producer * consumers + consumer]
                if near[0]:
                    full.far = self.outward[producer, consumer] = Outward(self, producer, consumer)  # type: ignore[attr-defined]
                else:
                    free.far = self.inward[producer, consumer] = Inward(self, producer, consumer)  # type: ignore[attr-defined]
        self._mine = mine
        memory = wire.memory
        assert memory is not None
        self._memory = memory.array()

    def endpoint(self, end: str, member: int, incarnation: int) -> Any:
        endpoint = self.wire.attach(end, member, incarnation)
        if end == "source":
            for lane in endpoint._lanes:
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
        born = self.ground.incarnation(wire, "sink", producer)
        self.ground.send(self.ground.place_of(wire, "source", consumer),
                         (wire.name, "full", producer, consumer, number, sequence, born),
                         self._memory[start : start + wire.layout.nbytes])

    def give_back(self, producer: int, consumer: int, number: int, sequence: int, born: int) -> None:
        self.ground.send(self.ground.place_of(self.wire, "sink", producer),
                         (self.wire.name, "free", producer, consumer, number, sequence, born))

    def receive(self, kind: str, numbers: tuple[Any, ...], payload: Any) -> None:
        producer, consumer, number, sequence, born = numbers
        if kind == "full":
            self.inward[producer, consumer].arrived(number, sequence, born, payload)
        elif born == self.ground.incarnation(self.wire, "sink", producer):
            self.outward[producer, consumer].freed(number, sequence)

    def numbers(self) -> dict[str, float]:
        return self.wire.numbers(self._mine)  # each lane is counted where its producer lives
