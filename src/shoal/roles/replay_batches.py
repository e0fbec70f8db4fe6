"""Batches of items that a learner draws from replay tables; `replay.py` has the tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from shoal.core import Call, Me, Tree
from shoal.device.transfer import to_host
from shoal.learning import Learn, ReplayLearn
from shoal.roles.parts import Parts
from shoal.roles.recorded_moments import CountedWindows
from shoal.roles.replay_endpoints import ReplaySampler

__all__ = ["ReplayBatches", "measure_items"]


class ReplayBatches:
    """Items of replay tables. Tables that draw or evict by priorities are told how wrong the learner was about each item."""

    ahead = lent = True

    def __init__(self, me: Me, parts: Parts, samples: Call) -> None:
        self.me, self.publish_updates, self.launched = me, parts.replay.publish_updates, parts.replay.launch_updates
        readers = parts.counted_readers
        self.counted = CountedWindows(readers, me.index == 0, me.incarnation) if readers else None
        self.samples = ReplaySampler(parts, samples, me.rng("shards"), self.counted)
        self.decisions = parts.stored.decisions
        self.judges = parts.replay.uses_priorities
        self.keys: list[np.ndarray] = []  # of the batches that were taken last

    async def take(self) -> Tree:
        keys, batch = await self.samples.take()
        self.keys = [keys]
        return batch

    async def more(self) -> list[Tree]:
        if not self.samples.waiting(self.launched - 1):
            return []
        found = [await self.samples.following() for _ in range(self.launched - 1)]
        self.keys += [keys for keys, _ in found]
        return [batch for _, batch in found]

    def measure(self, batch: Tree, version: int) -> tuple[int, int]:
        measure_items(self.me, batch, version, self.decisions)
        fresh, self.samples.fresh = self.samples.fresh, 0
        return fresh, len(batch["weights_version"]) * self.decisions

    def waiting(self) -> bool:
        return self.samples.waiting()

    def learned(self, learn: Learn) -> None:
        if not self.judges:
            return
        priorities = cast(ReplayLearn, learn).priorities  # isinstance would cost tens of microseconds here
        self.samples.update(np.concatenate(self.keys), priorities)

    def send(self, learn: Learn) -> Callable[[], None]:
        if not self.judges:
            return lambda: None
        keys, priorities = np.concatenate(self.keys), to_host(cast(torch.Tensor, cast(ReplayLearn, learn).priorities))
        return lambda: self.samples.update(keys, priorities.numpy())


def measure_items(me: Me, batch: Tree, version: int, decisions: int) -> None:
    """Report how old a batch of items is at this version; each item stands for `decisions` decisions."""
    stats, versions = me.stats, batch["weights_version"]
    stats.add("samples_consumed", len(versions) * decisions)
    own = versions >= 0  # demonstrations were made by no version
    stats.observe("policy_lag", version - versions[own])
    stats.observe("data_age_seconds", time.time() - batch["time"][own])
    if "label_version" in batch:
        stats.observe("label_lag", version - batch["label_version"])
