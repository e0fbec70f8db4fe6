"""The Replay role: a table of the replay service inside a program. `replay_endpoints.py` has what actors and learners hold of it.

    actor ──▶ inserts (call): finished items with their first priorities         answered when the limiter has let them in
    learner ──▶ samples (call): new priorities of an earlier batch, by key       answered with a batch when the limiter allows
    others ──▶ uncounted samples (call): readers beside the learner              answered as soon as the table is filled
                                 │                      ▲
                                 ▼                      │ gathered from the table straight into the reply
                              Replay: one table, its limiter, the service's transport-free core

Both wires answer late and out of order, so nobody polls. A request goes in whole or not at all: the successor of a Replay that
was killed is asked again whatever was not answered, and nothing is in twice. Keys begin anew, above all earlier ones, with
every life of the role; a priority that comes for an item of an earlier life is counted as unknown and touches nothing.

Several Replays (`--replay.shards`) are one table in pieces. Inserts are dealt to them evenly and every batch is asked of all of
them, so each knows of all samples and has its even part of the inserts: its limiter is that of the whole, with each of its
inserts counted for one of every shard. Shards know nothing of each other; each is saved and comes back by itself.

A graph may have several Replays with tables of different names (`Parts.of_table`). A reader that does not count takes neither the
learner's news of env_steps nor its share of the rate limiter.

With `turns` (lock step) an insert is answered only when the learner has asked again after its due updates: it has then
published them, and the actor continues with the newest weights. So the learner may know of an insert that the successor of a
killed Replay is asked to put in once more. It says with every request which inserts it knows, and none is counted twice.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shoal import replay
from shoal.acting import IndexedItems
from shoal.algorithms.records.moments import MOMENTS, MomentRelay
from shoal.core import Me, Pieces, Request, Server, Tree, any_of
from shoal.errors import CheckpointError
from shoal.replay.table import checkpoint
from shoal.replay.table.replay_core import Core
from shoal.roles.demonstrations import Demonstrations
from shoal.roles.parts import Parts
from shoal.roles.replay_frames import FrameTable, frame_stacks, kept_columns
from shoal.roles.replay_memory import MemoryForecast, chosen_compression, codecs
from shoal.roles.replay_wires import MEASURED, Block, TableWriter, items_layout, of_table, stored_columns, tell
from shoal.runtime.start_checks import free_memory
from shoal.slots import leaves, map_tree

__all__ = ["Replay", "make_limiter"]

KEY_SHIFT = 40  # keys of one life of the role
DIGEST = 16
SAVED = "the saved replay table"


class Arrival(NamedTuple):
    """An insert of an actor: its number among all of that actor's, its env_steps, its items, sums of its observations."""

    client: int
    number: int
    decisions: int
    items: int
    moments: Tree


