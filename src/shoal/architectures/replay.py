"""The Replay role: a table of the replay service inside a program. `replay_ends.py` has what actors and learners hold of it.

    actor ──▶ inserts (call): finished items with their first priorities         answered when the limiter has let them in
    learner ──▶ samples (call): new priorities of an earlier batch, by key       answered with a batch when the limiter allows
                                 │                      ▲
                                 ▼                      │ gathered from the table straight into the reply
                              Replay: one table, its limiter, the service's transport-free core

Both wires answer late and out of order, so nobody polls. A request goes in whole or not at all: the successor of a Replay that
was killed is asked again whatever was not answered, and nothing is in twice. Keys begin anew, above all earlier ones, with
every life of the role; a priority that comes for an item of an earlier life is counted as unknown and touches nothing.

Several Replays (`--replay.shards`) are one table in pieces. Inserts are dealt to them evenly and every batch is asked of all of
them, so each knows of all samples and has its even part of the inserts: its limiter is that of the whole, with each of its
inserts counted for one of every shard. Shards know nothing of each other; each is saved and comes back by itself.

With `turns` (lock step) an insert is answered only when the learner has asked again after its due updates: it has then
published them, and the actor goes on with the newest weights.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import deque
from typing import Any

import numpy as np

from shoal import replay
from shoal.architectures.parts import Parts
from shoal.architectures.replay_memory import Forecast, codecs
from shoal.core import Me, Request, Server, Tree, any_of
from shoal.errors import ConfigError
from shoal.replay import checkpoint
from shoal.replay.batch import BatchLayout, Info
from shoal.replay.columns import Column, Spec, flatten
from shoal.replay.core import Core, Pending
from shoal.replay.sharding import MOST_SHARDS
from shoal.runtime import Program
from shoal.runtime.room import free_memory
from shoal.runtime.wires import Call as CallWire
from shoal.slots import Field, Layout, leaves

__all__ = ["Block", "Replay", "items_layout", "make_limiter", "replay_wires", "samples_wire", "store", "stored_columns", "tell"]

TABLE = "replay"
KEY_SHIFT = 40  # keys of one life of the role
DIGEST = 16
DEPTH = 2  # inserts that an actor may have on their way; with more shards one to each


def replay_wires(program: Program, parts: Parts, turns: bool = False) -> tuple[CallWire, CallWire]:
    """The two call wires of a Replay and its shards. In turns nobody is ahead: one insert of each actor, one batch."""
    layout, some, shards = parts.algorithm.record.layout, parts.replay.insert_batch, parts.replay.shards
    items = {"items": layout.joined(some).fields, "priority": Field((some,), "f8"), "decisions": Field((1,), "i8")}
    inserts = program.call("inserts", Layout(items), Layout({"inserts": Field((1,), "i8")}),
                           1 if turns else max(DEPTH, shards))
    return inserts, samples_wire(program, parts, turns)


def samples_wire(program: Program, parts: Parts, turns: bool) -> CallWire:
    """A learner's questions, with new priorities, and the batches that answer them: of each shard its part."""
    config, most = parts.replay, parts.replay.most_drawn
    if config.shards > 1 and (turns or parts.demos is not None):
        why = "demonstrations lie beside one table" if parts.demos is not None else "actors and one learner take turns at one table"
        raise ConfigError(f"--replay.shards {config.shards} does not fit here: {why}; leave it out")
    if config.shards > MOST_SHARDS:
        raise ConfigError(f"--replay.shards is {config.shards}; a key has room for {MOST_SHARDS} of them")
    items = items_layout(parts.algorithm.record.layout, most)
    reply = {"items": Field((items.nbytes,), "u1"), "key": Field((most,), "i8"), "probability": Field((most,), "f8"),
             "table_size": Field((most,), "i8"), "fresh": Field((1,), "i8"), "mass": Field((1,), "f8")}
    told = 2 * most  # priorities of two batches: a learner on a GPU may hear of both at once
    updates = {"key": Field((told,), "i8"), "priority": Field((told,), "f8"), "count": Field((1,), "i8"),
               "wanted": Field((1,), "i8"), "trim": Field((1,), "bool")}
    return program.call("samples", Layout(updates), Layout(reply), 1 if turns else config.prefetch * config.shards)


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


