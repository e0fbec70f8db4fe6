"""The memory of a stream: a lane for each pair of a producer and a consumer, and the supervisor's view of all lanes.

    header of the lane | headers of its slots | slot 0 | slot 1 | ...

A slot's header holds its state and its sequence number, a lane's header the counts of both ends; no word has two writers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from shoal.runtime.wires.wire import int64_words

if TYPE_CHECKING:
    from shoal.runtime.wires.stream import StreamWire

__all__ = ["CONSUMED", "DROPPED", "FREE", "FULL", "HEADER", "INCARNATION", "OWNER", "READING", "SEQUENCE", "SINK_LIVE",
           "SOURCE_HERE", "SOURCE_LIVE", "STATE", "TAKEN", "TORN", "WRITING", "WRITTEN", "Lane", "LaneTable", "holds", "tallied"]

FREE, WRITING, FULL, READING = range(4)
OWNER, INCARNATION, SEQUENCE, STATE = range(4)                       # a slot's header
# A lane's header: the first three words are the producer's, the next two the consumer's, the rest the supervisor's.
WRITTEN, DROPPED, TORN, CONSUMED, TAKEN, SINK_LIVE, SOURCE_LIVE, SOURCE_HERE = range(8)
HEADER = 64
DOUBT_SECONDS = 2.0
SEQUENCE_BITS = 24
LAST = (1 << SEQUENCE_BITS) - 1


def tallied(word: int, sequence: int) -> int:
    """A count and the sequence number that was counted last, in one word: so a successor never counts a slot twice."""
    if holds(word, sequence):
        return word
    return ((word >> SEQUENCE_BITS) + 1) << SEQUENCE_BITS | sequence & LAST


def holds(word: int, sequence: int) -> bool:
    """Whether this sequence number is the one that was counted last."""
    return bool(word) and word & LAST == sequence & LAST


class Lane:
    """The memory of one (producer, consumer) pair, seen from either side."""

    def __init__(self, stream: StreamWire, producer: int, consumer: int) -> None:
        number = producer * stream.members("source") + consumer
        offset = number * stream.lane_bytes
        memory = stream.array()
        self.producer = producer
        self.words = int64_words(memory, offset, 8)
        self.headers = [int64_words(memory, offset + HEADER * (1 + k), 8) for k in range(stream.depth)]
        self.slots = [stream.layout.views(memory, stream.slot_offset(producer, consumer, k)) for k in range(stream.depth)]
        self.full, self.free = stream.channels[number]


class LaneTable:
    """The supervisor's view of all lanes: all words at once, without an object per slot."""

    def __init__(self, stream: StreamWire) -> None:
        sinks, sources = stream.members("sink"), stream.members("source")
        words = stream.array().view(np.int64).reshape(sinks * sources, stream.lane_bytes // 8)
        self.words = words[:, :8]
        self.states = words[:, 8 + STATE : 8 * (1 + stream.depth) : 8]  # [lanes, depth]
        self.lanes = self.words.reshape(sinks, sources, 8)
        self._since = np.full(len(words), np.inf)

    def counts(self) -> np.ndarray:
        """[lanes, 8], the tallies unpacked."""
        words = self.words.copy()
        words[:, [DROPPED, CONSUMED]] >>= SEQUENCE_BITS
        return words

    def held(self) -> np.ndarray:
        """[lanes], the slots that are FULL or READING."""
        held: np.ndarray = (self.states >= FULL).sum(1)
        return held

    def balance(self) -> bool:
        """Whether written = consumed + dropped + held in each lane whose two ends live (a successor mends its own words).

        A slot's state and its count are written one after the other, and we may read between the two: a difference is a fault
        only if it lasts for two seconds.
        """
        before = self.counts()
        held = self.held()
        steady = (before == self.counts()).all(1)
        gap = before[:, WRITTEN] - before[:, CONSUMED] - before[:, DROPPED] - held
        alive = (before[:, SINK_LIVE] != 0) & (before[:, SOURCE_LIVE] != 0)
        now = time.monotonic()
        self._since[~alive | (steady & (gap == 0))] = np.inf
        doubted = alive & steady & (gap != 0)
        self._since[doubted] = np.minimum(self._since[doubted], now)
        return not bool((now - self._since[doubted] > DOUBT_SECONDS).any())
