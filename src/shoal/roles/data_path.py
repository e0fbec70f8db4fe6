"""The way of experience from the roles that act to the roles that learn: a stream of unrolls, or replay tables.

    path = data_path(program, parts, depth=2)                                   # by what the algorithm's record is
    program.add("actor", Actor, parts=parts, experience=path.producer, ...)     # sends unrolls, or items with priorities
    path.add_tables(place)                                                      # replay tables are roles; a stream needs none
    program.add("learner", Learner, parts=parts, batches=path.consumer, ...)    # takes batches, wherever they come from

A drawing asks for a path and does not care which one it gets. In the role, `producer_end` and `consumer_end` make of the
port what actors and learners hold.

      actor 0 ─┐                                       ┌─ learner 0
      actor 1 ─┼── unrolls (stream) ───────────────────┤               algorithms that learn from unrolls as they come
      ...     ─┘                                       └─ learner 1

      actor 0 ─┐
      actor 1 ─┼── inserts (call) ──▶ replay, or its   ◀── samples (call) ── learners       algorithms that learn from replay
      ...     ─┘   items, priorities  shards               batches, priorities
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from shoal.core import Call, Me, Sink, Source
from shoal.errors import ConfigError
from shoal.roles.batches import Batches, Intake, UnrollBatches
from shoal.roles.parts import Parts
from shoal.runtime import Program
from shoal.runtime.wires import Port

__all__ = ["DataPath", "TablePath", "consumer_end", "data_path", "producer_end", "table_path"]

Placing = str | Callable[[int], str] | None


@dataclass(frozen=True)
class DataPath:
    """A stream: what producers and consumers are given, and the size of one slot."""

    producer: Port
    consumer: Port
    slot_bytes: int

    replayed = False
    """Whether there are tables between the two."""

    def add_tables(self, place: Placing = None, uncounted: Port | None = None) -> None:
        """A stream has none."""

    def private_bytes(self, intake: Intake) -> int:
        """The memory that a learner copies unrolls to."""
        return intake.slots * self.slot_bytes


@dataclass(frozen=True)
class TablePath(DataPath):
    """Replay tables between producers and consumers."""

    program: Program
    parts: Parts
    server: Port
    samples: Port
    turns: bool
    each: bool

    replayed = True

    def private_bytes(self, intake: Intake) -> int:
        """Batches lie in the memory of the wires."""
        return 0

    def add_tables(self, place: Placing = None, uncounted: Port | None = None) -> None:
        """Add the roles that keep the tables: one table, its shards, or one table for each actor. `uncounted` is the server's end
        of a wire for readers beside the learner."""
        from shoal.roles.replay import Replay

        parts = self.parts
        if place is not None and not self.each:
            if parts.learners > 1:
                raise ConfigError(f"--learners {parts.learners} with --algorithm {parts.algorithm.name} and "
                                  "--architecture.one-place does not fit: there is one process; use --learners 1, or leave "
                                  "--architecture.one-place out")
            if parts.replay.shards > 1:
                raise ConfigError(f"--replay.shards {parts.replay.shards} with --architecture.one-place does not fit: there is one "
                                  "process; leave either out")
        self.program.add(parts.table, Replay, parts=parts, inserts=self.server, samples=self.samples, turns=self.turns,
                         uncounted=uncounted, replicas=parts.actors if self.each else parts.replay.shards, place=place)


def data_path(program: Program, parts: Parts, *, depth: int, paired: bool = False, turns: bool = False,
              each: bool = False) -> DataPath:
    """The path that the algorithm's record needs.

    A stream has `depth` slots for each producer and consumer, and `paired` ones serve only their own consumer. With tables,
    actors that take `turns` wait for the updates that are due after each of their inserts, and `each` actor has a table of
    its own.
    """
    if not parts.algorithm.from_replay:
        unrolls = program.stream("unrolls", parts.algorithm.record.layout, depth=depth, paired=paired)
        return DataPath(unrolls.sink, unrolls.source, unrolls.layout.nbytes)
    return table_path(program, parts, turns, each)


def table_path(program: Program, parts: Parts, turns: bool = False, each: bool = False) -> TablePath:
    """A path through the replay table that these parts speak of; a graph may have several, with different names."""
    from shoal.roles.replay import make_limiter  # only now: it imports Numba
    from shoal.roles.replay_wires import replay_wires, table_metrics

    if turns and parts.learners > 1:
        raise ConfigError(f"--learners {parts.learners} with --algorithm {parts.algorithm.name} does not fit here: actors and one "
                          "learner take turns; use --learners 1, or --architecture actor_learner")
    make_limiter(parts, turns)  # refuses a tolerance that could block both sides
    inserts, samples = replay_wires(program, parts, turns)
    if parts.table != "replay":
        program.metrics += table_metrics(parts.table)
    return TablePath(inserts.client, samples.client, inserts.request.nbytes, program, parts, inserts.server, samples.server, turns,
                     each)


# ---------------------------------------------------------------------------------------------- in the roles
def producer_end(me: Me, parts: Parts, end: Sink | Call) -> Sink:
    """What an acting role sends its experience through."""
    if not parts.algorithm.from_replay:
        return cast(Sink, end)
    from shoal.roles.replay_endpoints import ReplayInserter

    return ReplayInserter(cast(Call, end), parts.replay.shards, me.index, me.incarnation)


def consumer_end(me: Me, parts: Parts, end: Source | Call, intake: Intake) -> Batches:
    """What a learning role takes its batches from."""
    if not parts.algorithm.from_replay:
        return UnrollBatches(me, parts, cast(Source, end), intake)
    from shoal.roles.batches import ReplayBatches

    return ReplayBatches(me, parts, cast(Call, end))