class Replay:
    """Keeps experience in a table: takes items in and hands batches out, as far as the limiter allows."""

    def __init__(self, me: Me, parts: Parts, inserts: Server, samples: Server, turns: bool = False) -> None:
        self.me, self.inserts, self.samples, self.config, self.turns = me, inserts, samples, parts.replay, turns
        self.limiter, exponent = make_limiter(parts, turns), self.config.exponent
        self.columns = stored_columns(parts.algorithm.record.layout)
        self.core = Core([replay.Table(
            TABLE, replay.Prioritized(exponent) if exponent else replay.Uniform(), replay.Fifo(),
            max_size=self.config.part(self.config.capacity), limiter=self.limiter, soft=self.config.trim_updates > 0)],
            compression=codecs(self.columns, self.config.compression), seed=int(me.rng("draws").integers(2**62)))
        self.table = self.core.table(TABLE)
        together = 1 if parts.spread else me.replicas  # on one machine, one of them speaks for all
        self.forecast: Forecast | None = None
        if me.index % together == 0:
            self.forecast = Forecast(self.table, self.config, together, free_memory, me.note, parts.max_env_steps)
        self.layout = items_layout(parts.algorithm.record.layout, self.config.most_drawn)
        self.rows = records(self.config.insert_batch)
        self.adding: deque[Request] = deque()    # inserts that the limiter has not allowed
        self.drawing: deque[Request] = deque()   # batches that it does not allow yet
        self.added: list[Request] = []           # in turns: those that are in, but not answered
        self.demos: Any = None                   # their own table, where there are demonstrations
        if parts.demos is not None:
            from shoal.architectures.demos import Demonstrations

            self.demos = Demonstrations(me, parts)
        self.saved: set[bytes] = set()           # digests of those in `added` when the table was saved that was loaded
        self.counts = np.zeros(2, np.int64)      # env_steps that were inserted, lives
        self.counted = 0                         # of these env_steps, those that some learner was told of
        self._begin_life(0)
        self.blocked = {"insert": False, "sample": False}
        self.told = {"insert": 0.0, "sample": 0.0}  # seconds that telemetry knows of
        self.noted, self.settled = 0, False

    def _begin_life(self, lives: int) -> None:
        """Number items above all that any earlier life has numbered; `lives` were counted by the one that was saved."""
        self.counts[1] = lives + 1 + self.me.incarnation
        self.table.number_from(int(self.counts[1]) << KEY_SHIFT)

    async def step(self) -> None:
        self.settled = True  # nothing is changed before somebody asks
        await any_of(self.inserts.asked(), self.samples.asked())
        self.settled = False
        self.adding += self.inserts.pending(1024)
        for request in self.samples.pending(1024):
            with self.me.stats.phase("write"):
                self._heed(request.data)
            self.drawing.append(request)
        self._serve()
        self._count()

    def _serve(self) -> None:
        """Let in and hand out, each in the order of asking, while either lets the other go on."""
        some, size, moved = self.config.insert_batch, self.config.batch_size, True
        while moved:
            moved = False
            for queue in (self.adding, self.drawing):
                while queue and queue[0].void:
                    queue.popleft()
            while self.adding and self.limiter.can_insert(some):
                moved = True
                with self.me.stats.phase("write"):
                    self._insert(self.adding.popleft())
            while self.drawing and self.limiter.can_sample(size):
                moved = True
                with self.me.stats.phase("gather"):
                    self._sample(self.drawing.popleft())
            if self.added and (self.drawing or self.table.size < self.limiter.min_size):
                self._answer_added()

    def _insert(self, request: Request) -> None:
        self.added.append(request)
        if self.saved and (known := digest(request.data)) in self.saved:
            self.saved.discard(known)  # it was in, and not answered, when the table was saved
        else:
            self._store(request.data)
        if not self.turns:
            self._answer_added()

    def _store(self, data: Tree) -> None:
        before = self.limiter.inserts
        store(self.core, self.table, self.columns, data["items"], data["priority"], self.rows)
        self.counts[0] += data["decisions"][0]
        self.me.stats.add("replay_inserts", self.limiter.inserts - before)  # the table refuses priorities that are not finite

    def _answer_added(self) -> None:
        for request in self.added:
            request.answer["inserts"][0] = self.limiter.inserts
            request.reply(request.answer)
        self.added.clear()

    def _heed(self, data: Tree) -> None:
        """What the learner says with its question: new priorities of an earlier batch, and whether to trim."""
        count = int(data["count"][0])
        keys, priorities = data["key"][:count].copy(), data["priority"][:count].copy()
        if self.demos is not None:
            shown = keys < 1 << KEY_SHIFT
            self.demos.update(keys[shown], priorities[shown])
            keys, priorities = keys[~shown], priorities[~shown]
            count = len(keys)
        if count:
            unknown, _ = self.table.update(keys, priorities)
            self.me.stats.add("priority_updates", count - unknown)
            self.me.stats.add("priority_updates_late", unknown)
        if data["trim"][0]:
            self.table.trim()

    def _sample(self, request: Request) -> None:
        answer, count = request.answer, int(request.data["wanted"][0])
        shown = 0 if self.demos is None else self.demos.share(count)  # the batch's last elements
        if shown:
            tell(answer, slice(count - shown, count), self.demos.draw(shown, answer["items"], count - shown))
            count -= shown
        if count:
            where = (True, self.layout.part(0, count)) if count < self.config.most_drawn else ()
            batch = self.core.try_sample(TABLE, count, Block(answer["items"]), *where)
            assert batch is not None and len(batch) == count, "the limiter had allowed a whole batch"
            tell(answer, slice(0, count), batch.info)
        if self.config.shards > 1:
            self.limiter.sample(self.config.batch_size - count)  # others give the rest of the batch
            answer["table_size"][:], answer["mass"][0] = self.table.size, self.table.mass
        answer["fresh"][0], self.counted = self.counts[0] - self.counted, int(self.counts[0])
        request.reply(answer)
        self.me.stats.add("replay_samples", count)  # of the agents' own

    def _count(self) -> None:
        stats, limiter = self.me.stats, self.limiter
        for side, waits in (("insert", bool(self.adding)), ("sample", bool(self.drawing))):
            if waits != self.blocked[side]:
                self.blocked[side] = waits
                (limiter.begin_wait if waits else limiter.end_wait)(side)
        counters = limiter.counters()
        for side, told in self.told.items():
            seconds = counters[f"{side}_blocked_seconds"]
            stats.add(f"{side}_blocked_seconds", seconds - told)
            self.told[side] = seconds
        stats.set("replay_size", self.table.size)
        stats.set("replay_bytes", self.table.nbytes)
        if self.forecast is not None:
            self.forecast.look()

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray] | None:
        """The whole table, where it is wanted: chunks one after the other, and the index that says what they are."""
        if not self.config.checkpoint:
            return None
        index, blocks = checkpoint.snapshot(self.core)
        chunks = np.concatenate([np.zeros(0, np.uint8), *(_raw(block) for block in blocks)])
        words = np.frombuffer(checkpoint.packed(index), np.uint8)
        nbytes = chunks.nbytes + words.nbytes
        if self.table.size and nbytes >= 2 * self.noted:
            self.noted = nbytes
            self.me.note(f"the replay table is saved with every checkpoint: {self.table.size:,} items, {nbytes / 1e6:,.1f} MB now")
        self.me.stats.set("replay_checkpoint_bytes", nbytes)
        added = np.array([list(digest(request.data)) for request in self.added], np.uint8).reshape(-1, DIGEST)
        demos = {} if self.demos is None else self.demos.state()
        shards = np.array([self.config.shards])
        return {"inserted": self.counts, "index": words, "chunks": chunks, "added": added, "shards": shards, **demos}

    def load(self, state: dict[str, np.ndarray]) -> None:
        index = checkpoint.unpacked(state["index"].tobytes(), "the saved replay table")
        checkpoint.fill(self.core, index, io.BufferedReader(Pages(state["chunks"])), "the saved replay table")
        self.counts[0] = self.counted = int(state["inserted"][0])
        self._begin_life(int(state["inserted"][1]))
        self.saved = {row.tobytes() for row in state["added"]}
        more = self.config.shards - int(state.get("shards", np.ones(1))[0])
        if more and self.config.samples_per_insert is not None:  # an insert counts for one of every shard, also of those before
            limiter = self.limiter
            limiter.samples = max(0, limiter.samples + round(more * self.config.samples_per_insert * limiter.inserts))
        if self.demos is not None and "demo_keys" in state:
            self.demos.load(state)

    def close(self) -> None:
        self.core.close()
        if self.demos is not None:
            self.demos.close()


