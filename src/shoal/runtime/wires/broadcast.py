"""**broadcast**: one -> many, latest wins, versioned.

There are three buffers; version v lies in buffer v modulo 3, and one word of the wire names the newest whole version. So a
value becomes current at a single moment: a publisher that dies earlier leaves the old value, and its successor writes the
same version again. Each buffer also carries its version before and after its data: a reader copies the data and checks both
words; if the publisher came round in the meantime, it reads once more (counted). The version never decreases.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shoal.core import Publisher, Reader, Wait
from shoal.runtime.wires.wire import Port, Wire, int64_words
from shoal.slots import Allocator, Channel, Layout, fence

__all__ = ["BroadcastWire"]

VERSION = 0                                    # the wire's header
BEFORE, AFTER, STAMP = range(3)                # a buffer's header; STAMP is the time in nanoseconds
RETRIES, PULLS = range(2)                      # a reader's line
BUFFERS, HEADER = 3, 64


class BroadcastWire(Wire):
    kind, ends = "broadcast", ("publisher", "reader")

    def __init__(self, name: str, layout: Layout, least_readers: int = 1) -> None:
        super().__init__(name)
        self.layout, self.least_readers = layout, least_readers
        self.begin_above = 0  # of a resumed program: the newest version that the earlier parts have published
        self.channels: list[Channel] = []

    @property
    def publisher(self) -> Port:
        return self.port("publisher")

    @property
    def reader(self) -> Port:
        return self.port("reader")

    def lay_out(self, allocator: Allocator) -> None:
        self.check_ends(publisher=1, reader=self.least_readers)
        readers = self.members("reader")
        self.memory = allocator.memory(HEADER + BUFFERS * (HEADER + self.layout.nbytes) + HEADER * readers)
        self.channels = [allocator.channel(1) for _ in range(readers)]

    def header(self) -> np.ndarray:
        return int64_words(self.array(), 0, 8)

    def buffer(self, number: int) -> tuple[np.ndarray, Any]:
        offset = HEADER + number * (HEADER + self.layout.nbytes)
        return int64_words(self.array(), offset, 8), self.layout.views(self.array(), offset + HEADER)

    def lines(self) -> np.ndarray:
        """[readers, 8]: each reader's own line, in which it counts its pulls and how often it had to read again."""
        readers = self.members("reader")
        start = HEADER + BUFFERS * (HEADER + self.layout.nbytes)
        return int64_words(self.array(), start, 8 * readers).reshape(readers, 8)

    def attach(self, end: str, member: int, incarnation: int) -> Publisher | Reader:
        return BroadcastPublisher(self) if end == "publisher" else BroadcastReader(self, member)

    def numbers(self) -> dict[str, float]:
        if not self._kept:
            self._kept.update(header=self.header(), lines=self.lines())
        lines = self._kept["lines"]
        return {"version": int(self._kept["header"][VERSION]), "retries": int(lines[:, RETRIES].sum()),
                "bytes": self.layout.nbytes, "bytes_moved": int(lines[:, PULLS].sum()) * self.layout.nbytes}


def write_version(header: np.ndarray, buffer: tuple[np.ndarray, Any], layout: Layout, version: int, value: Any,
                  stamp: int | None = None) -> None:
    """Write a value into the buffer of its version, then make it current. It is as old as its stamp says, or new."""
    words, data = buffer
    words[AFTER] = -1  # a reader of the value of three versions ago will notice
    words[BEFORE] = version
    fence()
    layout.copy(data, value)
    words[STAMP] = time.monotonic_ns() if stamp is None else stamp
    fence()
    words[AFTER] = version
    fence()
    header[VERSION] = version  # the moment at which it becomes current


class BroadcastPublisher:
    """The writing end. Several roles may hold one (a role and its successor); only one may use it at a time."""

    def __init__(self, wire: BroadcastWire) -> None:
        self.name, self._layout, self._begin_above = wire.name, wire.layout, wire.begin_above
        self._header, self._channels = wire.header(), wire.channels
        self._buffers = [wire.buffer(number) for number in range(BUFFERS)]

    @property
    def version(self) -> int:
        return max(int(self._header[VERSION]), self._begin_above)

    def publish(self, tree: Any) -> int:
        version = self.version + 1
        write_version(self._header, self._buffers[version % BUFFERS], self._layout, version, tree)
        for channel in self._channels:
            channel.put(version)
        return version


class BroadcastReader:
    """The reading end."""

    def __init__(self, wire: BroadcastWire, member: int) -> None:
        self.name, self._layout = wire.name, wire.layout
        self._header, self._channel = wire.header(), wire.channels[member]
        self._buffers = [wire.buffer(number) for number in range(BUFFERS)]
        self._line = wire.lines()[member]
        self.age_seconds = 0.0  # between publication and the last pull

    @property
    def version(self) -> int:
        """The newest version there is to pull."""
        return int(self._header[VERSION])

    def newer_than(self, version: int) -> Wait:
        def ready() -> bool:
            if self.version > version:
                return True
            self._channel.get()  # forget old wake-ups, so that the next one is noticed ...
            return self.version > version  # ... and look once more: a version may have come in between

        return Wait(ready, self.name, f"{self.name} newer than version {version}", self._channel.fds)

    def pull(self, into: Any) -> int:
        """Copy the newest whole value; returns its version (0: nothing was ever published, nothing is copied)."""
        while version := self.version:
            words, data = self._buffers[version % BUFFERS]
            stamp = int(words[STAMP])
            fence()
            self._layout.copy(into, data)
            fence()
            if int(words[AFTER]) == version and int(words[BEFORE]) == version:
                self.age_seconds = (time.monotonic_ns() - stamp) / 1e9
                self._line[PULLS] += 1
                return version
            self._line[RETRIES] += 1
        return 0
