"""Memory and channels of one place on a cluster: private, and the same wires are laid out in them as on one machine.

Every place lays out the whole graph and uses only its own part of it (what is never touched costs nothing). What one
side of a wire writes is carried to the other side's copy by a ferry: a channel whose reader lives elsewhere is `far`, and
what is put into it is the ferry's order to carry the data that it announces.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

__all__ = ["Far", "PlaceChannel", "PlaceMedium"]

NORESERVE = 0x4000  # MAP_NORESERVE: address space for the whole graph, memory for what is touched


class Far(Protocol):
    """The ferry's end of a channel whose reader lives in another place."""

    def put(self, a: int, b: int) -> None: ...
    def pop(self) -> tuple[int, int] | None: ...


class PlaceMemory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)

    def array(self) -> np.ndarray:
        return np.frombuffer(self._map, np.uint8)


class PlaceChannel:
    """A queue in this place; whoever sleeps here is roused by every put."""

    fds: tuple[int, ...] = ()

    def __init__(self, medium: PlaceMedium) -> None:
        self._tokens: deque[tuple[int, int]] = deque()
        self._medium = medium
        self.far: Far | None = None

    def put(self, a: int, b: int = 0) -> bool:
        if self.far is not None:
            self.far.put(a, b)
        else:
            self._tokens.append((a, b))
            self._medium.wake()
        return True

    def get(self) -> list[tuple[int, int]]:
        tokens = []
        while self._tokens:
            tokens.append(self._tokens.popleft())
        return tokens

    def pop(self) -> tuple[int, int] | None:
        if self.far is not None:
            return self.far.pop()
        return self._tokens.popleft() if self._tokens else None

    def waiting(self) -> bool:
        return bool(self._tokens)


class PlaceMedium:
    shared = False

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None

    def memory(self, nbytes: int) -> PlaceMemory:
        return PlaceMemory(nbytes)

    def channel(self, tokens: int) -> PlaceChannel:
        return PlaceChannel(self)

    def close(self) -> None:
        """Gone with the process."""
