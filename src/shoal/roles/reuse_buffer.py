"""A buffer between a stream and a learner: sample reuse as a controlled quantity (OpenAI Five, 1912.06680, sections 4.2 and 5).

    stream ──▶ [delay: a queue, for experiments] ──▶ buffer of `capacity` unrolls ──▶ `count` drawn at random ──▶ learner

For every batch of n unrolls the buffer takes in n / reuse new ones, so an unroll is learned from `reuse` times on average. The
learner masks what has become too old in it, since it knows its version.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from shoal.core import Me, Source, Tree
from shoal.slots import Layout, map_tree

__all__ = ["STAGES", "ReuseBuffer", "ReuseOptions"]

STAGES = 3  # batches that a learner has side by side


@dataclass(frozen=True)
class ReuseOptions:
    """What a reuse buffer is made with."""

    capacity: int
    """Unrolls that may be drawn."""
    reuse: float
    """How often an unroll is drawn on average."""
    delay: int = 0
    """Unrolls that are kept back in a queue before they may be drawn."""


class ReuseBuffer:
    """Draws batches at random from the newest unrolls of a stream."""

    def __init__(self, me: Me, source: Source, layout: Layout, options: ReuseOptions) -> None:
        self._source, self._layout, self._options = source, layout, options
        self._rng = me.rng("reuse")
        self._held: deque[Tree] = deque()    # unrolls that may be drawn, oldest first
        self._queue: deque[Tree] = deque()   # unrolls that are kept back
        self._spare: list[Tree] = []
        self._owed = 0.0
        self._stages: dict[int, list[Tree]] = {}
        self._turn = 0
        self.fresh = 0  # decisions that came in for the last batch

    async def take(self, count: int) -> Tree:
        """`count` unrolls drawn at random, side by side, after the due number of new ones has come in."""
        self._owed += count / self._options.reuse
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
        if len(self._queue) > self._options.delay:
            self._held.append(self._queue.popleft())
        if len(self._held) > self._options.capacity:
            self._spare.append(self._held.popleft())
