"""What actors and learners hold of a Replay (`replay.py`): one table, or several shards that are one.

    ReplayInserter  sends the next insert to the next shard in turn that has answered its last one. A shard that is dead, or whose
                    limiter holds it back because it is ahead of the others, is passed over; one that is behind catches up
    ReplaySampler   asks all shards for a part of each batch, so each hears of every sample, gets the new priorities of its own
                    items and says what it holds. Shard k gives n_k of the B items, with E[n_k] = B share_k exactly (systematic
                    rounding: floor or ceiling of B share_k), and share_k = mass_k / (sum of masses), as the shards told them
                    last: the mass is the sum of priorities^exponent, or the number of items where all are drawn alike

An item is drawn with probability share_k x (its probability within shard k), and that is what the learner is told: importance
weights are exact also while a share is out of date. Where it is not, that product is priority^exponent / (the sum over all
shards), as in one table. A shard gives at most twice its even part of a batch; shares above that are cut, which is for the time
after a shard was lost, and the probabilities say so. The top bits of a key name its shard, as in `shoal.replay`.
"""

from __future__ import annotations

import itertools
from collections import deque
from mmap import mmap
from typing import NamedTuple

import numpy as np

from shoal.algorithms.records.moments import MOMENTS
from shoal.core import Call, Draft, Pending, Tree, any_of
from shoal.replay.client.sharding import SHARD_BIT
from shoal.roles.parts import Parts
from shoal.roles.recorded_moments import CountedWindows
from shoal.roles.replay_frames import unused_bytes
from shoal.roles.replay_wires import items_layout
from shoal.slots import map_tree

__all__ = ["ReplayInserter", "ReplaySampler", "deal", "shares"]


LIFE_SHIFT = 32  # numbers of the inserts of one life of an actor


class Insert:
    """Items on their way into the table, written in place."""

    def __init__(self, draft: Draft, sent: deque[Pending], shard: int | None) -> None:
        self.data, self._draft, self._sent, self._shard = draft.data, draft, sent, shard

    def send(self) -> None:
        self._sent.append(self._draft.send(self._shard, unused_bytes(self.data["items"])))


class ReplayInserter:
    """The actor's end, with the interface of a stream's sink; as many inserts may be unanswered as the wire is deep."""

    def __init__(self, client: Call, shards: int = 1, first: int = 0, life: int = 0) -> None:
        """The first insert goes to the shard of number `first`, or one further. Inserts are numbered, above those of earlier lives
        of this actor."""
        self._client, self._shards, self._turn = client, shards, first
        self._numbers = itertools.count((life << LIFE_SHIFT) + 1)
        self._sent: list[deque[Pending]] = [deque() for _ in range(shards)]

    async def slot(self) -> Insert:
        while (shard := await self._free()) is None:
            await any_of(*(sent[0].answered() for sent in self._sent))
        self._turn = shard + 1
        draft = await self._client.slot()
        draft.data["number"][0] = next(self._numbers)
        return Insert(draft, self._sent[shard], shard if self._shards > 1 else None)

    async def _free(self) -> int | None:
        """The next shard in turn that may be sent something."""
        most = self._client.depth // self._shards
        for k in range(self._shards):
            shard = (self._turn + k) % self._shards
            sent = self._sent[shard]
            while sent and sent[0].answered().ready():
                await sent.popleft().result()
            if len(sent) < most:
                return shard
        return None


class PendingShards(NamedTuple):
    """A batch on its way: of every shard its answer, how many items, and with which share of the draw."""

    pending: list[Pending]
    counts: np.ndarray
    shares: np.ndarray


