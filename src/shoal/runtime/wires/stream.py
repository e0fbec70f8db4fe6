"""**stream**: many -> few, bounded. Fixed slots in memory, written in place; only slot numbers travel.

    producer p --- lane (p, c): `depth` slots, a channel of full ones ->, a channel of free ones <- --- consumer c

A lane has one producer and one consumer, so every transition of a slot's state has exactly one writer:

    FREE --producer--> WRITING --producer--> FULL --consumer--> READING --consumer--> FREE

The states in the headers are the truth; what travels through a channel is a hint that is checked against them. So a role
that is killed, between any two instructions, can be replaced (after it has been reaped) by a successor that reads the
headers:
  * a producer's successor takes back its WRITING slots (a half-written slot was never announced) and announces its
    FULL ones again (the number may have died with its predecessor);
  * a consumer's successor takes up what was READING or FULL, and gives the FREE ones back again.
With full="drop_oldest" the producer takes its own oldest number back out of the channel: reading a pipe is atomic, so either
the producer or the consumer has the slot, never both. So nothing is announced twice there: a number that died with its
holder leaves a FULL slot older than the last one taken, which the producer takes back and counts as dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.core import DirectCopy, Source, StreamEnd, Wait
from shoal.errors import ProgramError, WireError
from shoal.runtime.wires.lanes import (
    CONSUMED,
    DROPPED,
    FREE,
    FULL,
    HEADER,
    INCARNATION,
    OWNER,
    READING,
    SEQUENCE,
    SINK_LIVE,
    SOURCE_HERE,
    SOURCE_LIVE,
    STATE,
    TAKEN,
    TORN,
    WRITING,
    WRITTEN,
    Lane,
    LaneTable,
    holds,
    tallied,
)
from shoal.runtime.wires.wire import Port, Wire
from shoal.slots import Allocator, Channel, Layout, fence, leaves

__all__ = ["StreamWire"]


class StreamWire(Wire):
    kind, ends = "stream", ("sink", "source")

    def __init__(self, name: str, layout: Layout, depth: int = 2, full: str = "block", paired: bool = False) -> None:
        """`paired`: producer p serves consumer p modulo their number, and no other one."""
        super().__init__(name)
        if full not in ("block", "drop_oldest"):
            raise ProgramError(f"stream {name}: full is 'block' or 'drop_oldest', not {full!r}")
        if depth < (2 if full == "drop_oldest" else 1):
            raise ProgramError(f"stream {name}: depth {depth} is too small; one slot is read while another is written")
        for path, field in leaves(layout.fields):
            if not field.shape:
                raise ProgramError(f"stream {name}: {'/'.join(path)} is a scalar, but slots are joined along an axis; "
                                   "give it the shape (1,)")
        self.layout, self.depth, self.full, self.paired = layout, depth, full, paired
        self.lane_bytes = HEADER * (1 + depth) + depth * layout.nbytes
        self.channels: list[tuple[Channel, Channel]] = []

    @property
    def sink(self) -> Port:
        return self.port("sink")

    @property
    def source(self) -> Port:
        return self.port("source")

    def lay_out(self, allocator: Allocator) -> None:
        self.check_ends(sink=1, source=1)
        if self.paired and self.members("sink") < self.members("source"):
            raise ProgramError(f"stream {self.name}: {self.members('sink')} producers cannot serve {self.members('source')} "
                               "consumers in pairs; use at least as many producers as consumers")
        lanes = self.members("sink") * self.members("source")
        self.memory = allocator.memory(lanes * self.lane_bytes)
        self.channels = [(allocator.channel(2 * self.depth), allocator.channel(2 * self.depth)) for _ in range(lanes)]

    def attach(self, end: str, member: int, incarnation: int) -> StreamEnd | Source:
        if end == "sink":
            consumers = [c for c in range(self.members("source")) if self.joins(member, c)]
            return StreamSink(self, [Lane(self, member, c) for c in consumers], incarnation)
        producers = [p for p in range(self.members("sink")) if self.joins(p, member)]
        return StreamSource(self, [Lane(self, p, member) for p in producers])

    def joins(self, producer: int, consumer: int) -> bool:
        return not self.paired or producer % self.members("source") == consumer

    def slot_offset(self, producer: int, consumer: int, number: int) -> int:
        """Where a slot's data lie in memory."""
        lane = (producer * self.members("source") + consumer) * self.lane_bytes
        return lane + HEADER * (1 + self.depth) + number * self.layout.nbytes

    # ------------------------------------------------------------------ the supervisor's
    def table(self) -> LaneTable:
        if not self._kept:
            self._kept["table"] = LaneTable(self)
        table: LaneTable = self._kept["table"]
        return table

    def enlist(self, end: str, member: int, here: bool) -> None:
        """Producers serve only consumers that the graph has; what was announced to one that left waits for its return."""
        if end == "source":
            self.table().lanes[:, member, SOURCE_HERE] = here
            for _, free in self.channels[member :: self.members("source")]:
                free.put(-1)  # a producer that waits for a free slot looks again

    def membership(self, end: str, member: int, alive: bool) -> None:
        consumers = self.members("source")
        if end == "source":
            self.table().lanes[:, member, SOURCE_LIVE] = alive
            return
        self.table().lanes[member, :, SINK_LIVE] = alive
        for full, _ in self.channels[member * consumers : (member + 1) * consumers]:
            full.put(-1)  # a barrier that waits for this producer looks again

    def numbers(self, lanes: np.ndarray | slice = slice(None)) -> dict[str, float]:
        """The numbers of all lanes, or of some."""
        table = self.table()
        words = table.counts()[lanes].sum(0)
        return {"slots": table.states.size, "occupied": int(table.held()[lanes].sum()), "written": int(words[WRITTEN]),
                "dropped": int(words[DROPPED]), "consumed": int(words[CONSUMED]), "torn": int(words[TORN]),
                "slot_bytes": self.layout.nbytes, "bytes_moved": int(words[WRITTEN]) * self.layout.nbytes}

    def conserved(self) -> bool:
        return self.table().balance()


