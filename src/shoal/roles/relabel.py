"""The Relabel role: draws items from one table, recomputes them with newer weights, and puts them into another one.

    source ────┐ samples (call)                                            inserts (call)
               ├────────────────▶ Relabel: relabeller.relabel(items) ─────────────────────▶ a second table ──▶ learner
    second ────┘                      ▲
                                      └── weights (broadcast)

QT-Opt's Bellman updaters attach targets this way; MuZero's Reanalyze searches again. A relabelled item carries the key that it had
in the table it was drawn from, the version it was relabelled with, and the version and time of the policy that acted. With a
`second` table each element of a batch comes from there with a probability that follows the learner's progress: the share is one of
draws, whatever the sizes of the tables are. News of env_steps and sums of observations travel on with the items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.records.moments import MomentRelay
from shoal.core import Call, Me, Pending, Reader, Tree
from shoal.learning import Relabels
from shoal.ops import schedules
from shoal.roles.data_path import producer_end
from shoal.roles.parts import Parts
from shoal.roles.replay_wires import items_layout
from shoal.slots import map_tree

__all__ = ["Relabel", "ShareRamp"]


@dataclass(frozen=True)
class ShareRamp:
    """A share of draws that moves with the learner's updates."""

    start: float
    final: float
    updates: int
    """How many it takes from the one to the other."""
    after: int = 0
    """Updates that were made before it begins."""

    def at(self, progress: Progress) -> float:
        done = (progress.learner_steps - self.after) / self.updates if self.updates else 1.0
        return float(schedules.linear(done, self.start, self.final))


class PendingTables(NamedTuple):
    """A batch on its way: of each table that was asked, how many items and the reply."""

    counts: list[int]
    pending: list[Pending]


class Relabel:
    """Draws items from tables, recomputes them with the newest weights, and puts them into another table."""

    def __init__(self, me: Me, parts: Parts, into: Parts, source: Call, relabelled: Call, weights: Reader,
                 second: Call | None = None, ramp: ShareRamp | None = None) -> None:
        """`parts` speak of the tables to draw from, `into` of the one to fill."""
        algorithm = parts.algorithm
        assert isinstance(algorithm, Relabels)
        self.me, self.weights, self.ramp = me, weights, ramp
        self.tables = [source] if second is None else [source, second]
        self.relabelled = producer_end(me, into, relabelled)
        self.relabeller = algorithm.relabeller()
        self.published = parts.algorithm.published_layout().empty()
        self.layout, self.count = items_layout(parts.stored.layout, parts.replay.batch_size), parts.replay.batch_size
        self.moments = MomentRelay(parts.stored.observation_moments)
        self.draws = me.rng("share")
        self.rng = torch.Generator().manual_seed(int(me.rng("relabel").integers(2**62)))
        self.version, self.progress = 0, Progress()
        self.asked: PendingTables | None = None

    async def step(self) -> None:
        if self.version == 0:
            await self.weights.newer_than(0)
            self._refresh()
        asked = self.asked or await self._ask()
        replies = [await pending.look() for pending in asked.pending]
        slot = await self.relabelled.slot()  # waits while the learner has enough
        self._refresh()
        items, keys = self._join(asked, replies)
        self.asked = await self._ask()  # drawn while this batch is computed
        with self.me.stats.phase("inference"):
            labelled, priority = self.relabeller.relabel(items, self.rng)
        with self.me.stats.phase("write"):
            own = {"key": keys, "label_version": np.full(len(keys), self.version), "weights_version": items["weights_version"],
                   "time": items["time"]}
            map_tree(np.copyto, slot.data["items"], {**labelled, **own})
            slot.data["priority"][:] = priority
            slot.data["decisions"][0] = sum(int(reply["fresh"][0]) for reply in replies)
            self.moments.take(slot.data)
        slot.send()
        self.me.stats.add("relabelled", len(keys))

    def _refresh(self) -> None:
        """Take newer weights, if there are any."""
        if self.weights.version == self.version:
            return
        with self.me.stats.phase("pull"):
            self.version = self.weights.pull(self.published)
            self.relabeller.load(self.published)
            self.progress = Progress.of(self.published["progress"])
        self.me.stats.observe("publish_to_use_seconds", self.weights.age_seconds)

    async def _ask(self) -> PendingTables:
        """Ask for the next batch: of the second table its share of the elements, each drawn on its own."""
        there = 0 if self.ramp is None else int(self.draws.binomial(self.count, self.ramp.at(self.progress)))
        asked = PendingTables([], [])
        for table, count in zip(self.tables, (self.count - there, there), strict=False):
            if count:
                draft = await table.slot()
                draft.data["count"][0], draft.data["wanted"][0], draft.data["trim"][0] = 0, count, False
                asked.counts.append(count)
                asked.pending.append(draft.send())
        return asked

    def _join(self, asked: PendingTables, replies: list[Tree]) -> tuple[Tree, np.ndarray]:
        """The tables' items side by side, in memory of their own, and their keys."""
        parts = [map_tree(lambda leaf: leaf[:count], self.layout.views(reply["items"]))  # noqa: B023
                 for count, reply in zip(asked.counts, replies, strict=True)]
        items = map_tree(lambda *rows: np.concatenate(rows), *parts)
        keys = np.concatenate([reply["key"][:count] for count, reply in zip(asked.counts, replies, strict=True)])
        for reply in replies:
            self.moments.add(reply)
        for pending in asked.pending:
            pending.done()
        return items, keys
