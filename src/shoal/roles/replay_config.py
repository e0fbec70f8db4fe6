"""The values of a replay table between actors and learner: what an algorithm that learns from replay is run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.errors import ConfigError
from shoal.options import Options, number

__all__ = ["LAUNCH_UPDATES", "ReplayConfig"]

LAUNCH_UPDATES = 4
"""Updates that a learner from items launches on a GPU at once, where as many batches wait."""


@dataclass(frozen=True)
class ReplayConfig(Options):
    """The replay table, for algorithms that learn from one."""

    section = "replay"

    capacity: int = number(100_000, at_least=1)
    """Items that the table holds; the oldest leave first, unless evict_exponent says otherwise."""
    min_size: int = number(1_000, at_least=1)
    """Items before the first batch is drawn."""
    batch_size: int = number(64, at_least=1)
    """Items in a batch of the learner."""
    shards: int = number(1, at_least=1)
    """Processes that the table is cut into, each with its part of the items; on a cluster they are spread over the nodes."""
    insert_batch: int = number(50, at_least=1)
    """Items that an actor sends at once; it takes the newest weights between two of them."""
    exponent: float = number(0.6, at_least=0)
    """How much priorities count when items are drawn, alpha; 0 draws all alike."""
    evict_exponent: float | None = number(None)
    """Evict items at random, with probabilities p^this of their priorities p (Ape-X DPG: -0.4); none evicts the oldest."""
    samples_per_insert: float | None = number(8.0, above=0, live=True)
    """How often an item is drawn on average; none lets both sides run as fast as they can."""
    tolerance: float | None = number(None, above=0)
    """How many samples either side may be ahead of the other; none works out the least that never blocks both."""
    prefetch: int = number(2, at_least=1)
    """Batches that the learner has asked for before it needs them; where actors and learner take turns it is 1. On a GPU four that
    wait are learned from with one launch."""
    trim_updates: int = number(0, at_least=0)
    """Evict what is above the capacity once per this many updates, so that inserts never wait for it; 0 evicts at once."""
    publish_updates: int = number(1, at_least=1)
    """Updates between two publications of weights."""
    compression: Literal["auto", "none", "lz4", "zstd"] = "auto"
    """How images lie in the table: lz4, zstd (smaller, slower) or none; auto: none where memory is plentiful, else lz4."""
    checkpoint: bool = False
    """Save the table with every checkpoint, and fill it again after a restart."""
    demo_ratio: float | None = number(None, at_least=0, below=1)
    """Rho: the probability that an element of a batch is a demonstration; none is 1/256 with --demos (R2D3)."""

    @property
    def rho(self) -> float:
        """The number behind none."""
        return 1 / 256 if self.demo_ratio is None else self.demo_ratio

    @property
    def uses_priorities(self) -> bool:
        """Whether items are drawn or evicted by them."""
        return self.exponent > 0 or self.evict_exponent is not None

    def part(self, count: int) -> int:
        """One shard's part of `count` items, rounded up."""
        return -(-count // self.shards)

    @property
    def most_drawn(self) -> int:
        """Items that one shard gives to a batch at most: twice its even part, so that memory and traffic stay within twice a
        batch however many shards there are."""
        return min(self.batch_size, 2 * self.part(self.batch_size))

    @property
    def launch_updates(self) -> int:
        """Batches that a GPU is given at once, if they are there."""
        return LAUNCH_UPDATES if self.prefetch >= LAUNCH_UPDATES and self.shards == 1 else 1

    def validate(self) -> None:
        super().validate()
        if self.shards > self.batch_size:
            raise ConfigError(f"--replay.shards {self.shards} is more than the {self.batch_size} items of a batch "
                              "(--replay.batch-size), and each shard gives some of them; lower the one or raise the other")
        if self.min_size > self.capacity:
            raise ConfigError(f"--replay.min-size {self.min_size} is above --replay.capacity {self.capacity}, so no batch would "
                              "ever be drawn; lower the one or raise the other")
        if self.tolerance is not None and self.samples_per_insert is None:
            raise ConfigError(f"--replay.tolerance {self.tolerance:g} bounds nothing without --replay.samples-per-insert; give "
                              "one, or leave the tolerance out")

    def band(self, actors: int) -> float:
        """The tolerance: wide enough that a whole insert or a whole batch is always possible.

        A shard takes an insert of its own for one of each shard, so it stands for that many samples more.
        """
        assert self.samples_per_insert is not None
        slot = self.samples_per_insert * self.insert_batch * self.shards
        least = max(slot, (self.batch_size + slot) / 2)
        if self.tolerance is None:
            return self.prefetch * self.batch_size + slot * self.part(actors)
        if self.tolerance < least:
            shards = f" in each of --replay.shards {self.shards}" if self.shards > 1 else ""
            raise ConfigError(f"--replay.tolerance {self.tolerance:g} could block both sides for ever: batches of "
                              f"--replay.batch-size {self.batch_size} and --replay.insert-batch {self.insert_batch} x "
                              f"{self.samples_per_insert:g} samples{shards} need {least:g} or more")
        return self.tolerance