class StreamSlot:
    """One slot in the producer's hands."""

    def __init__(self, sink: StreamSink, lane: Lane, number: int) -> None:
        self.data = lane.slots[number]
        self._sink, self._lane, self._number = sink, lane, number

    def send(self) -> None:
        self._sink._send(self._lane, self._number)


class StreamSink:
    """The producing end."""

    def __init__(self, stream: StreamWire, lanes: list[Lane], incarnation: int) -> None:
        self.name, self._drop, self._lanes = stream.name, stream.full == "drop_oldest", lanes
        self._free: list[deque[int]] = [deque() for _ in lanes]
        self._turn = lanes[0].producer % len(lanes)  # producers begin with different consumers
        for lane, free in zip(lanes, self._free, strict=True):
            self._recover(lane, free, incarnation)
        fds = [fd for lane in lanes for fd in lane.free.fds]
        self._wait = Wait(self._collect, self.name, f"a free slot of {self.name}", fds)

    def _recover(self, lane: Lane, free: deque[int], incarnation: int) -> None:
        """Take over a lane as a predecessor left it (or as it was created: all zero, all FREE)."""
        for header in lane.headers:
            header[OWNER], header[INCARNATION] = lane.producer, incarnation
            if header[STATE] == WRITING:
                lane.words[TORN] += 1
                header[SEQUENCE] = 0  # it was never sent
                header[STATE] = FREE
            elif header[STATE] == FULL and holds(int(lane.words[DROPPED]), int(header[SEQUENCE])):
                header[STATE] = FREE  # dropped and counted, but not yet freed
        # The newest slot sent still carries its sequence, even where the count died with the predecessor.
        lane.words[WRITTEN] = max(int(lane.words[WRITTEN]), *(int(header[SEQUENCE]) for header in lane.headers))
        for number, header in enumerate(lane.headers):
            if header[STATE] == FREE:
                free.append(number)
            elif header[STATE] == FULL and not self._drop:
                lane.full.put(number, int(header[SEQUENCE]))

    def _here(self) -> list[int]:
        """The lanes whose consumers the graph has now; all of them while it has none."""
        return [k for k, lane in enumerate(self._lanes) if lane.words[SOURCE_HERE]] or list(range(len(self._lanes)))

    def _collect(self) -> bool:
        """Take the numbers that consumers gave back; true when there is a slot to write into."""
        for lane, free in zip(self._lanes, self._free, strict=True):
            for number, _ in lane.free.get():
                # A number may come twice after a restart; the header and our own list decide.
                if number >= 0 and lane.headers[number][STATE] == FREE and number not in free:
                    free.append(number)
        here = self._here()
        if self._drop and not any(self._free[k] for k in here):
            self._drop_oldest(here)
        return any(self._free[k] for k in here)

    def _drop_oldest(self, here: list[int]) -> None:
        for k in sorted(here, key=lambda k: (k - self._turn) % len(self._lanes)):
            lane = self._lanes[k]
            for number, header in enumerate(lane.headers):
                # Numbers are taken in order: one older than the last taken, still FULL, died with its holder.
                if header[STATE] == FULL and header[SEQUENCE] < lane.words[TAKEN]:
                    self._reclaim(k, number)
                    return
            while (token := lane.full.pop()) is not None:
                if token[0] >= 0:
                    self._reclaim(k, token[0])
                    return

    def _reclaim(self, lane_number: int, number: int) -> None:
        lane = self._lanes[lane_number]
        lane.words[DROPPED] = tallied(int(lane.words[DROPPED]), int(lane.headers[number][SEQUENCE]))
        lane.headers[number][STATE] = FREE
        self._free[lane_number].append(number)

    def free(self) -> Wait:
        return self._wait

    async def slot(self) -> StreamSlot:
        """A slot to write into: a free one of the next consumer, or of the one after it."""
        await self._wait
        here = self._here()
        k = min((k for k in here if self._free[k]), key=lambda k: (k - self._turn) % len(self._lanes))
        self._turn = (k + 1) % len(self._lanes)
        number = self._free[k].popleft()
        self._lanes[k].headers[number][STATE] = WRITING
        return StreamSlot(self, self._lanes[k], number)

    def _send(self, lane: Lane, number: int) -> None:
        header = lane.headers[number]
        if header[STATE] != WRITING:
            raise WireError(f"{self.name}: a slot is sent once; ask for the next one with slot()")
        sequence = int(lane.words[WRITTEN]) + 1
        header[SEQUENCE] = sequence
        fence()
        header[STATE] = FULL
        lane.words[WRITTEN] = sequence
        lane.full.put(number, sequence)


