"""Memory and channels of one place on a cluster: private, but laid out like the shared memory of one machine.

Every place lays out the whole graph and uses only its own part of it (memory that is never touched costs nothing). A link
carries what one side of a wire writes to the copy of the other side: a channel whose reader lives in another place has a
`remote`, and a number that is put into it makes the link carry the data that the number announces.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from shoal.slots import Channel

__all__ = ["PlaceAllocator", "PlaceChannel", "RemoteEnd", "connect_remote"]

NORESERVE = 0x4000  # MAP_NORESERVE: address space for the whole graph, memory for what is touched


class RemoteEnd(Protocol):
    """A link's end of a channel whose reader lives in another place."""

    def put(self, a: int, b: int) -> None: ...
    def pop(self) -> tuple[int, int] | None: ...


class PlaceMemory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)

    def array(self) -> np.ndarray:
        return np.frombuffer(self._map, np.uint8)


class PlaceChannel:
    """A queue in this place; every put wakes the roles that sleep here."""

    fds: tuple[int, ...] = ()

    def __init__(self, allocator: PlaceAllocator) -> None:
        self._tokens: deque[tuple[int, int]] = deque()
        self._allocator = allocator
        self.remote: RemoteEnd | None = None

    def put(self, a: int, b: int = 0) -> bool:
        if self.remote is not None:
            self.remote.put(a, b)
        else:
            self._tokens.append((a, b))
            self._allocator.wake()
        return True

    def get(self) -> list[tuple[int, int]]:
        tokens = []
        while self._tokens:
            tokens.append(self._tokens.popleft())
        return tokens

    def pop(self) -> tuple[int, int] | None:
        if self.remote is not None:
            return self.remote.pop()
        return self._tokens.popleft() if self._tokens else None

    def waiting(self) -> bool:
        return bool(self._tokens)


def connect_remote(channel: Channel, remote: RemoteEnd) -> None:
    """From now on `remote` takes what is put into a channel of this place."""
    assert isinstance(channel, PlaceChannel)
    channel.remote = remote


class PlaceAllocator:
    shared = False

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None

    def memory(self, nbytes: int) -> PlaceMemory:
        return PlaceMemory(nbytes)

    def channel(self, tokens: int) -> PlaceChannel:
        return PlaceChannel(self)

    def close(self) -> None:
        """The memory goes with the process."""