class Replay:
    """Keeps experience in a table: takes items in and hands batches out, as far as the limiter allows."""

    def __init__(self, me: Me, parts: Parts, inserts: Server, samples: Server, turns: bool = False,
                 uncounted: Server | None = None) -> None:
        self.me, self.parts, self.inserts, self.samples, self.config, self.turns = me, parts, inserts, samples, parts.replay, turns
        self.uncounted, self.metrics = uncounted, {name: of_table(parts.table, name) for name in MEASURED}
        self.limiter, exponent = make_limiter(parts, turns), self.config.exponent
        self.columns, stacks = stored_columns(parts.stored.layout), frame_stacks(parts.stored)
        self.frames = None if stacks is None else FrameTable(stacks, self.columns, self.config.insert_batch)
        self.index_sizes = parts.stored.index_sizes if isinstance(parts.stored, IndexedItems) else {}
        self.core = Core([replay.Table(
            parts.table, replay.Prioritized(exponent) if exponent else replay.Uniform(), self._remover(),
            max_size=self.config.part(self.config.capacity), limiter=self.limiter, soft=self.config.trim_updates > 0)],
            compression=self._codecs(parts), seed=int(me.rng("draws").integers(2**62)))
        self.table = self.core.table(parts.table)
        together = 1 if parts.spread else me.replicas  # on one machine, one of them speaks for all
        self.forecast: MemoryForecast | None = None
        if me.index % together == 0:
            self.forecast = MemoryForecast(self.table, self.config, together, free_memory, me.note, parts.max_env_steps)
        self.layout = items_layout(parts.stored.layout, self.config.most_drawn)
        self.writer = TableWriter(self.core, self.table, self.columns, self.config.insert_batch)
        self.adding: deque[Request] = deque()    # inserts that the limiter has not allowed
        self.drawing: deque[Request] = deque()   # batches that it does not allow yet
        self.looking: deque[Request] = deque()   # of readers that do not count, while the table is not filled
        self.added: list[Request] = []           # in turns: those that are in, but not answered
        self.demos = Demonstrations(me, parts) if parts.demos is not None else None
        self.moments = MomentRelay(parts.stored.observation_moments)  # of observations that no learner was told about
        self.saved: set[bytes] = set()           # digests of those in `added` when the table was saved that was loaded
        self.counts = np.zeros(2, np.int64)      # env_steps that were inserted, lives
        self.fresh = 0                           # of these env_steps, those that no learner was told about
        self.items = 0                           # that were inserted, and that telemetry does not know of
        self.newest = np.zeros(parts.actors, np.int64)  # in turns: the number of every actor's newest insert in this life
        self.doubtful: list[Arrival] = []        # inserts that the learner may have been told about by a predecessor
        self._begin_life(0)
        self.blocked = {"insert": False, "sample": False}
        self.told = {"insert": 0.0, "sample": 0.0}  # seconds that telemetry knows of
        self.noted, self.settled = 0, False

    def _codecs(self, parts: Parts) -> dict[str, str]:
        columns = kept_columns(parts.stored, self.columns, self.config.insert_batch)
        return codecs(columns, chosen_compression(columns, self.config, parts.max_env_steps, free_memory()))

    def _remover(self) -> replay.Fifo | replay.Prioritized:
        exponent = self.config.evict_exponent
        return replay.Fifo() if exponent is None else replay.Prioritized(exponent)

    def _begin_life(self, lives: int) -> None:
        """Number items above all that any earlier life has numbered; `lives` were counted by the one that was saved."""
        self.counts[1] = lives + 1 + self.me.incarnation
        self.table.number_from(int(self.counts[1]) << KEY_SHIFT)

    async def step(self) -> None:
        self.settled = True  # nothing is changed before somebody asks
        others = () if self.uncounted is None else (self.uncounted.asked(),)
        await any_of(self.inserts.asked(), self.samples.asked(), *others)
        self.settled = False
        self.adding += self.inserts.pending(1024)
        for request in self.samples.pending(1024):
            with self.me.stats.phase("write"):
                self._heed(request.data)
            self.drawing.append(request)
        if self.uncounted is not None:
            self.looking += self.uncounted.pending(1024)
        self._serve()
        self._count()

    def _serve(self) -> None:
        """Let in and hand out, each in the order of asking, while either lets the other continue."""
        some, size, moved = self.config.insert_batch, self.config.batch_size, True
        while moved:
            moved = False
            while waiting(self.adding) and self.limiter.can_insert(some):
                moved = True
                with self.me.stats.phase("write"):
                    self._insert(self.adding.popleft())
            while waiting(self.drawing) and self.limiter.can_sample(size):
                moved = True
                with self.me.stats.phase("gather"):
                    self._sample(self.drawing.popleft())
            while waiting(self.looking) and self.table.size >= self.limiter.min_size:
                with self.me.stats.phase("gather"):
                    self._show(self.looking.popleft())
            if self.added and (self.drawing or self.table.size < self.limiter.min_size):
                self._answer_added()

    def _insert(self, request: Request) -> None:
        """Put it in, or nothing of it: the successor of an actor that was killed may be writing over what is being read."""
        data, known = request.data, digest(request.data) if self.saved else b""
        moments = {name: map_tree(np.copy, data[name]) for name in (MOMENTS,) if name in data}
        number, decisions, before = int(data["number"][0]), int(data["decisions"][0]), self.limiter.inserts
        if known in self.saved:
            if request.void:
                return
            self.saved.discard(known)  # it was in, and not answered, when the table was saved
        elif not self._store(data, lambda: request.void):
            return
        else:
            self.counts[0] += decisions
        self.added.append(request)  # the table may have refused items, as their priorities are not finite
        self._note(Arrival(request.client, number, decisions, self.limiter.inserts - before, moments))
        if not self.turns:
            self._answer_added()

    def _store(self, data: Tree, torn: Callable[[], bool] | None = None) -> bool:
        """Put the items of an insert into the table; false, and none of them is, if they are `torn`."""
        if self.frames is not None:
            return self.frames.put(self.core, self.table, data["items"], data["priority"], torn)
        return self.writer.put(data["items"], data["priority"], torn)

    def _note(self, arrival: Arrival) -> None:
        """Remember what to tell of an insert. In turns the first one of an actor may have been put in by a predecessor too."""
        if self.turns and self.me.incarnation and not self.newest[arrival.client]:
            self.doubtful.append(arrival)
        else:
            self._add(arrival)
        if self.turns:
            self.newest[arrival.client] = arrival.number

    def _add(self, arrival: Arrival) -> None:
        self.fresh += arrival.decisions
        self.items += arrival.items
        self.moments.add(arrival.moments)

    def _answer_added(self) -> None:
        for request in self.added:
            request.answer["inserts"][0] = self.limiter.inserts
            request.reply(request.answer)
        self.added.clear()
        self._count_inserts()

    def _count_inserts(self) -> None:
        """Count only inserts that cannot be retried, or that a learner was told about."""
        self.me.stats.add(self.metrics["replay_inserts"], self.items)
        self.items = 0

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
            self.me.stats.add(self.metrics["priority_updates"], count - unknown)
            self.me.stats.add(self.metrics["priority_updates_late"], unknown)
        if data["trim"][0]:
            self.table.trim()

    def _sample(self, request: Request) -> None:
        answer, count = request.answer, int(request.data["wanted"][0])
        shown = 0 if self.demos is None else self.demos.share(count)  # the batch's last elements
        if shown and self.demos is not None:
            tell(answer, slice(count - shown, count), self.demos.draw(shown, answer["items"], count - shown))
            count -= shown
        if count:
            self._gather(answer, count)
        if self.config.shards > 1:
            self.limiter.sample(self.config.batch_size - count)  # others give the rest of the batch
            answer["table_size"][:], answer["mass"][0] = self.table.size, self.table.mass
        if self.turns:
            self._resolve(request.data["heard"])
            answer["told"][:] = np.where(self.newest > 0, self.newest, request.data["heard"])
        answer["fresh"][0], self.fresh = self.fresh, 0
        self.moments.take(answer)
        request.reply(answer)
        self._count_inserts()
        self.me.stats.add(self.metrics["replay_samples"], count)  # of the agents' own

    def _show(self, request: Request) -> None:
        """A batch for a reader that does not count."""
        answer, count = request.answer, int(request.data["wanted"][0])
        self._gather(answer, count, limited=False)
        answer["fresh"][0] = 0
        MomentRelay(self.moments.size).take(answer)  # none: they are the learner's
        request.reply(answer)
        self.me.stats.add(self.metrics["uncounted_samples"], count)

    def _gather(self, answer: Tree, count: int, limited: bool = True) -> None:
        """Draw items and put them at the beginning of a reply."""
        part = self.layout.part(0, count) if count < self.config.most_drawn else None
        info = self.core.try_gather(self.table.table.name, count, Block(answer["items"]), True, part, limited)
        assert info is not None and len(info.keys) == count, "the limiter had allowed a whole batch"
        tell(answer, slice(0, count), info)

    def _resolve(self, heard: np.ndarray) -> None:
        """Count those of the doubtful inserts that the learner was not told about."""
        for one in self.doubtful:
            if heard[one.client] != one.number:
                self._add(one)
        self.doubtful.clear()

    def _count(self) -> None:
        stats, limiter = self.me.stats, self.limiter
        for side, waits in (("insert", bool(self.adding)), ("sample", bool(self.drawing))):
            if waits != self.blocked[side]:
                self.blocked[side] = waits
                (limiter.begin_wait if waits else limiter.end_wait)(side)
        counters = limiter.counters()
        for side, told in self.told.items():
            seconds = counters[f"{side}_blocked_seconds"]
            stats.add(self.metrics[f"{side}_blocked_seconds"], seconds - told)
            self.told[side] = seconds
        stats.set(self.metrics["replay_size"], self.table.size)
        stats.set(self.metrics["replay_bytes"], self.table.nbytes)
        if self.forecast is not None:
            self.forecast.look()

    def capture_anew(self) -> None:
        """--replay.samples-per-insert may have changed. One side is never held up, so somebody asks and is answered by it."""
        self.limiter.become(make_limiter(self.parts, self.turns))

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray | Pieces] | None:
        """The whole table, where it is wanted: chunks one after the other, and the index that says what they are. They are written
        from the store while it stays in use: rows that items refer to never change, and none are reused before all are written."""
        if not self.config.checkpoint:
            return None
        self.writer.close()
        index, blocks = checkpoint.snapshot(self.core)
        store = self.core.store
        chunks = Pieces(blocks, partial(store.end_read, store.begin_read()))
        words = np.frombuffer(checkpoint.packed(index), np.uint8)
        nbytes = chunks.nbytes + words.nbytes
        if self.table.size and nbytes >= 2 * self.noted:
            self.noted = nbytes
            self.me.note(f"the replay table is saved with every checkpoint: {self.table.size:,} items, {nbytes / 1e6:,.1f} MB now")
        self.me.stats.set(self.metrics["replay_checkpoint_bytes"], nbytes)
        added = np.array([list(digest(request.data)) for request in self.added], np.uint8).reshape(-1, DIGEST)
        demos = {} if self.demos is None else self.demos.state()
        return {"inserted": self.counts, "index": words, "chunks": chunks, "added": added, **demos}

    def load(self, state: dict[str, np.ndarray]) -> None:
        index = checkpoint.unpacked(state["index"].tobytes(), SAVED)
        checkpoint.fill(self.core, index, io.BufferedReader(Pages(state["chunks"])), SAVED)
        # it may have been saved with another ratio, or as one of other shards
        self.limiter.continue_from(checkpoint.limiter_numbers(index, self.table.table.name, SAVED))
        self._check_indices()
        self.counts[0] = int(state["inserted"][0])
        self._begin_life(int(state["inserted"][1]))
        self.saved = {row.tobytes() for row in state["added"]}
        if self.demos is not None and "demo_keys" in state:
            self.demos.load(state)

    def _check_indices(self) -> None:
        """Refuse a table with actions that there are not: learners would read memory by them."""
        kept = self.core.store
        for chunk, spec in enumerate(kept.specs):
            if spec is None or (most := self.index_sizes.get(spec.path)) is None:
                continue
            values = kept.array(chunk)
            if ((values < 0) | (values >= most)).any():
                raise CheckpointError(f"{SAVED} is damaged: its field {spec.path} has values outside its space")

    def close(self) -> None:
        self.core.close()
        if self.demos is not None:
            self.demos.close()


