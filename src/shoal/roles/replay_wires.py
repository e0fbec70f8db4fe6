"""How items travel between actors, replay tables and learners: the two call wires, and items in a table's own layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shoal.algorithms.records.moments import observation_moment_fields
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.replay.client.sharding import MOST_SHARDS
from shoal.replay.table.chunks import ChunkGroup
from shoal.replay.table.columns import Column, Spec, flatten
from shoal.replay.table.replay_core import Core, PendingInserts
from shoal.replay.table.sampled_batch import BatchLayout, Info
from shoal.replay.table.table_core import TableCore
from shoal.roles.parts import Parts
from shoal.roles.recorded_moments import question_fields, reply_fields
from shoal.roles.replay_frames import insert_fields
from shoal.runtime import Program
from shoal.runtime.wires import CallWire
from shoal.slots import Field, Layout, leaves
from shoal.telemetry.metrics import REGISTRY, Metric

__all__ = ["MEASURED", "Block", "TableWriter", "items_layout", "of_table", "replay_wires", "samples_wire", "store",
           "stored_columns", "table_metrics", "tell"]

MEASURED = ("replay_inserts", "replay_samples", "replay_size", "replay_bytes", "replay_checkpoint_bytes", "insert_blocked_seconds",
            "sample_blocked_seconds", "priority_updates", "priority_updates_late", "uncounted_samples")
"""By a Replay, of its table."""
GROUP_ITEMS, GROUP_BYTES = 64, 1 << 16  # of inserts that share a group of chunks
DEPTH = 2  # inserts that an actor may have on their way; with more shards one to each


def replay_wires(program: Program, parts: Parts, turns: bool = False) -> tuple[CallWire, CallWire]:
    """The two call wires of a Replay and its shards. In turns nobody is ahead: one insert of each actor, one batch."""
    stored, some, shards = parts.stored, parts.replay.insert_batch, parts.replay.shards
    items = {"items": insert_fields(stored, some), "priority": Field((some,), "f8"), "decisions": Field((1,), "i8"),
             "number": Field((1,), "i8"), **observation_moment_fields(stored.observation_moments)}
    inserts = program.call(of_table(parts.table, "inserts"), Layout(items), Layout({"inserts": Field((1,), "i8")}),
                           1 if turns else max(DEPTH, shards))
    return inserts, samples_wire(program, parts, turns)


def samples_wire(program: Program, parts: Parts, turns: bool, counted: bool = True) -> CallWire:
    """A learner's questions, with new priorities, and the batches that answer them: of each shard its part.

    On a wire that is not `counted` a table tells nobody of new env_steps, and its limiter does not see the draws: it is for
    readers beside the learner, who would otherwise take both from it.
    """
    config, most = parts.replay, parts.replay.most_drawn
    if config.shards > 1 and (turns or parts.demos is not None):
        why = "demonstrations lie beside one table" if parts.demos is not None else "actors and one learner take turns at one table"
        raise ConfigError(f"--replay.shards {config.shards} does not fit here: {why}; leave it out")
    if config.shards > MOST_SHARDS:
        raise ConfigError(f"--replay.shards is {config.shards}; a key has room for {MOST_SHARDS} of them")
    items = items_layout(parts.stored.layout, most)
    reply = {"items": Field((items.nbytes,), "u1"), "key": Field((most,), "i8"), "probability": Field((most,), "f8"),
             "table_size": Field((most,), "i8"), "fresh": Field((1,), "i8"), "mass": Field((1,), "f8"),
             **observation_moment_fields(parts.stored.observation_moments)}
    told = 2 * config.launch_updates * most  # priorities of two launches: a learner on a GPU may hear of both at once
    updates = {"key": Field((told,), "i8"), "priority": Field((told,), "f8"), "count": Field((1,), "i8"),
               "wanted": Field((1,), "i8"), "trim": Field((1,), "bool")}
    if parts.counted_readers:
        updates, reply = updates | question_fields(), reply | reply_fields()
    if turns:  # the newest insert of every actor that the learner was told about; it says so again with its next question
        updates["heard"] = reply["told"] = Field((parts.actors,), "i8")
    name = of_table(parts.table, "samples" if counted else "uncounted_samples")
    return program.call(name, Layout(updates), Layout(reply), 1 if turns else config.prefetch * config.shards)


def of_table(table: str, what: str) -> str:
    """The name of a wire or a metric of one of several tables; "replay" is the only one of its graph, and has the plain names."""
    return what if table == "replay" else f"{table}_{what.removeprefix('replay_')}"


def table_metrics(table: str) -> tuple[Metric, ...]:
    """What one of several tables measures; a program declares it."""
    own = (metric for metric in REGISTRY if metric.name in MEASURED)
    return tuple(replace(metric, name=of_table(table, metric.name), text=f"{metric.text} Of the table {table}.", measured_by="")
                 for metric in own)


def stored_columns(item: Layout) -> tuple[Column, ...]:
    """The table's columns for the fields [1, ...] of one item, in its order: that of their paths."""
    fields = sorted(("/".join(path), field) for path, field in leaves(item.fields))
    return tuple(Column(Spec(path, np.dtype(field.dtype), field.shape[1:]), 1, True) for path, field in fields)


