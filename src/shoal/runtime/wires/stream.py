"""**stream**: many -> few, bounded. Fixed slots in memory, written in place; only slot numbers travel.

    producer p --- lane (p, c): `depth` slots, a channel of full ones ->, a channel of free ones <- --- consumer c

A lane has one producer and one consumer, so every transition of a slot's state has exactly one writer:

    FREE --producer--> WRITING --producer--> FULL --consumer--> READING --consumer--> FREE

The states in the headers are the truth; what travels through a channel is a hint that is checked against them. So
whoever is killed can be replaced (after it has been reaped) by a successor that reads the headers:
  * a producer's successor takes back its WRITING slots: a half-written slot was never announced;
  * a consumer's successor takes up what was READING or FULL: nothing announced is lost, nothing is read torn.
With full="drop_oldest" the producer takes its own oldest number back out of the channel: reading a pipe is atomic,
so either it or the consumer has the slot, never both. A number that died with a consumer leaves a FULL slot older
than the last one taken: the producer takes that back too, and counts it as dropped.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from shoal.core import Wait
from shoal.errors import ProgramError
from shoal.runtime.wires.base import Wire, int64_words
from shoal.slots import Channel, Layout, Medium

__all__ = ["Stream"]

FREE, WRITING, FULL, READING = range(4)
OWNER, INCARNATION, SEQUENCE, STATE = range(4)                       # a slot's header
WRITTEN, DROPPED, CONSUMED, TORN, TAKEN, LIVE = range(6)             # a lane's header
HEADER = 64


class Lane:
    """The memory of one (producer, consumer) pair, seen from either side."""

    def __init__(self, stream: Stream, producer: int, consumer: int) -> None:
        number = producer * stream.members("source") + consumer
        offset = number * stream.lane_bytes
        assert stream.memory is not None
        memory = stream.memory.array()
        self.producer = producer
        self.words = int64_words(memory, offset, 8)
        self.headers = [int64_words(memory, offset + HEADER * (1 + k), 8) for k in range(stream.depth)]
        data = offset + HEADER * (1 + stream.depth)
        self.slots = [stream.layout.views(memory, data + k * stream.layout.nbytes) for k in range(stream.depth)]
        self.full, self.free = stream.channels[number]


class Stream(Wire):
    kind, ends = "stream", ("sink", "source")

    def __init__(self, name: str, layout: Layout, depth: int = 2, full: str = "block") -> None:
        super().__init__(name)
        if full not in ("block", "drop_oldest"):
            raise ProgramError(f"stream {name}: full is 'block' or 'drop_oldest', not {full!r}")
        if depth < (2 if full == "drop_oldest" else 1):
            raise ProgramError(f"stream {name}: depth {depth} is too small; one slot is read while another is written")
        self.layout, self.depth, self.full = layout, depth, full
        self.lane_bytes = HEADER * (1 + depth) + depth * layout.nbytes
        self.channels: list[tuple[Channel, Channel]] = []

    @property
    def sink(self) -> Any:
        return self.port("sink")

    @property
    def source(self) -> Any:
        return self.port("source")

    def build(self, medium: Medium) -> None:
        self.check_ends(sink=1, source=1)
        lanes = self.members("sink") * self.members("source")
        self.memory = medium.memory(lanes * self.lane_bytes)
        self.channels = [(medium.channel(self.depth), medium.channel(self.depth)) for _ in range(lanes)]

    def lanes(self) -> list[Lane]:
        return [Lane(self, p, c) for p in range(self.members("sink")) for c in range(self.members("source"))]

    def attach(self, end: str, member: int, incarnation: int) -> Sink | Source:
        if end == "sink":
            return Sink(self, [Lane(self, member, c) for c in range(self.members("source"))], incarnation)
        return Source(self, [Lane(self, p, member) for p in range(self.members("sink"))])

    def membership(self, end: str, member: int, alive: bool) -> None:
        if end == "sink":
            for consumer in range(self.members("source")):
                lane = Lane(self, member, consumer)
                lane.words[LIVE] = alive
                lane.full.put(-1)  # a barrier that waits for this producer looks again

    def numbers(self) -> dict[str, float]:
        lanes = self.lanes()
        words = np.sum([lane.words for lane in lanes], axis=0)
        states = [int(header[STATE]) for lane in lanes for header in lane.headers]
        return {"slots": len(states), "occupied": sum(s in (FULL, READING) for s in states), "written": int(words[WRITTEN]),
                "dropped": int(words[DROPPED]), "consumed": int(words[CONSUMED]), "torn": int(words[TORN]),
                "slot_bytes": self.layout.nbytes}

    def conserved(self) -> bool:
        """written = consumed + dropped + held, lane by lane. Each word has one writer and is written just before or
        after its slot's state, so a reader in between may be off by one slot, for a moment, in either direction."""
        for lane in self.lanes():
            held = sum(int(header[STATE]) in (FULL, READING) for header in lane.headers)
            if abs(int(lane.words[WRITTEN] - lane.words[CONSUMED] - lane.words[DROPPED]) - held) > 2:
                return False
        return True