class ReplaySampler:
    """The learner's end: asks for batches ahead of time and sends priorities back with the next question."""

    def __init__(self, parts: Parts, client: Call, rng: np.random.Generator | None = None,
                 counted: CountedWindows | None = None) -> None:
        """`rng` rounds the shards' parts of a batch; one table needs none. `counted`: of a recording's readers."""
        config = parts.replay
        self._counted = counted
        self._client, self._trim_updates, self._shards, self._batch = client, config.trim_updates, config.shards, config.batch_size
        self._most, self._rng, self._ahead = config.most_drawn, rng, client.depth // config.shards
        self._layout = items_layout(parts.stored.layout, self._most)
        self._asked: deque[PendingShards] = deque()
        self._masses, self._sizes = np.zeros(self._shards), np.zeros(self._shards, np.int64)  # as they were told last
        self._shown: list[Pending] = []  # the replies that the last batch lies in
        self._staging: Tree = None  # of a batch that is put together of several
        self._laid_out: dict[int, tuple[np.ndarray, Tree]] = {}  # the memory of replies, by its id, and the items in it
        self._keys, self._priorities = np.zeros(0, np.int64), np.zeros(0)  # new ones, to be told
        self._batches = 0
        self._heard = np.zeros(parts.actors, np.int64)  # the newest insert of every actor that a table in turns has reported
        self.fresh = 0  # env_steps that have come into the table, and that no batch before those taken last has reported

    async def take(self) -> tuple[np.ndarray, Tree]:
        """The keys of the next batch, and the batch: its items side by side, how likely each was, how many there are.

        Both lie in memory that the next `take` gives back.
        """
        self._give_back()
        while len(self._asked) < self._ahead:
            self._asked.append(await self._ask())
        self.fresh = 0
        return await self.following()

    async def following(self) -> tuple[np.ndarray, Tree]:
        """The batch after that, of those that were asked for. What was taken before stays where it is, unless it was put together
        of several shards' parts."""
        asked = self._asked[0]
        replies = [await pending.look() for pending in asked.pending]
        self._asked.popleft()
        self._shown += asked.pending
        self._batches += 1
        self.fresh += sum(int(reply["fresh"][0]) for reply in replies)
        if "told" in replies[0]:
            self._heard[:] = replies[0]["told"]
        if self._shards == 1:
            (reply,) = replies
            return reply["key"], {**self._items(reply["items"]), "probability": reply["probability"],
                                  "table_size": reply["table_size"], **self._moments(replies)}
        keys, batch = self._joined(asked, replies)
        return keys, {**batch, **self._moments(replies)}

    def _moments(self, replies: list[Tree]) -> Tree:
        """Sums of observations that the tables have handed on, where they are normalised: a row of each table."""
        if MOMENTS not in replies[0]:
            return {}
        found = map_tree(lambda *rows: np.concatenate(rows), *(reply[MOMENTS] for reply in replies))
        if self._counted is not None:
            self._counted.receive(replies, found)
        return {MOMENTS: found}

    def _items(self, memory: np.ndarray) -> Tree:
        """The items in a reply. Replies lie in the same few places every time: views of them are made once."""
        known = self._laid_out.get(id(memory))
        if known is None:
            if len(self._laid_out) >= 4 * self._client.depth:
                self._laid_out.clear()
            known = self._laid_out[id(memory)] = memory, self._layout.views(memory)
        return known[1]

    def waiting(self, count: int = 1) -> bool:
        """Whether the next batches are there already."""
        return len(self._asked) >= count and all(pending.answered().ready() for asked in itertools.islice(self._asked, count)
                                                 for pending in asked.pending)

    def _give_back(self) -> None:
        for pending in self._shown:
            pending.done()
        self._shown = []

    async def _ask(self) -> PendingShards:
        share, counts = np.ones(1), np.full(1, self._batch)
        if self._shards > 1:
            assert self._rng is not None
            share = shares(self._masses, self._sizes, self._batch, self._most)
            counts = deal(share, self._batch, float(self._rng.random()))
        trim = self._trim_updates > 0 and self._batches % self._trim_updates == 0
        pending = []
        for shard in range(self._shards):
            draft = await self._client.slot()
            keys, priorities = self._told(shard)
            count = draft.data["count"][0] = len(keys)
            draft.data["key"][:count], draft.data["priority"][:count] = keys, priorities
            draft.data["wanted"][0], draft.data["trim"][0] = counts[shard], trim
            if "heard" in draft.data:
                draft.data["heard"][:] = self._heard
            if self._counted is not None:
                self._counted.ask(draft.data, shard)
            pending.append(draft.send(shard if self._shards > 1 else None))
        self._keys, self._priorities = np.zeros(0, np.int64), np.zeros(0)
        return PendingShards(pending, counts, share)

    def _told(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """The new priorities of a shard's items, by its own keys."""
        if self._shards == 1:
            return self._keys, self._priorities
        mine = np.flatnonzero(self._keys >> SHARD_BIT == shard)
        return self._keys[mine] & ((1 << SHARD_BIT) - 1), self._priorities[mine]

    def _joined(self, asked: PendingShards, replies: list[Tree]) -> tuple[np.ndarray, Tree]:
        """The shards' parts as one batch of one table."""
        for shard, reply in enumerate(replies):
            self._masses[shard], self._sizes[shard] = reply["mass"][0], reply["table_size"][0]
        whose = np.repeat(np.arange(self._shards), asked.counts)

        def together(*given: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
            return np.concatenate([leaf[:count] for leaf, count in zip(given, asked.counts, strict=True)], out=into)

        keys = together(*(reply["key"] for reply in replies)) + (whose << SHARD_BIT)
        likely = together(*(reply["probability"] for reply in replies)) * asked.shares[whose]
        parts = [self._items(reply["items"]) for reply in replies]
        if self._staging is None:
            self._staging = map_tree(lambda *given: _paged(together(*given)), *parts)  # always the same: a GPU has it locked
        items = map_tree(lambda into, *given: together(*given, into=into), self._staging, *parts)
        return keys, {**items, "probability": likely, "table_size": np.full(self._batch, self._sizes.sum())}

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities of a batch that was taken; they go with the next question."""
        if not len(self._keys):
            self._keys, self._priorities = keys.copy(), np.array(priorities, np.float64)  # they lie in memory that is given back
            return
        self._keys, self._priorities = np.concatenate([self._keys, keys]), np.concatenate([self._priorities, priorities])


def _paged(like: np.ndarray) -> np.ndarray:
    """An array of that form on pages of its own: no page can be locked twice."""
    return np.frombuffer(mmap(-1, like.nbytes), like.dtype, like.size).reshape(like.shape)


def shares(masses: np.ndarray, sizes: np.ndarray, batch: int, most: int) -> np.ndarray:
    """Every shard's share of the draw: in proportion to its mass, to its size where no item has any, else even; none so large
    that a batch could have more than `most` items of it."""
    weights = next((w for w in (masses, sizes) if w.sum() > 0), np.ones(len(masses)))
    share: np.ndarray = weights / weights.sum()
    limit = 1.0 if most == batch else (most - 1) / batch  # rounded up, it is one item more
    while (high := share > limit * (1 + 1e-12)).any():
        rest = share * (share < limit)
        rest = rest if rest.sum() > 0 else (share < limit).astype(float)
        share = np.where(high, limit, share)
        share = share + rest * ((1.0 - share.sum()) / rest.sum())
    return share


def deal(share: np.ndarray, batch: int, offset: float) -> np.ndarray:
    """How many items of a batch each shard gives: floor or ceiling of its share; the mean over offsets in [0, 1) is the share."""
    edges = np.cumsum(share) * batch
    edges[-1] = batch
    counts: np.ndarray = np.diff(np.floor(edges + offset).astype(np.int64), prepend=0)
    return counts
