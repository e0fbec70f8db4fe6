"""Demonstrations in a run: a table of their own beside the agents' (R2D3, Gulcehre et al. 2019), or alone (offline).

    recording ─▶ EpisodePlayback: steps as an actor would have seen them ─▶ the algorithm's own recorder ─▶ items ─▶ a table
                   └─▶ the initial net: recurrent states and first priorities ─┘                                     │   ▲
                                        each element of a batch comes from here with probability rho                 ▼   │ errors
                                                                                                                    learner

Items of demonstrations are those that an actor with the initial weights would have made of the same episodes, bit for bit, but for
their weights_version, which is -1: no actor of this run made them. Their keys are small, the agents' begin at 2^40, so that a
priority always finds its own table.
"""

from __future__ import annotations

import numpy as np

from shoal import replay
from shoal.algorithms.records.moments import MomentRelay
from shoal.core import Me, Server
from shoal.offline import open_demos
from shoal.ops.priorities import draw_demonstrations
from shoal.replay.table import fields as k
from shoal.replay.table.replay_core import Core
from shoal.replay.table.sampled_batch import BatchLayout, Info
from shoal.roles.episode_playback import items_of
from shoal.roles.parts import Parts
from shoal.roles.recorded_moments import WindowSums
from shoal.roles.replay_memory import codecs
from shoal.roles.replay_wires import Block, items_layout, store, stored_columns, tell

__all__ = ["DemonstrationServer", "Demonstrations"]

TABLE = "demonstrations"
SOME, SOME_BYTES = 1024, 1 << 26  # items that are put into the table at once, and what they may take before that


class Demonstrations:
    """The table: filled once, never emptied, drawn from by priorities of its own."""

    def __init__(self, me: Me, parts: Parts) -> None:
        exponent, columns = parts.replay.exponent, stored_columns(parts.algorithm.record.layout)
        self.me, self.ratio, self.rng = me, parts.replay.rho, me.rng("demonstrations")
        self.layout = items_layout(parts.algorithm.record.layout, parts.replay.batch_size)
        self.core = Core([replay.Table(TABLE, replay.Prioritized(exponent) if exponent else replay.Uniform(), max_size=1 << 40,
                                       limiter=replay.MinSize(1))], compression=codecs(columns, parts.replay.compression),
                         seed=int(me.rng("demonstration draws").integers(2**62)))
        self.table = self.core.table(TABLE)
        assert parts.demos is not None
        record = parts.item_record
        some = max(1, min(SOME, SOME_BYTES // record.layout.nbytes))
        self.moments = MomentRelay(record.observation_moments)
        for items, priority in items_of(parts.algorithm, record, open_demos(parts.demos).episodes(), parts.seed, some,
                                        moments=self.moments.add):
            store(self.core, self.table, columns, items, priority)
            me.beat()
        me.stats.set("demo_size", self.table.size)
        me.stats.set("demo_bytes", self.table.nbytes)
        if not self.table.size:
            me.fail(f"{parts.demos} gave no items to learn from: all of its first priorities are not finite")

    def share(self, count: int) -> int:
        """How many of `count` elements come from here: each on its own with probability rho."""
        return int(np.count_nonzero(draw_demonstrations(self.rng, count, self.ratio)))

    def draw(self, count: int, memory: np.ndarray, start: int) -> Info:
        """Gather `count` items into a batch, from its element `start` on."""
        place: BatchLayout = self.layout.part(start, count)
        batch = self.core.try_sample(TABLE, count, Block(memory), True, place)
        assert batch is not None and len(batch) == count
        self.me.stats.add("demo_samples", count)
        return batch.info

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        if len(keys):
            unknown, _ = self.table.update(keys.copy(), priorities.copy())
            self.me.stats.add("demo_priority_updates", len(keys) - unknown)

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray]:
        """Priorities alone: the episodes are on disk already."""
        slots = self.table.slots()
        return {"demo_keys": self.table.state.items[slots, k.KEY], "demo_priorities": self.table.state.values[slots, k.PRIORITY]}

    def load(self, state: dict[str, np.ndarray]) -> None:
        if len(state["demo_keys"]) != self.table.size:
            self.me.note(f"the demonstrations have changed since the checkpoint ({len(state['demo_keys']):,} items then, "
                         f"{self.table.size:,} now): their priorities begin anew")
            return
        self.table.update(state["demo_keys"].copy(), state["demo_priorities"].copy())

    def close(self) -> None:
        self.core.close()


class DemonstrationServer:
    """Keeps demonstrations for a learner that learns from nothing else: hands out batches and takes in new priorities."""

    def __init__(self, me: Me, parts: Parts, samples: Server) -> None:
        self.me, self.samples, self.config = me, samples, parts.replay
        self.demos = Demonstrations(me, parts)
        self.sums = WindowSums(self.demos.moments.size, 1, self.demos.table.size)
        self.sums.add(self.demos.moments)
        self.settled = False

    async def step(self) -> None:
        self.settled = True
        requests = await self.samples.take(32)
        self.settled = False
        for request in requests:
            count, size = int(request.data["count"][0]), self.config.batch_size
            with self.me.stats.phase("write"):
                self.demos.update(request.data["key"][:count], request.data["priority"][:count])
            with self.me.stats.phase("gather"):
                answer = request.answer
                info = self.demos.draw(size, answer["items"], 0)
                tell(answer, slice(0, size), info)
                answer["fresh"][0] = 0
                self.sums.heed(request.data)
                self.sums.answer(request.data, answer)
                request.reply(answer)

    def state(self) -> dict[str, np.ndarray] | None:
        return self.demos.state() if self.config.checkpoint else None

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.demos.load(state)

    def close(self) -> None:
        self.demos.close()