class Slot:
    """One slot in the producer's hands."""

    def __init__(self, sink: Sink, lane: Lane, number: int) -> None:
        self.data = lane.slots[number]
        self._sink, self._lane, self._number = sink, lane, number

    def send(self) -> None:
        self._sink._send(self._lane, self._number)


class Sink:
    """The producing end."""

    def __init__(self, stream: Stream, lanes: list[Lane], incarnation: int) -> None:
        self.name, self._drop, self._lanes = stream.name, stream.full == "drop_oldest", lanes
        self._free: list[deque[int]] = [deque() for _ in lanes]
        self._turn = lanes[0].producer % len(lanes)  # producers begin with different consumers
        self._sequence = 0
        self._fds = [fd for lane in lanes for fd in lane.free.fds]
        for lane, free in zip(lanes, self._free, strict=True):
            for number, header in enumerate(lane.headers):
                header[OWNER], header[INCARNATION] = lane.producer, incarnation
                self._sequence = max(self._sequence, int(header[SEQUENCE]))
                if header[STATE] == WRITING:
                    lane.words[TORN] += 1
                    header[STATE] = FREE
                if header[STATE] == FREE:
                    free.append(number)
        self._wait = Wait(self._collect, self.name, f"a free slot of {self.name}", self._fds)

    def _collect(self) -> bool:
        """Take up the numbers that consumers gave back; true when some slot is free."""
        for lane, free in zip(self._lanes, self._free, strict=True):
            for number, _ in lane.free.get():
                # A number may come twice after a restart; the header and our own list decide.
                if lane.headers[number][STATE] == FREE and number not in free:
                    free.append(number)
        if self._drop and not any(self._free):
            self._drop_oldest()
        return any(self._free)

    def _drop_oldest(self) -> None:
        lane = self._lanes[self._turn]
        while (token := lane.full.pop()) is not None and token[0] < 0:
            pass
        if token is not None:
            self._reclaim(lane, token[0])
            return
        for number, header in enumerate(lane.headers):
            # Numbers are taken in order: one older than the last taken, still FULL, died with its consumer.
            if header[STATE] == FULL and header[SEQUENCE] < lane.words[TAKEN]:
                self._reclaim(lane, number)

    def _reclaim(self, lane: Lane, number: int) -> None:
        lane.words[DROPPED] += 1
        lane.headers[number][STATE] = FREE
        self._free[self._lanes.index(lane)].append(number)

    async def slot(self) -> Slot:
        """A slot to write into: free ones of the next consumer first, then of any."""
        await self._wait
        for _ in self._lanes:
            lane, free = self._lanes[self._turn], self._free[self._turn]
            self._turn = (self._turn + 1) % len(self._lanes)
            if free:
                number = free.popleft()
                lane.headers[number][STATE] = WRITING
                return Slot(self, lane, number)
        raise AssertionError("a wait ended without its reason")

    def _send(self, lane: Lane, number: int) -> None:
        self._sequence += 1
        header = lane.headers[number]
        header[SEQUENCE] = self._sequence
        lane.words[WRITTEN] += 1
        header[STATE] = FULL
        lane.full.put(number, self._sequence)


