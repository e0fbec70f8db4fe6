"""A buffer between a stream and a learner: sample reuse as a controlled quantity (OpenAI Five, 1912.06680, sections 4.2 and 5).

    stream ──▶ [delay: a queue, for experiments] ──▶ buffer of `capacity` unrolls ──▶ `count` drawn at random ──▶ learner

For every batch of n unrolls n / reuse new ones are taken in, so an unroll is learned from `reuse` times on average. It offers
the same `take` as the stream's own end. What has become too old in it is masked by the learner, who knows its version.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from shoal.core import Me, Source, Tree
from shoal.slots import Layout, map_tree

__all__ = ["Reuse"]

STAGES = 3


class Reuse:
    """The consuming end of a stream, with a buffer."""

    def __init__(self, me: Me, source: Source, layout: Layout, *, capacity: int, reuse: float, delay: int = 0) -> None:
        self._source, self._layout = source, layout
        self._capacity, self._reuse, self._delay = capacity, reuse, delay
        self._rng = me.rng("reuse")
        self._held: deque[Any] = deque()    # unrolls that may be drawn, oldest first
        self._queue: deque[Any] = deque()   # unrolls that are kept back
        self._spare: list[Any] = []
        self._owed = 0.0
        self._stages: dict[int, list[Any]] = {}
        self._turn = 0
        self.fresh = 0  # decisions that came in for the last batch

    async def take(self, count: int) -> Tree:
        """`count` unrolls drawn at random, side by side, after the due number of new ones has come in."""
        self._owed += count / self._reuse
        self.fresh = 0
        while self._owed >= 1 or len(self._held) < count:
            await self._intake()
            self._owed = max(0.0, self._owed - 1)
        stages = self._stages.setdefault(count, [self._layout.joined(count).empty() for _ in range(STAGES)])
        self._turn = (self._turn + 1) % STAGES
        stage = stages[self._turn]
        for position, number in enumerate(self._rng.choice(len(self._held), count, replace=False)):
            self._layout.gather(stage, position, self._held[int(number)])
        return stage

    async def _intake(self) -> None:
        unroll = await self._source.take(1)
        kept = self._spare.pop() if self._spare else self._layout.empty()
        map_tree(lambda target, source: np.copyto(target, source), kept, unroll)
        self.fresh += int(np.count_nonzero(unroll["valid"]))
        self._queue.append(kept)
        if len(self._queue) > self._delay:
            self._held.append(self._queue.popleft())
        if len(self._held) > self._capacity:
            self._spare.append(self._held.popleft())
