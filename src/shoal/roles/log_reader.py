"""The log reader: recorded episodes as if they were being collected now, into a table of their own (QT-Opt's log replay).

    recording ──episodes in random order, again and again──▶ the algorithm's own recorder ──items──▶ inserts (call) ──▶ a table

Episodes stay whole, so no transition reaches into another episode. The order depends on the seed and on how often the recording was
read before, and on nothing else: the same recording and seed give the same stream of items. Recorded steps are not env_steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoal.algorithms.records.moments import MomentRelay
from shoal.core import Call, Me
from shoal.offline import Episode, open_demos
from shoal.roles.data_path import producer_end
from shoal.roles.episode_playback import items_of
from shoal.roles.parts import Parts
from shoal.slots import map_tree

__all__ = ["LogReader"]


class LogReader:
    """Plays a recording into a table, at the pace that its limiter allows."""

    def __init__(self, me: Me, parts: Parts, path: str, inserts: Call) -> None:
        self.me, self.parts, self.path = me, parts, path
        self.inserter, self.demos = producer_end(me, parts, inserts), open_demos(path)
        self.epoch = np.zeros(1, np.int64)  # times that the recording was read whole
        self.moments = MomentRelay(parts.stored.observation_moments)
        self.items = self._stream()
        self.settled = False

    async def step(self) -> None:
        self.settled = True
        slot = await self.inserter.slot()
        self.settled = False
        with self.me.stats.phase("gather"):
            items, priority = next(self.items)
        with self.me.stats.phase("write"):
            map_tree(np.copyto, slot.data["items"], items)
            slot.data["priority"][:], slot.data["decisions"][0] = priority, 0
            self.moments.take(slot.data)
        slot.send()

    def _stream(self) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        parts = self.parts
        return items_of(parts.algorithm, parts.item_record, self._episodes(), parts.seed, parts.replay.insert_batch,
                        moments=self.moments.add)

    def _episodes(self) -> Iterator[Episode]:
        while True:
            order = np.random.default_rng((self.parts.seed, 0x106, int(self.epoch[0])))
            for episode in self.demos.episodes(order):
                yield episode
                self.me.stats.add("log_episodes")
            self.epoch += 1

    def state(self) -> dict[str, np.ndarray]:
        return {"epoch": self.epoch}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Start the current reading again."""
        self.epoch[:] = state["epoch"]
        self.items = self._stream()
