"""The dataset reader: batches of a recording, each item once in every epoch, from disk within a bound of memory.

    files of the recording ──in a new order every epoch──▶ windows of whole files ──items in random order──▶ samples ──▶ learners
                                                           one is drawn from while the next is being cut

A recording that fits into the memory is one window and is cut only once. Of a larger one two windows are in memory: after each
batch that is drawn from the one, its share of the other is cut, so nobody waits at a window's end. What comes when depends on the
seed, the epoch and the window alone. A checkpoint holds a few numbers, and a resumed run continues with the very next item.

Several readers (--data.readers) share the files: each has its own, and is to a learner what a shard of a replay table is. Every
batch has items of all of them, in proportion to what they have. One that was killed continues from the newest checkpoint.

Only items that are made of recorded steps alone can be read like this. Others need a net (recurrent states, first priorities) or
are drawn by priorities: they lie in a table (demonstrations.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shoal.algorithms.records.moments import MomentRelay
from shoal.core import Me, Server, Tree
from shoal.errors import ConfigError
from shoal.offline import Episode, ShardedDemos, open_shards
from shoal.roles.episode_playback import items_of
from shoal.roles.parts import Parts
from shoal.roles.recorded_moments import WindowSums
from shoal.roles.replay_wires import items_layout
from shoal.slots import map_tree

__all__ = ["DatasetReader", "windows_of"]

SOME = 256  # items that are cut at once
MANY = 1024  # whose bytes tell those of one
ORDER, WITHIN = 0xDA7A, 0x17E5  # salts of what is random


def windows_of(sizes: list[int], order: np.ndarray, most: int) -> list[list[int]]:
    """Files in this order, as many together as have at most `most` items; a larger one is alone."""
    windows: list[list[int]] = []
    room = 0
    for shard in order.tolist():
        if not windows or sizes[shard] > room:
            windows.append([])
            room = most
        windows[-1].append(shard)
        room -= sizes[shard]
    return windows


class Window:
    """Some files of the recording as items, cut bit by bit, then drawn in a random order."""

    def __init__(self, reader: DatasetReader, epoch: int, number: int, shards: list[int]) -> None:
        self.size = sum(reader.sizes[shard] for shard in shards)
        self.drawn = self.cut = 0
        self.items = reader.record.layout.joined(self.size).empty()
        self.order = reader.order(epoch, number, self.size)
        self._sums = reader.sums
        self._moments = MomentRelay(reader.sums.size if epoch == 0 and number >= len(reader.sums) else 0)
        self._stream = reader.cut(shards, self._moments if self._moments.size else None)

    def fill(self, count: int) -> None:
        """Cut until `count` items are there."""
        while self.cut < min(count, self.size):
            try:
                some, priority = next(self._stream)
            except StopIteration:
                raise ConfigError(f"a file of the recording gave {self.cut:,} of {self.size:,} items; has it changed? Copy the "
                                  "recording again") from None
            here = slice(self.cut, self.cut + len(priority))
            map_tree(lambda into, rows: into.__setitem__(here, rows), self.items, some)  # noqa: B023
            self.cut += len(priority)
            if self.cut == self.size and self._moments.size:
                self._sums.add(self._moments)


class DatasetReader:
    """Hands out batches of a recording, each item once in every epoch; only a part of it is in memory where it is large."""

    def __init__(self, me: Me, parts: Parts, samples: Server) -> None:
        assert parts.demos is not None
        self.me, self.parts, self.samples, self.record = me, parts, samples, parts.item_record
        self.demos: ShardedDemos = open_shards(parts.demos)
        self.mine = np.arange(len(self.demos.shard_steps))[me.index :: me.replicas]
        self.sizes: list[int] = [self.demos.shard_steps[file] for file in self.mine]
        self.total, self.config = sum(self.sizes), replace(parts.replay, shards=me.replicas)
        self.layout = items_layout(self.record.layout, self.config.most_drawn)
        self.most = self._window_items()
        self.epoch = self.number = 0
        self._plans: dict[int, list[list[int]]] = {}
        self.sums = self._window_sums()
        self.current: Window = self._window(0, 0)
        self.following: Window | None = None
        self.settled = False
        me.stats.set("demo_size", self.total)

    def _window_items(self) -> int:
        """Items in a window: all of them, or half of what the memory holds beside one file."""
        each, largest = self.record.layout.joined(MANY).nbytes / MANY, max(self.sizes)
        readers = self.me.replicas
        held = int(self.parts.data.memory_mb * 1e6 / each / readers)
        if self.total <= held:
            return self.total
        if held < 3 * largest:
            self.me.fail(f"--data.memory-mb {self.parts.data.memory_mb:g} is too small for {self.parts.demos}: the largest of its "
                         f"files takes {largest * each / 1e6:.3g} MB, and three times as much is needed"
                         f"{' for each reader' if readers > 1 else ''}; give --data.memory-mb "
                         f"{3 * readers * largest * each / 1e6:.3g} or more, or convert it to a folder, which has smaller files")
        return max(largest, (held - largest) // 2)

    # ------------------------------------------------------------------ what comes when
    def windows(self, epoch: int) -> list[list[int]]:
        """The files of each window; a recording that is one window stays as it is."""
        if epoch not in self._plans:
            order = np.random.default_rng((self.parts.seed, ORDER, epoch, *self._salt)).permutation(len(self.sizes))
            whole = self.most >= self.total
            self._plans = {key: plan for key, plan in self._plans.items() if key >= epoch - 1}
            self._plans[epoch] = windows_of(self.sizes, np.arange(len(self.sizes)) if whole else order, self.most)
        return self._plans[epoch]

    def order(self, epoch: int, number: int, size: int) -> np.ndarray:
        return np.random.default_rng((self.parts.seed, WITHIN, epoch, number, *self._salt)).permutation(size)

    @property
    def _salt(self) -> tuple[int, ...]:
        """Which of several readers it is."""
        return (self.me.index,) if self.me.replicas > 1 else ()

    def cut(self, shards: list[int], moments: MomentRelay | None) -> Iterator[tuple[Tree, np.ndarray]]:
        """The items of these files; `moments` takes the sums of their observations."""
        return items_of(self.parts.algorithm, self.record, self._episodes(shards), self.parts.seed, SOME,
                        moments=None if moments is None else moments.add)

    def _window_sums(self) -> WindowSums:
        return WindowSums(self.record.observation_moments, len(self.windows(0)), self.total)

    def _episodes(self, shards: list[int]) -> Iterator[Episode]:
        for shard in shards:
            yield from self.demos.read_shard(int(self.mine[shard]))
            self.me.beat()

    def _window(self, epoch: int, number: int) -> Window:
        return Window(self, epoch, number, self.windows(epoch)[number])

    def _next(self) -> tuple[int, int]:
        """Epoch and number of the window after this one."""
        return (self.epoch, self.number + 1) if self.number + 1 < len(self.windows(self.epoch)) else (self.epoch + 1, 0)

    # ------------------------------------------------------------------ batches
    async def step(self) -> None:
        self.settled = True
        requests = await self.samples.take(32)
        self.settled = False
        try:
            for request in requests:
                with self.me.stats.phase("gather"):
                    self._answer(request.data, request.answer)
                request.reply(request.answer)
                with self.me.stats.phase("gather"):  # after the reply: a learner does not wait for what it needs later
                    self._prepare_next()
        except ConfigError as error:  # a file is gone or is another one: nobody else can read it either
            self.me.fail(str(error))

    def _answer(self, question: Tree, answer: Tree) -> None:
        """The next items, as many as are wanted."""
        views, done, count = self.layout.views(answer["items"]), 0, int(question["wanted"][0])
        self.sums.heed(question)
        while done < count:
            if self.current.drawn == self.current.size:
                self._prepare_next()
            window = self.current
            window.fill(window.size)
            rows = window.order[window.drawn : window.drawn + count - done]
            here = slice(done, done + len(rows))
            map_tree(lambda into, items: into.__setitem__(here, items[rows]), views, window.items)  # noqa: B023
            window.drawn += len(rows)
            done += len(rows)
        self.me.stats.add("demo_samples", count)
        self.me.stats.set("epochs", self.epoch + self._done() / self.total)
        answer["key"][:], answer["probability"][:], answer["table_size"][:] = 0, 1 / self.total, self.total
        answer["fresh"][0], answer["mass"][0] = 0, self.total
        self.sums.answer(question, answer)

    def _prepare_next(self) -> None:
        """Continue to the next window where this one is empty, and cut the next one's share of items."""
        window, (epoch, number) = self.current, self._next()
        if len(self.windows(epoch)) == 1:
            if window.drawn == window.size:  # all is here already: only the order is new
                self.epoch, window.drawn, window.order = epoch, 0, self.order(epoch, 0, window.size)
            return
        if self.following is None:
            self.following = self._window(epoch, number)
        self.following.fill(-(-self.following.size * window.drawn // window.size))
        if window.drawn == window.size:
            self.current, self.following, self.epoch, self.number = self.following, None, epoch, number

    def _done(self) -> int:
        """Items of this epoch that were drawn."""
        before = self.windows(self.epoch)[: self.number]
        return sum(self.sizes[shard] for shards in before for shard in shards) + self.current.drawn

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray]:
        place = [self.epoch, self.number, self.current.drawn, len(self.sums), self.total, self.most]
        return {"place": np.array(place, np.int64), **self.sums.state()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Continue with the next item. A recording that has changed is begun anew."""
        epoch, number, drawn, measured, total, *most = state["place"].tolist()
        if total != self.total:
            self.me.note(f"the recording has changed since the checkpoint ({total:,} items then, {self.total:,} now): it is read "
                         "from the beginning")
            return
        if most and most[0] != self.most:
            self.me.note("--data.memory-mb is another one than at the checkpoint: the recording is read from the beginning")
            return
        self.epoch, self.number, self.following = epoch, number, None
        self.sums = self._window_sums()
        if self.sums.size:
            self.sums.load(state["sums"] if "sums" in state else np.zeros((measured, 1 + 3 * self.sums.size)))
        self.current = self._window(epoch, number)
        self.current.drawn = drawn