class Source:
    """The consuming end."""

    STAGES = 3

    def __init__(self, stream: Stream, lanes: list[Lane]) -> None:
        self.name, self._layout, self._lanes = stream.name, stream.layout, lanes
        # A blocking stream's numbers are collected ahead; a dropping one's stay in the channel until the moment they
        # are read, so that the producer can still take its oldest back.
        self._ahead = stream.full == "block"
        self._ready: list[deque[tuple[int, int]]] = [deque() for _ in lanes]  # per lane: (slot, sequence)
        self._turn = 0
        self._stages: dict[int, list[Any]] = {}
        self._stage_turn = 0
        self._fds = [fd for lane in lanes for fd in lane.full.fds]
        self.last_members: list[int] = []  # the producers of the last batch, in its order
        for lane, ready in zip(lanes, self._ready, strict=True):
            mine = (READING, FULL) if self._ahead else (READING,)
            found = [(k, int(header[SEQUENCE])) for k, header in enumerate(lane.headers) if header[STATE] in mine]
            ready.extend(sorted(found, key=lambda pair: pair[1]))

    def _look(self) -> list[bool]:
        """Which lanes have a slot to read."""
        if not self._ahead:
            return [bool(ready) or lane.full.waiting() for lane, ready in zip(self._lanes, self._ready, strict=True)]
        for lane, ready in zip(self._lanes, self._ready, strict=True):
            for number, sequence in lane.full.get():
                if self._announced(lane, number, sequence) and (number, sequence) not in ready:
                    ready.append((number, sequence))
        return [bool(ready) for ready in self._ready]

    @staticmethod
    def _announced(lane: Lane, number: int, sequence: int) -> bool:
        """Whether a number from the channel still says the truth (after a restart one may come twice)."""
        return number >= 0 and lane.headers[number][STATE] == FULL and int(lane.headers[number][SEQUENCE]) == sequence

    def _each(self) -> bool:
        full = self._look()
        needed = [ready for lane, ready in zip(self._lanes, full, strict=True) if lane.words[LIVE] or ready]
        return bool(needed) and all(needed)

    def _stage(self, count: int) -> Any:
        """One of three staging buffers in turn, so that two earlier batches stay valid."""
        stages = self._stages.setdefault(count, [])
        if len(stages) < self.STAGES:
            stages.append(self._layout.joined(count).empty())
            return stages[-1]
        self._stage_turn = (self._stage_turn + 1) % self.STAGES
        return stages[self._stage_turn]

    def _gather(self, lane_number: int, stage: Any, position: int) -> bool:
        lane, ready = self._lanes[lane_number], self._ready[lane_number]
        if ready:
            number, sequence = ready.popleft()
        elif (token := lane.full.pop()) is not None and self._announced(lane, *token):
            number, sequence = token
        else:
            return False
        header = lane.headers[number]
        header[STATE] = READING
        lane.words[TAKEN] = sequence
        self._layout.gather(stage, position, lane.slots[number])
        lane.words[CONSUMED] += 1
        header[STATE] = FREE
        lane.free.put(number)
        return True

    async def take(self, count: int) -> Any:
        """`count` slots, first ready first served, side by side; each is freed as soon as it is copied."""
        stage = self._stage(count)
        wait = Wait(lambda: any(self._look()), self.name, f"{count} full slots of {self.name}", self._fds)
        members: list[int] = []
        while len(members) < count:
            await wait
            for step in range(len(self._lanes)):
                lane_number = (self._turn + step) % len(self._lanes)
                if self._gather(lane_number, stage, len(members)):
                    members.append(lane_number)
                    self._turn = (lane_number + 1) % len(self._lanes)
                    break
        self.last_members = members
        return stage

    async def take_each(self) -> Any:
        """One slot from every living producer, in the order of the producers: a barrier that goes on without the dead."""
        await Wait(self._each, self.name, f"a full slot of {self.name} from every producer", self._fds)
        members = [number for number, ready in enumerate(self._ready) if ready]
        stage = self._stage(len(members))
        for position, lane_number in enumerate(members):
            self._gather(lane_number, stage, position)
        self.last_members = members
        return stage