def items_layout(item: Layout, batch: int) -> BatchLayout:
    """How the table lays a batch out in one block of memory: that of a reply, into which it gathers."""
    columns = stored_columns(item)
    return BatchLayout(columns, batch, (1,) * len(columns))


class Block:
    """The memory of one reply, for a table that asks where to put a batch."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    def take(self, nbytes: int) -> np.ndarray:
        assert nbytes == self.memory.nbytes
        return self.memory


def store(core: Core, table: TableCore, columns: tuple[Column, ...], items: Tree, priority: np.ndarray) -> None:
    """Put items [K, ...] into a table."""
    writer = TableWriter(core, table, columns, len(priority), shared=False)
    writer.put(items, priority)


class TableWriter:
    """Puts inserts of `count` items each into a table.

    Inserts of few small items share a group of chunks: to open one for each takes longer than all else that an insert does.
    """

    def __init__(self, core: Core, table: TableCore, columns: tuple[Column, ...], count: int, shared: bool = True) -> None:
        self._core, self._table, self._columns, self._count = core, table, columns, count
        self._specs, self._paths = [column.spec for column in columns], [column.spec.path for column in columns]
        nbytes = count * sum(column.length * column.spec.cell_bytes for column in columns)
        inserts = min(GROUP_ITEMS // count, GROUP_BYTES // max(nbytes, 1)) if shared else 1
        self._rows = count * max(1, inserts)
        self._group: ChunkGroup | None = None
        self._used = 0  # rows of the open group
        self._records = np.ones((count, 1, 4), np.int32)  # where items are that lie one behind the other
        self._first = np.arange(count)

    def put(self, items: Tree, priority: np.ndarray, torn: Callable[[], bool] | None = None) -> bool:
        """Put all of them into the table, or none, and say which: `torn` tells whether they have changed while they were copied."""
        group = self._group
        if group is None:
            group, self._used = self._core.store.open(self._specs, self._rows), 0
            self._group = group
            if self._rows > self._count:
                for into in group.arrays:
                    into[...] = 0  # a checkpoint holds whole groups
        given, begin = flatten(items), self._used
        for path, into in zip(self._paths, group.arrays, strict=True):
            into[begin : begin + self._count] = given[path]
        self._records[:, 0, 0], self._records[:, 0, 1] = group.first, self._first + begin
        insert = PendingInserts(self._table, self._columns, True, priority.copy(), self._records)
        if torn is not None and torn():
            return False  # the next insert is written over it
        insert.push()
        self._used += self._count
        if self._used == self._rows:
            self.close()
        return True

    def close(self) -> None:
        """End the open group, if there is one: its memory does not change any more, so it can be saved from where it lies."""
        if self._group is not None:
            self._core.store.close(self._group, self._used)
            self._group = None


def tell(answer: Tree, where: slice, info: Info) -> None:
    """What a learner must know of some of a batch's elements: those of one table."""
    answer["key"][where], answer["probability"][where], answer["table_size"][where] = info.keys, info.probabilities, info.table_size
