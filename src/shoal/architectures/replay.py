"""The Replay role: a table of the replay service inside a program, and the two ends that actors and learners hold.

    actor ──▶ inserts (call): finished items with their first priorities         answered when the limiter has let them in
    learner ──▶ samples (call): new priorities of an earlier batch, by key       answered with a batch when the limiter allows
                                 │                      ▲
                                 ▼                      │ gathered from the table straight into the reply
                              Replay: one table, its limiter, the service's transport-free core

Both wires answer late and out of order, so nobody polls. A request goes in whole or not at all: the successor of a Replay that
was killed is asked again whatever was not answered, and nothing is in twice. Keys begin anew, above all earlier ones, with
every life of the role; a priority that comes for an item of an earlier life is counted as unknown and touches nothing.

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
from shoal.core import Call, Me, Request, Server, Tree, any_of
from shoal.replay import checkpoint
from shoal.replay.batch import BatchLayout, Info
from shoal.replay.columns import Column, Spec, flatten
from shoal.replay.core import Core, Pending
from shoal.runtime import Program
from shoal.runtime.wires import Call as CallWire
from shoal.slots import Field, Layout, leaves

__all__ = ["Block", "Inserts", "Replay", "Samples", "items_layout", "make_limiter", "replay_wires", "samples_wire", "store",
           "stored_columns", "tell"]

TABLE = "replay"
KEY_SHIFT = 40  # keys of one life of the role
DIGEST = 16
DEPTH = 2  # inserts that an actor may have on their way


def replay_wires(program: Program, parts: Parts, turns: bool = False) -> tuple[CallWire, CallWire]:
    """The two call wires of a Replay. In turns nobody is ahead: one insert of each actor, one batch."""
    layout, some = parts.algorithm.record.layout, parts.replay.insert_batch
    items = {"items": layout.joined(some).fields, "priority": Field((some,), "f8"), "decisions": Field((1,), "i8")}
    inserts = program.call("inserts", Layout(items), Layout({"inserts": Field((1,), "i8")}), 1 if turns else DEPTH)
    return inserts, samples_wire(program, parts, turns)


def samples_wire(program: Program, parts: Parts, turns: bool) -> CallWire:
    """A learner's questions, with new priorities, and the batches that answer them."""
    config, batch = parts.replay, parts.replay.batch_size
    items = items_layout(parts.algorithm.record.layout, batch)
    reply = {"items": Field((items.nbytes,), "u1"), "key": Field((batch,), "i8"), "probability": Field((batch,), "f8"),
             "table_size": Field((batch,), "i8"), "fresh": Field((1,), "i8")}
    updates = {"key": Field((batch,), "i8"), "priority": Field((batch,), "f8"), "count": Field((1,), "i8"),
               "trim": Field((1,), "bool")}
    return program.call("samples", Layout(updates), Layout(reply), 1 if turns else config.prefetch)


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
        self.core = Core([replay.Table(
            TABLE, replay.Prioritized(exponent) if exponent else replay.Uniform(), replay.Fifo(), max_size=self.config.capacity,
            limiter=self.limiter, soft=self.config.trim_updates > 0)], seed=int(me.rng("draws").integers(2**62)))
        self.table = self.core.table(TABLE)
        self.columns = stored_columns(parts.algorithm.record.layout)
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
        answer, count = request.answer, self.config.batch_size
        shown = 0 if self.demos is None else self.demos.share(count)  # the batch's last elements
        if shown:
            tell(answer, slice(count - shown, count), self.demos.draw(shown, answer["items"], count - shown))
            count -= shown
        if count:
            where = (True, self.demos.layout.part(0, count)) if shown else ()
            batch = self.core.try_sample(TABLE, count, Block(answer["items"]), *where)
            assert batch is not None and len(batch) == count, "the limiter had allowed a whole batch"
            tell(answer, slice(0, count), batch.info)
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
        return {"inserted": self.counts, "index": words, "chunks": chunks, "added": added, **demos}

    def load(self, state: dict[str, np.ndarray]) -> None:
        index = checkpoint.unpacked(state["index"].tobytes(), "the saved replay table")
        checkpoint.fill(self.core, index, io.BytesIO(state["chunks"].tobytes()), "the saved replay table")
        self.counts[0] = self.counted = int(state["inserted"][0])
        self._begin_life(int(state["inserted"][1]))
        self.saved = {row.tobytes() for row in state["added"]}
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
    ratio, first = config.samples_per_insert, config.min_size
    if ratio is None:
        return replay.MinSize(first)
    if turns:
        return replay.RateLimiter(ratio, first, ratio * first - config.batch_size, math.inf)
    return replay.SampleToInsertRatio(ratio, first, max(config.band(parts.actors), ratio, 1.0))


def digest(data: Tree) -> bytes:
    """What tells one insert from all others: its items carry the times at which they were made."""
    whole = hashlib.blake2b(digest_size=DIGEST)
    for _, leaf in leaves(data):
        whole.update(np.ascontiguousarray(leaf).tobytes())
    return whole.digest()


def _raw(block: Any) -> np.ndarray:
    """The bytes of a stored chunk, compressed or not."""
    return np.frombuffer(block, np.uint8) if isinstance(block, bytes) else np.ascontiguousarray(block).reshape(-1).view(np.uint8)


class Insert:
    """Items on their way into the table, written in place."""

    def __init__(self, draft: Any, sent: deque[Any]) -> None:
        self.data, self._draft, self._sent = draft.data, draft, sent

    def send(self) -> None:
        self._sent.append(self._draft.send())


class Inserts:
    """The actor's end, with the interface of a stream's sink; as many inserts may be unanswered as the wire is deep."""

    def __init__(self, client: Call) -> None:
        self._client = client
        self._sent: deque[Any] = deque()

    async def slot(self) -> Insert:
        while len(self._sent) >= self._client.depth:
            await self._sent[0].result()
            self._sent.popleft()
        return Insert(await self._client.slot(), self._sent)


class Samples:
    """The learner's end: asks for batches ahead of time and sends priorities back with the next question."""

    def __init__(self, parts: Parts, client: Call) -> None:
        self._client, self._trim_updates = client, parts.replay.trim_updates
        self._layout = items_layout(parts.algorithm.record.layout, parts.replay.batch_size)
        self._asked: deque[Any] = deque()
        self._keys = self._priorities = np.zeros(0)
        self._batches = 0
        self.fresh = 0  # env_steps that have come into the table, and that no batch before this one has told of

    async def take(self) -> tuple[np.ndarray, Tree]:
        """The keys of the next batch, and the batch: its items side by side, how likely each was, how many there are."""
        while len(self._asked) < self._client.depth:
            draft = await self._client.slot()
            count = draft.data["count"][0] = len(self._keys)
            draft.data["key"][:count], draft.data["priority"][:count] = self._keys, self._priorities
            draft.data["trim"][0] = self._trim_updates > 0 and self._batches % self._trim_updates == 0
            self._keys = self._priorities = np.zeros(0)
            self._asked.append(draft.send())
        reply = await self._asked[0].result()
        self._asked.popleft()
        self._batches += 1
        self.fresh = int(reply["fresh"][0])
        items = self._layout.views(reply["items"])
        return reply["key"], {**items, "probability": reply["probability"], "table_size": reply["table_size"]}

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities of the batch that was taken last."""
        self._keys, self._priorities = keys, priorities
