"""A replay table between producers and consumers that look at every item: what the tests of replay share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.experiment.live_settings import LiveValues
from shoal.replay.client.sharding import SHARD_BIT
from shoal.roles.replay import Replay
from shoal.roles.replay_config import ReplayConfig
from shoal.roles.replay_endpoints import ReplayInserter, ReplaySampler
from shoal.roles.replay_wires import replay_wires
from shoal.runtime import Program
from shoal.slots import Field, Layout
from tests.runtime.harness import Files, kill, up

ITEM = Layout({"id": Field((1,), "i8"), "nest": {"x": Field((1, 3), "f4")}, "screen": Field((1, 64, 64), "u1"),
               "time": Field((1,), "f8")})  # a screen is an image, which the table compresses
FIRST, UPDATED = 0.25, 0.5  # a priority is its item's id plus one of these
POISON = -1  # the id of items that must never be seen


def screens(ids):
    """What the items of these ids show."""
    return (ids[:, None] // 256 ** (np.arange(64) % 4) + np.arange(64)).astype(np.uint8)[:, None, :].repeat(64, 1)


@dataclass(frozen=True)
class FakeParts:
    """What the role asks of Parts."""

    replay: ReplayConfig
    actors: int = 2
    demos: str | None = None
    spread: bool = False
    table: str = "replay"
    inserters: int | None = None
    counted_readers: int = 0
    max_env_steps: int | None = None
    algorithm: Any = field(default_factory=lambda: SimpleNamespace(record=SimpleNamespace(layout=ITEM, observation_moments=0)))

    @property
    def item_record(self):
        return self.algorithm.record

    @property
    def stored(self):
        return self.algorithm.record


class Producer:
    """Makes items that say who they are."""

    def __init__(self, me, parts, inserts):
        self.me, self.config = me, parts.replay
        self.inserts = ReplayInserter(inserts, parts.replay.shards, me.index)
        self.next = 1 + 10**9 * (1 + me.index) + 10**7 * me.incarnation

    async def step(self):
        slot = await self.inserts.slot()
        ids = np.arange(self.next, self.next + self.config.insert_batch)
        slot.data["items"]["id"][:] = ids
        slot.data["items"]["nest"]["x"][:] = (ids % 1000)[:, None] + [0, 1, 2]
        slot.data["items"]["screen"][:] = screens(ids)
        slot.data["items"]["time"][:] = time.time()
        slot.data["priority"][:] = ids + FIRST
        slot.data["decisions"][0] = len(ids)
        slot.send()
        self.next += len(ids)
        self.me.stats.add("env_steps", len(ids))


class Consumer:
    """Checks every item and gives it a priority that only it may have."""

    def __init__(self, me, parts, samples):
        self.me, self.samples = me, ReplaySampler(parts, samples, me.rng("shards"))
        self.ids: dict[int, int] = {}
        self.keys: dict[int, int] = {}

    async def step(self):
        keys, batch = await self.samples.take()
        ids = batch["id"]
        assert (ids > 0).all(), "an item that was not sent"
        assert (batch["nest"]["x"] == (ids % 1000)[:, None] + np.array([0, 1, 2])).all(), "torn or mixed items"
        assert (batch["screen"] == screens(ids)).all(), "an image of another item"
        for key, number in zip(keys.tolist(), ids.tolist(), strict=True):
            other, first = self.ids.setdefault(key, number), self.keys.setdefault(number, key)
            assert other == number, f"key {key:x} was used again: for {other} and {number}"
            assert first == key or first >> 40 != key >> 40, f"an item is in the table twice: {number}, keys {first:x} and {key:x}"
            assert first >> SHARD_BIT == key >> SHARD_BIT, "an item is in two shards"
            self.keys[number] = key
        self.samples.update(keys, ids + UPDATED)
        self.me.stats.add("samples_consumed", len(ids))
        self.me.stats.add("learner_steps")


class CheckedReplay(Replay):
    """Looks at the priorities of what it hands out, and that an item is in the table once."""

    def __init__(self, me, **arguments):
        super().__init__(me, **arguments)
        draw = self.core.try_gather

        def checked(name, count, block, *given):
            info = draw(name, count, block, *given)
            rest = info.priorities - self.layout.views(block.memory)["id"][:count]
            assert np.isin(rest, (FIRST, UPDATED)).all(), "a priority went to another item"
            me.stats.add("samples_masked", np.count_nonzero(rest == UPDATED))
            return info

        self.core.try_gather = checked


def program_of(config: ReplayConfig, producers: int = 2, turns: bool = False) -> Program:
    program, parts = Program("t", store=Files()), FakeParts(config, producers)
    inserts, samples = replay_wires(program, parts, turns)
    program.add("producer", Producer, parts=parts, inserts=inserts.client, replicas=producers)
    program.add("replay", CheckedReplay, parts=parts, inserts=inserts.server, samples=samples.server, turns=turns,
                replicas=config.shards)
    program.add("consumer", Consumer, parts=parts, samples=samples.client)
    return program


SMALL = ReplayConfig(capacity=500, min_size=100, batch_size=16, insert_batch=10, samples_per_insert=4.0, exponent=0.6)


class RatioChange:
    """Changes samples per insert from 4 to 1 while items go in and out, then kills the Replay; `ratios` has what was kept to
    before, between and afterwards."""

    def __init__(self, program):
        program.settings = LiveValues(replay=program.nodes["replay"].arguments["parts"].replay)
        self.ratios, self._since, self._victim = [], None, None

    def __call__(self, control):
        if self.done(control) or not up(control) or (self._victim and control.children["replay-0"].pid == self._victim):
            return
        now = np.array([control.total("replay_inserts"), control.total("replay_samples")])
        if self._since is None:
            self._since = now
        inserts, samples = now - self._since
        if now[1] < 200 or samples < 600:
            return
        self.ratios.append(samples / inserts)
        self._since = None
        if len(self.ratios) == 1:
            control.change({"replay.samples_per_insert": 1.0})
        elif len(self.ratios) == 2:
            self._victim = kill(control, "replay-0")

    def done(self, control):
        return len(self.ratios) == 3


def done(coroutine):
    """The result of a coroutine that has nothing to wait for."""
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    return stop.value.value
