"""Where a learner's batches come from: unrolls of a stream, or items of replay tables. Both offer the same to the Learner.

    UnrollBatches   `batch_slots` unrolls side by side, or one of every living worker; a reuse buffer may stand in between
    ReplayBatches   items drawn from the tables (replay.py); their new priorities go back with the next question
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from shoal.core import Call, Me, Source, Tree
from shoal.device.transfer import DirectSlotCopy, to_host
from shoal.learning import Learn, ReplayLearn
from shoal.roles.parts import Parts
from shoal.roles.recorded_moments import CountedWindows
from shoal.roles.replay_endpoints import ReplaySampler
from shoal.roles.reuse_buffer import STAGES, ReuseBuffer, ReuseOptions

__all__ = ["Batches", "Intake", "ReplayBatches", "UnrollBatches", "measure_items"]


@dataclass(frozen=True)
class Intake:
    """How a learner takes unrolls from a stream."""

    batch_slots: int | None = None
    """Slots that make a batch; None takes one from every living producer."""
    reuse: ReuseOptions | None = None
    """A buffer to draw unrolls from more than once."""
    max_staleness: int | None = None
    """Mask steps whose weights are more versions old than this."""

    @property
    def slots(self) -> int:
        """Unrolls that a learner keeps copies of: in the batches that it has side by side, and in the buffer."""
        held = 0 if self.reuse is None else self.reuse.capacity + self.reuse.delay
        return STAGES * (self.batch_slots or 0) + held


class Batches(Protocol):
    """A learner's source of batches."""

    publish_updates: int  # updates between two publications of weights
    ahead: bool           # whether a GPU may begin the next update before the last one is reported
    lent: bool            # whether the next `take` overwrites the memory of the last batch
    counted: CountedWindows | None  # of a recording whose observations are normalised

    async def take(self) -> Tree: ...
    async def more(self) -> list[Tree]: ...   # further batches for the same launch, if they are there already
    def measure(self, batch: Tree, version: int) -> tuple[int, int]: ...
    """Report how old a batch is, mask what is too old; -> decisions that are new in it, decisions to learn from."""
    def waiting(self) -> bool: ...            # whether the next batch is there already
    def learned(self, learn: Learn) -> None: ...  # the batch that was taken last was learned from
    def send(self, learn: Learn) -> Callable[[], None]: ...  # the same from a GPU: call what it returns when copies have arrived


class UnrollBatches:
    """Unrolls of a stream, each learned from once; with a reuse buffer more often."""

    publish_updates, lent = 1, False
    counted: CountedWindows | None = None

    def __init__(self, me: Me, parts: Parts, unrolls: Source, intake: Intake) -> None:
        self.me, self.slots = me, intake.batch_slots
        layout = parts.algorithm.record.layout
        self.reuse = None if intake.reuse is None else ReuseBuffer(me, unrolls, layout, intake.reuse)
        self.unrolls = unrolls
        limits = [n for n in (intake.max_staleness, parts.algorithm.max_lag) if n is not None]
        self.max_lag = min(limits) if limits else None
        self.ahead = self.reuse is None
        if self.ahead and parts.hardware.on_gpu and parts.hardware.gpu.pinned:
            unrolls.direct = DirectSlotCopy(layout, parts.hardware.device)
        self.newest = 0  # the newest version of the last batch

    async def take(self) -> Tree:
        if self.reuse is not None:
            assert self.slots is not None
            batch = await self.reuse.take(self.slots)
        elif self.slots:
            batch = await self.unrolls.take(self.slots)
        else:
            batch = await self.unrolls.take_each(self._outlived)
        self.newest = int(batch["weights_version"].max())
        return batch

    async def more(self) -> list[Tree]:
        """Each batch of unrolls is learned from by itself."""
        return []

    def _outlived(self, unroll: Tree) -> bool:
        """In lock step each worker sends one unroll per version; a worker that died may have sent this one already."""
        old = bool((unroll["weights_version"] <= self.newest).all())
        if old:
            self.me.stats.add("samples_masked", int(np.count_nonzero(unroll["valid"])))
        return old

    def measure(self, batch: Tree, version: int) -> tuple[int, int]:
        stats, valid = self.me.stats, batch["valid"]
        fresh = int(np.count_nonzero(valid)) if self.reuse is None else self.reuse.fresh
        lag = version - batch["weights_version"]
        if self.max_lag is not None and lag.max() > self.max_lag:
            old = lag > self.max_lag
            stats.add("samples_masked", int(np.count_nonzero(old & valid)))
            valid &= ~old
        decisions = int(np.count_nonzero(valid))
        stats.add("samples_consumed", decisions)
        stats.observe("policy_lag", lag if decisions == lag.size else lag[valid])
        stats.observe("data_age_seconds", time.time() - batch["time"])
        return fresh, decisions

    def waiting(self) -> bool:
        return self.unrolls.waiting(self.slots or 0)

    def learned(self, learn: Learn) -> None:
        """A stream is told nothing."""

    def send(self, learn: Learn) -> Callable[[], None]:
        return lambda: None


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
