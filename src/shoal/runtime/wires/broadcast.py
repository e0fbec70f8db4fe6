"""**broadcast**: one -> many, latest wins, versioned.

Three buffers, each with a version written before and after its data; `current` names the newest whole one. A reader
copies into its private memory and checks both versions again: if the publisher came round in the meantime it reads
once more (counted). A publisher that dies half-way leaves the old buffer current. The version lives in the wire and
never decreases, whoever publishes.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shoal.core import Wait
from shoal.runtime.wires.base import Wire, int64_words
from shoal.slots import Channel, Layout, Medium

__all__ = ["Broadcast"]

CURRENT, VERSION = range(2)                    # the wire's header
BEFORE, AFTER, STAMP = range(3)                # a buffer's header; STAMP is the time in nanoseconds
BUFFERS, HEADER = 3, 64


class Broadcast(Wire):
    kind, ends = "broadcast", ("publisher", "reader")

    def __init__(self, name: str, layout: Layout) -> None:
        super().__init__(name)
        self.layout = layout
        self.channels: list[Channel] = []

    @property
    def publisher(self) -> Any:
        return self.port("publisher")

    @property
    def reader(self) -> Any:
        return self.port("reader")

    def build(self, medium: Medium) -> None:
        self.check_ends(publisher=1, reader=1)
        readers = self.members("reader")
        self.memory = medium.memory(HEADER + BUFFERS * (HEADER + self.layout.nbytes) + HEADER * readers)
        self.channels = [medium.channel(1) for _ in range(readers)]

    def header(self) -> np.ndarray:
        assert self.memory is not None
        return int64_words(self.memory.array(), 0, 8)

    def buffer(self, number: int) -> tuple[np.ndarray, Any]:
        assert self.memory is not None
        offset = HEADER + number * (HEADER + self.layout.nbytes)
        return int64_words(self.memory.array(), offset, 8), self.layout.views(self.memory.array(), offset + HEADER)

    def retries(self, member: int) -> np.ndarray:
        """A reader's own word: how often it had to read again."""
        assert self.memory is not None
        return int64_words(self.memory.array(), HEADER + BUFFERS * (HEADER + self.layout.nbytes) + HEADER * member, 1)

    def attach(self, end: str, member: int, incarnation: int) -> Publisher | Reader:
        return Publisher(self) if end == "publisher" else Reader(self, member)

    def numbers(self) -> dict[str, float]:
        retries = sum(int(self.retries(member)[0]) for member in range(self.members("reader")))
        return {"version": int(self.header()[VERSION]), "retries": retries, "bytes": self.layout.nbytes}


class Publisher:
    """The writing end. Several roles may hold one (a learner and its successor); only one may use it at a time."""

    def __init__(self, wire: Broadcast) -> None:
        self.name, self._layout = wire.name, wire.layout
        self._header, self._channels = wire.header(), wire.channels
        self._buffers = [wire.buffer(number) for number in range(BUFFERS)]

    @property
    def version(self) -> int:
        return int(self._header[VERSION])

    def publish(self, tree: Any) -> int:
        number = (int(self._header[CURRENT]) + 1) % BUFFERS
        version = self.version + 1
        words, data = self._buffers[number]
        words[AFTER] = -1
        words[BEFORE] = version
        self._layout.copy(data, tree)
        words[STAMP] = time.monotonic_ns()
        words[AFTER] = version
        self._header[CURRENT] = number
        self._header[VERSION] = version
        for channel in self._channels:
            channel.put(version)
        return version


class Reader:
    """The reading end."""

    def __init__(self, wire: Broadcast, member: int) -> None:
        self.name, self._layout = wire.name, wire.layout
        self._header, self._channel = wire.header(), wire.channels[member]
        self._buffers = [wire.buffer(number) for number in range(BUFFERS)]
        self._retries = wire.retries(member)
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
            return self.version > version  # ... and look once more: it may have come in between

        return Wait(ready, self.name, f"{self.name} newer than version {version}", self._channel.fds)

    def pull(self, into: Any) -> int:
        """Copy the newest whole value; returns its version (0: nothing was ever published, nothing is copied)."""
        while True:
            if self.version == 0:
                return 0
            words, data = self._buffers[int(self._header[CURRENT])]
            version = int(words[AFTER])
            if version > 0 and int(words[BEFORE]) == version:
                stamp = int(words[STAMP])
                self._layout.copy(into, data)
                if int(words[BEFORE]) == version and int(words[AFTER]) == version:
                    self.age_seconds = (time.monotonic_ns() - stamp) / 1e9
                    return version
            self._retries[0] += 1