def store(core: Core, table: Any, columns: tuple[Column, ...], items: Tree, priority: np.ndarray,
          rows: np.ndarray | None = None) -> None:
    """Put items [K, ...] into a table; `rows` is memory for their records."""
    count, given = len(priority), flatten(items)
    group = core.store.open([column.spec for column in columns], count)
    for column, into in zip(columns, group.arrays, strict=True):
        into[...] = given[column.spec.path]
    if rows is None:
        rows = records(count)
    rows[:, 0, 0] = group.first
    Pending(table, columns, True, priority.copy(), rows).push()
    core.store.close(group, count)


def records(count: int) -> np.ndarray:
    """Where items are that lie one behind the other in one group of chunks: int32[count, 1, 4]."""
    rows = np.ones((count, 1, 4), np.int32)
    rows[:, 0, 1] = np.arange(count)
    return rows


def tell(answer: Tree, where: slice, info: Info) -> None:
    """What a learner must know of some of a batch's elements: those of one table."""
    answer["key"][where], answer["probability"][where], answer["table_size"][where] = info.keys, info.probabilities, info.table_size


def make_limiter(parts: Parts, turns: bool) -> replay.RateLimiter:
    """Free-running, a band around samples_per_insert, or in turns: a batch as soon as it is due, and inserts never refused."""
    config = parts.replay
    first = config.part(config.min_size)
    if config.samples_per_insert is None:
        return replay.MinSize(first)
    ratio = config.samples_per_insert * config.shards
    if turns:
        return replay.RateLimiter(ratio, first, ratio * first - config.batch_size, math.inf)
    return replay.SampleToInsertRatio(ratio, first, max(config.band(parts.actors), ratio, 1.0))


def digest(data: Tree) -> bytes:
    """What tells one insert from all others: its items carry the times at which they were made."""
    whole = hashlib.blake2b(digest_size=DIGEST)
    for _, leaf in leaves(data):
        whole.update(np.ascontiguousarray(leaf).tobytes())
    return whole.digest()


class Pages(io.RawIOBase):
    """An array to read from as from a file: a table that is filled again is not in memory once more."""

    def __init__(self, array: np.ndarray) -> None:
        self._left = memoryview(array)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _raw(block: Any) -> np.ndarray:
    """The bytes of a stored chunk, compressed or not."""
    return np.frombuffer(block, np.uint8) if isinstance(block, bytes) else np.ascontiguousarray(block).reshape(-1).view(np.uint8)
