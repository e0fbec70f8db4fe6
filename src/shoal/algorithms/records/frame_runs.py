"""The frames of observations that are stacks of the newest ones, each kept once.

    seat 0   [ f0 f1 f2 f3 | f4 | f5 | f6 | ......... ]      an episode's first stack is four frames, every step adds one
    seat 1   [ ... ]                                         a stack is named by the place of its first frame: f2 is (f2 f3 f4 f5)

The frames of an episode lie one behind the other, so a name is enough to find all of a stack. Place 0 is a stack of zeros: what is
not there has no other name. Where a seat's room is used up, its newest frames move to the front; all who hold names are told.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["FrameRuns"]

ROOM = 128  # frames of a seat at first


class FrameRuns:
    """The newest frames of some seats."""

    def __init__(self, seats: int, size: int, shape: tuple[int, ...], dtype: str) -> None:
        """Stacks of `size` frames of this shape."""
        self.size, self._room = size, max(ROOM, 4 * size)
        self._frames = np.zeros((size + seats * self._room, *shape), dtype)
        self._begin = size + self._room * np.arange(seats)
        self._next = self._begin.copy()  # where the next frame of each seat goes
        self._steps = np.arange(size)

    def push(self, seats: np.ndarray, stacks: np.ndarray, anew: np.ndarray) -> np.ndarray:
        """Keep the newest stacks [K, size, ...] of these seats; returns their names. Those that are `anew` [K] are kept whole, of
        the others only the newest frame: the rest is there already."""
        at, old = self._next[seats], ~anew
        self._frames[at[old]] = stacks[old, -1]
        if anew.any():
            self._frames[at[anew][:, None] + self._steps] = stacks[anew]
        self._next[seats] = at + np.where(anew, self.size, 1)
        names: np.ndarray = at - np.where(anew, 0, self.size - 1)
        return names

    @property
    def full(self) -> bool:
        """Whether the next stacks may not find room: an episode's last one and the first of the next."""
        return bool((self._next - self._begin > self._room - 2 * self.size).any())

    def make_room(self, used: np.ndarray, names: Sequence[np.ndarray]) -> None:
        """Move what is in use to the front of each seat's room, and what follows it. Names in these arrays are changed in place;
        those of stacks that are gone become 0."""
        oldest = np.maximum(self._next - self.size + 1, self._begin)
        used = used[used >= self.size]
        np.minimum.at(oldest, (used - self.size) // self._room, used)
        kept, seats, frames = self._next - oldest, len(oldest), self._frames
        grown = self._room if kept.max() <= self._room // 2 else 2 * self._room
        if grown > self._room:
            frames = np.zeros((self.size + seats * grown, *frames.shape[1:]), frames.dtype)
        begin = self.size + grown * np.arange(seats)
        for seat in range(seats):
            frames[begin[seat] : begin[seat] + kept[seat]] = self._frames[oldest[seat] : self._next[seat]].copy()
        for array in names:
            whose = (array - self.size) // self._room
            alive = (array >= self.size) & (array >= oldest[whose])
            array[...] = np.where(alive, array - oldest[whose] + begin[whose], 0)
        self._frames, self._room, self._begin, self._next = frames, grown, begin, begin + kept

    def collect(self, names: Sequence[np.ndarray], into: np.ndarray) -> int:
        """Copy all frames of these stacks, each once; names become places of their first frames there. Returns how many."""
        every = np.concatenate([array.ravel() for array in names])
        places = np.unique(every[:, None] + self._steps)
        np.take(self._frames, places, axis=0, out=into[: len(places)])
        for array in names:
            array[...] = np.searchsorted(places, array)
        return len(places)