def waiting(queue: deque[Request]) -> bool:
    """Whether somebody waits for the first of them; those before it are dropped, as their clients were killed or restarted."""
    while queue and queue[0].void:
        queue.popleft()
    return bool(queue)


def make_limiter(parts: Parts, turns: bool) -> replay.RateLimiter:
    """Free-running, a band around samples_per_insert, or in turns: a batch as soon as it is due, and inserts never refused."""
    config = parts.replay
    first = config.part(config.min_size)
    if config.samples_per_insert is None:
        return replay.MinSize(first)
    ratio = config.samples_per_insert * config.shards
    if turns:
        return replay.RateLimiter(ratio, first, ratio * first - config.batch_size, math.inf)
    return replay.SampleToInsertRatio(ratio, first, max(config.band(parts.inserters or parts.actors), ratio, 1.0))


def digest(data: Tree) -> bytes:
    """What tells one insert from all others: its items carry the times at which they were made."""
    whole = hashlib.blake2b(digest_size=DIGEST)
    for _, leaf in leaves(data):
        whole.update(np.ascontiguousarray(leaf).tobytes())
    return whole.digest()


class Pages(io.RawIOBase):
    """A file-like view of an array, so that refilling a table keeps no second copy of it."""

    def __init__(self, array: np.ndarray) -> None:
        self._left = memoryview(np.ascontiguousarray(array).data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count