class StreamSource:
    """The consuming end."""

    STAGES = 3

    def __init__(self, stream: StreamWire, lanes: list[Lane]) -> None:
        self.name, self._layout, self.lanes = stream.name, stream.layout, lanes
        # Numbers of a blocking stream are collected ahead; those of a dropping one stay in the channel until they are read, so
        # that the producer can still take its oldest back.
        self._ahead = stream.full == "block"
        self._ready: list[deque[tuple[int, int]]] = [deque() for _ in lanes]  # per lane: (slot, sequence)
        self._turn = 0
        self._stages: dict[int, deque[Any]] = {}
        self._lent: list[tuple[Lane, int, int]] = []  # slots that are being copied
        self._fds = [fd for lane in lanes for fd in lane.full.fds]
        self.last_members: list[int] = []  # the producers of the last batch, in its order
        self.direct: DirectCopy | None = None
        for lane, ready in zip(lanes, self._ready, strict=True):
            mine = (READING, FULL) if self._ahead else (READING,)
            found = [(k, int(header[SEQUENCE])) for k, header in enumerate(lane.headers) if header[STATE] in mine]
            ready.extend(sorted(found, key=lambda pair: pair[1]))
            for number, header in enumerate(lane.headers):
                if header[STATE] == FREE:
                    lane.free.put(number)  # the number may have died with a predecessor
        fence()

    def _look(self) -> list[bool]:
        """Which lanes have (or, of a dropping stream, seem to have) a slot to read."""
        if not self._ahead:
            return [bool(ready) or lane.full.waiting() for lane, ready in zip(self.lanes, self._ready, strict=True)]
        for lane, ready in zip(self.lanes, self._ready, strict=True):
            for number, sequence in lane.full.get():
                if self._announced(lane, number, sequence) and (number, sequence) not in ready:
                    ready.append((number, sequence))
        return [bool(ready) for ready in self._ready]

    @staticmethod
    def _announced(lane: Lane, number: int, sequence: int) -> bool:
        """Whether a number from the channel is still true (after a restart one may come twice)."""
        return number >= 0 and lane.headers[number][STATE] == FULL and int(lane.headers[number][SEQUENCE]) == sequence

    def _claim(self, lane_number: int) -> bool:
        """Have the next slot of a lane ready; false when the channel held no true number."""
        lane, ready = self.lanes[lane_number], self._ready[lane_number]
        while not self._ahead and not ready and (token := lane.full.pop()) is not None:
            if self._announced(lane, *token):
                ready.append(token)
        return bool(ready)

    def _any(self) -> bool:
        return any(self._ready) or any(self._look())

    def _each(self) -> bool:
        """Whether every living producer has a slot (and a dead one may have left one)."""
        look = self._look()
        needed = [k for k, lane in enumerate(self.lanes) if lane.words[SINK_LIVE] or look[k]]
        if not needed or not all(look[k] for k in needed):
            return False
        claimed = [self._claim(k) for k in needed]  # all of them: looking uses up a number that is not true
        return any(claimed) and all(c or not self.lanes[k].words[SINK_LIVE] for k, c in zip(needed, claimed, strict=True))

    def _stage(self, count: int) -> Any:
        """The next of three staging buffers: two earlier batches stay valid."""
        if self.direct is not None:
            self.direct.begin(count)
        stages = self._stages.setdefault(count, deque())
        if len(stages) < self.STAGES:
            stages.append(self._layout.joined(count).empty())
        else:
            stages.rotate(-1)
        return stages[-1]

    def _gather(self, lane_number: int, stage: Any, position: int) -> None:
        lane = self.lanes[lane_number]
        number, sequence = self._ready[lane_number].popleft()
        header = lane.headers[number]
        header[STATE] = READING
        lane.words[TAKEN] = sequence
        if self.direct is None:
            self._layout.gather(stage, position, lane.slots[number])
            self._release(lane, number, sequence)
        else:
            self._layout.gather(stage, position, lane.slots[number], self.direct.fields)
            self.direct.copy(position, lane.slots[number])
            self._lent.append((lane, number, sequence))

    @staticmethod
    def _release(lane: Lane, number: int, sequence: int) -> None:
        fence()
        lane.words[CONSUMED] = tallied(int(lane.words[CONSUMED]), sequence)
        lane.headers[number][STATE] = FREE
        lane.free.put(number)

    def _discard(self, outlived: Callable[[Any], bool]) -> None:
        self._look()
        for lane_number, (lane, ready) in enumerate(zip(self.lanes, self._ready, strict=True)):
            while self._claim(lane_number) and outlived(lane.slots[ready[0][0]]):
                number, sequence = ready.popleft()
                lane.headers[number][STATE] = READING
                lane.words[TAKEN] = sequence
                self._release(lane, number, sequence)

    def _settle(self) -> None:
        """Wait for copies that are under way, then give their slots back in the order they were taken."""
        if self._lent and self.direct is not None:
            self.direct.wait()
            for lent in self._lent:
                self._release(*lent)
            self._lent.clear()

    def waiting(self, count: int) -> bool:
        """Whether `take(count)` would not have to wait."""
        self._look()
        return sum(len(ready) for ready in self._ready) >= count > 0

    async def take(self, count: int) -> Any:
        """`count` slots side by side, from the lanes in turns; each slot is freed as soon as it is copied."""
        if count < 1:
            raise WireError(f"{self.name}: take at least 1 slot, not {count}")
        self._settle()
        stage = self._stage(count)
        wait = Wait(self._any, self.name, f"{count} full slots of {self.name}", self._fds)
        members: list[int] = []
        if self._ahead:
            self._look()  # even if something is ready: otherwise a lane that has much is emptied before the others' turn
        while len(members) < count:
            if self._lent and not self._any():
                self._settle()  # otherwise no producer could fill the slots that are still missing
            await wait
            for step in range(len(self.lanes)):
                lane_number = (self._turn + step) % len(self.lanes)
                if self._claim(lane_number):
                    self._gather(lane_number, stage, len(members))
                    members.append(lane_number)
                    self._turn = (lane_number + 1) % len(self.lanes)
                    break
        self.last_members = [self.lanes[k].producer for k in members]
        return stage if self.direct is None else {**stage, **self.direct.finish()}

    async def take_each(self, outlived: Callable[[Any], bool] | None = None) -> Any:
        """One slot from every living producer, in the order of the producers: a barrier that continues without the dead.

        A slot for which `outlived` is true is given back unread and counted as consumed: a producer's successor may have sent one
        too many.
        """
        self._settle()

        def ready() -> bool:
            if outlived is not None:
                self._discard(outlived)
            return self._each()

        await Wait(ready, self.name, f"a full slot of {self.name} from every producer", self._fds)
        members = [number for number, ready in enumerate(self._ready) if ready]
        stage = self._stage(len(members))
        for position, lane_number in enumerate(members):
            self._gather(lane_number, stage, position)
        self.last_members = [self.lanes[k].producer for k in members]
        return stage if self.direct is None else {**stage, **self.direct.finish()}
