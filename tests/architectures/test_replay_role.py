"""The Replay role: every item once, every priority to its own item, the rates kept, and nothing lost or mixed by kills."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.errors import ConfigError
from shoal.replay.client.sharding import SHARD_BIT
from shoal.roles.replay import Replay
from shoal.roles.replay_config import ReplayConfig
from shoal.roles.replay_endpoints import ReplayInserter, ReplaySampler
from shoal.roles.replay_wires import Block, replay_wires
from shoal.runtime import Program
from shoal.runtime.instance import RoleContext
from shoal.slots import Field, InlineAllocator, Layout
from tests.architectures.graphs import go
from tests.runtime.harness import RUNTIMES, Files, Killer, Saver, Watch, kill

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
            assert self.ids.setdefault(key, number) == number, "a key was used again"
            life = self.keys.setdefault(number, key)
            assert life == key or life >> 40 != key >> 40, "an item is in the table twice"
            assert life >> SHARD_BIT == key >> SHARD_BIT, "an item is in two shards"
            self.keys[number] = key
        self.samples.update(keys, ids + UPDATED)
        self.me.stats.add("samples_consumed", len(ids))
        self.me.stats.add("learner_steps")


class CheckedReplay(Replay):
    """Looks at the priorities of what it hands out, and that an item is in the table once."""

    def __init__(self, me, **arguments):
        super().__init__(me, **arguments)
        draw = self.core.try_sample

        def checked(*given):
            batch = draw(*given)
            rest = batch.info.priorities - batch.data["id"]
            assert np.isin(rest, (FIRST, UPDATED)).all(), "a priority went to another item"
            me.stats.add("samples_masked", np.count_nonzero(rest == UPDATED))
            return batch

        self.core.try_sample = checked


def program_of(config: ReplayConfig, producers: int = 2, turns: bool = False) -> Program:
    program, parts = Program("t", store=Files()), FakeParts(config, producers)
    inserts, samples = replay_wires(program, parts, turns)
    program.add("producer", Producer, parts=parts, inserts=inserts.client, replicas=producers)
    program.add("replay", CheckedReplay, parts=parts, inserts=inserts.server, samples=samples.server, turns=turns,
                replicas=config.shards)
    program.add("consumer", Consumer, parts=parts, samples=samples.client)
    return program


SMALL = ReplayConfig(capacity=500, min_size=100, batch_size=16, insert_batch=10, samples_per_insert=4.0, exponent=0.6)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_items_come_back_whole_with_their_own_priorities_at_the_rate_that_was_asked_for(kind, tmp_path):
    watch = go(program_of(SMALL), kind, tmp_path, Watch(lambda c: c.total("learner_steps") >= 1000, seconds=60))
    assert watch.reason == "until"
    page = watch.final["replay-0"]
    inserts, samples = page["replay_inserts"], page["replay_samples"]
    assert abs(samples - 4.0 * (inserts - SMALL.min_size)) <= SMALL.band(2) + 4.0 * SMALL.min_size
    assert page["replay_size"] == SMALL.capacity
    assert page["samples_masked"] > 0, "no priority was ever updated"
    assert page["priority_updates"] + page["priority_updates_late"] >= page["replay_samples"] - 3 * SMALL.batch_size


def test_free_running_neither_side_waits_for_the_other(tmp_path):
    config = ReplayConfig(capacity=200, min_size=50, batch_size=8, insert_batch=10, samples_per_insert=None, trim_updates=20)
    watch = go(program_of(config), "inline", tmp_path, Watch(lambda c: c.total("learner_steps") >= 200, seconds=60))
    page = watch.final["replay-0"]
    assert watch.reason == "until" and page["insert_blocked_seconds"] == 0
    assert page["replay_size"] > config.capacity, "between two trims the table is larger than its capacity"


def test_in_turns_the_learner_has_made_its_updates_before_an_insert_is_answered(tmp_path):
    """8 samples per insert and 2 items at once are 16 samples: exactly one batch after each insert, from min_size on."""
    config = ReplayConfig(capacity=500, min_size=20, batch_size=16, insert_batch=2, samples_per_insert=8.0)
    seen = []

    def look(control):
        page = control.snapshot()["replay-0"]
        seen.append((page["replay_inserts"], page["replay_samples"]))

    watch = go(program_of(config, producers=1, turns=True), "local", tmp_path,
                  Watch(lambda c: c.total("learner_steps") >= 200, look, seconds=60))
    assert watch.reason == "until"
    for inserts, samples in seen:
        due = max(0, inserts - config.min_size) * 8 + 16 * (inserts >= config.min_size)
        assert due - 32 <= samples <= due + 16, "the pages are read one after the other, hence a batch to either side"


@pytest.mark.parametrize(("checkpoint", "turns"), [pytest.param(False, False, marks=pytest.mark.slow), (True, False),
                                                   pytest.param(True, True, marks=pytest.mark.slow)])
def test_kill_9_of_any_of_them_mixes_nothing(checkpoint, turns, tmp_path):
    config = ReplayConfig(capacity=300, min_size=60, batch_size=16, insert_batch=10, samples_per_insert=4.0, checkpoint=checkpoint)
    killer = Killer(("replay-0", "producer-0", "consumer-0", "replay-0"), times=4, progress="learner_steps", every=40)
    save = Saver(tmp_path, every=15)

    def act(control):
        if checkpoint:
            save(control)
        killer(control)

    watch = go(program_of(config, turns=turns), "local", tmp_path, Watch(killer.done, act, seconds=90))
    assert watch.reason == "until" and killer.kills == 4
    assert sum(page["restarts"] for page in watch.final.values()) >= 4
    assert not [event for event in watch.events if event["kind"] == "error"], "a check failed in a role"


def dies(me, life: int) -> bool:
    return me.index == 0 and me.incarnation == life


class MortalProducer(Producer):
    """Dies once with a request written and not sent, once with it sent and not answered."""

    async def step(self):
        if self.me.incarnation < 2 and self.next % 10**7 > 30:
            draft = await self.inserts.slot()
            draft.data["items"]["id"][:], draft.data["priority"][:] = POISON, 1e9
            if dies(self.me, 1):
                draft.data["items"]["id"][:] = ids = np.arange(self.next, self.next + self.config.insert_batch)
                draft.data["items"]["nest"]["x"][:], draft.data["priority"][:] = (ids % 1000)[:, None] + [0, 1, 2], ids + FIRST
                draft.data["items"]["screen"][:] = screens(ids)
                draft.send()
            os.kill(os.getpid(), signal.SIGKILL)
        await super().step()


class MortalReplay(CheckedReplay):
    """Dies with items in the table whose sender was not told; then with a batch drawn and not sent."""

    def _answer_added(self):
        if dies(self.me, 0) and self.limiter.samples > 200:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._answer_added()

    def _sample(self, request):
        if dies(self.me, 1) and self.limiter.inserts > 100:
            self.core.try_sample("replay", self.config.batch_size, Block(request.answer["items"]))
            os.kill(os.getpid(), signal.SIGKILL)
        super()._sample(request)


class MortalConsumer(Consumer):
    """Dies with a batch whose priorities nobody has heard; then with them written into a question and not sent."""

    async def step(self):
        await super().step()
        if self.me.incarnation < 2 and len(self.ids) > 50:
            if dies(self.me, 1):
                self.samples._give_back()
                draft = await self.samples._client.slot()
                draft.data["count"][0], draft.data["priority"][:] = len(draft.data["key"]), 1e9
            os.kill(os.getpid(), signal.SIGKILL)


def test_deaths_with_unsent_items_and_unheard_priorities_mix_nothing(tmp_path):
    """What was written and not sent is never seen; every item in the table is whole, once, with a priority of its own."""
    config = ReplayConfig(capacity=300, min_size=60, batch_size=16, insert_batch=10, samples_per_insert=4.0)
    program = program_of(config)
    for name, role in (("producer", MortalProducer), ("replay", MortalReplay), ("consumer", MortalConsumer)):
        program.nodes[name].role = role
    died, after = {"producer-0": 2, "replay-0": 2, "consumer-0": 2}, []

    def until(control):
        pages = control.snapshot()
        if not after and all(pages[name]["restarts"] == deaths for name, deaths in died.items()):
            after.append(control.total("learner_steps"))
        return after and control.total("learner_steps") > after[0] + 50

    watch = go(program, "local", tmp_path, Watch(until, seconds=90))
    assert watch.reason == "until", {name: page["restarts"] for name, page in watch.final.items()}
    assert not [event for event in watch.events if event["kind"] == "error"], "a check failed in a role"


def test_a_killed_table_is_filled_again_from_the_newest_checkpoint(tmp_path):
    """Items in it = those of the checkpoint + those that have come in since; nothing leaves it here."""
    config = ReplayConfig(capacity=10**6, min_size=60, batch_size=16, insert_batch=10, samples_per_insert=4.0, checkpoint=True)
    folder, seen = tmp_path / "save", {}

    def act(control):
        page = control.snapshot()["replay-0"]
        if "asked" not in seen and page["replay_size"] >= 3000:
            seen["asked"] = page["replay_size"]
            folder.mkdir()
            control.checkpoint(folder)
        elif watch.folder and "killed" not in seen:
            seen["killed"] = page["replay_inserts"]
            kill(control, "replay-0")
        elif "killed" in seen and page["restarts"] == 1 and "back" not in seen:
            seen["back"] = page["replay_inserts"]
        elif "back" in seen and page["replay_inserts"] >= seen["back"] + 100:
            seen["restored"] = page["replay_size"] - (page["replay_inserts"] - seen["killed"])

    watch = Watch(lambda c: "restored" in seen, act, seconds=90)
    go(program_of(config), "local", tmp_path, watch)
    assert watch.reason == "until" and seen["restored"] >= seen["asked"] - 500, seen


def test_the_state_of_a_table_comes_back_with_counters_and_priorities(tmp_path):
    config = ReplayConfig(capacity=300, min_size=60, batch_size=16, insert_batch=10, samples_per_insert=4.0, checkpoint=True)
    folder = tmp_path / "save"
    folder.mkdir()
    asked = []

    def act(control):
        if not asked and control.total("learner_steps") >= 100:
            asked.append(control.snapshot()["replay-0"])
            control.checkpoint(folder)

    watch = go(program_of(config), "inline", tmp_path, Watch(lambda c: c.total("learner_steps") >= 110, act, seconds=60))
    assert watch.saves == [(folder, True)] and watch.final["replay-0"]["replay_checkpoint_bytes"] > 0
    again = Watch(lambda c: c.total("learner_steps") >= 1, seconds=60)
    again.folder = folder
    go(program_of(config), "inline", tmp_path, again)
    page = again.final["replay-0"]
    assert page["replay_size"] >= 290 and page["replay_inserts"] <= 30, "the table was full again at once"
    assert page["samples_masked"] > 0, "updated priorities were saved"


def test_nothing_is_kept_of_a_table_that_is_not_to_be_saved(tmp_path):
    folder = tmp_path / "save"
    folder.mkdir()

    def act(control):
        if not asked and control.total("learner_steps") >= 5:
            asked.append(True)
            control.checkpoint(folder)

    asked: list[bool] = []
    watch = go(program_of(SMALL), "inline", tmp_path, Watch(lambda c: c.total("learner_steps") >= 20, act, seconds=60))
    assert watch.reason == "until" and watch.saves == [(folder, True)] and not list(folder.iterdir())


@pytest.mark.parametrize(("change", "words"), [
    ({"capacity": 10}, "min-size 1000 is above --replay.capacity 10"),
    ({"samples_per_insert": 0.0}, "must be above 0, or none"),
    ({"samples_per_insert": None, "tolerance": 3.0}, "bounds nothing"),
    ({"batch_size": 0}, "--replay.batch-size is 0"),
    ({"exponent": -1.0}, "--replay.exponent is -1.0"),
])
def test_values_that_make_no_sense_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        ReplayConfig(**change).validate()


def test_a_tolerance_that_could_block_both_sides_is_refused():
    with pytest.raises(ConfigError, match="could block both sides"):
        ReplayConfig(batch_size=64, insert_batch=50, samples_per_insert=8.0, tolerance=100).band(2)


# ---------------------------------------------------------------------------------------------- one moment at a time
class Table:
    """A Replay on real wires, driven by hand, and a successor for it at any moment."""

    def __init__(self, **config):
        self.program = program_of(ReplayConfig(checkpoint=True, **config), producers=1, turns=True)
        self.program.build(InlineAllocator())
        self.node = self.program.nodes["replay"]
        self.parts = self.node.arguments["parts"]
        self.actor, self.learner = (self.program.wires[name].attach("client", 0, 0) for name in ("inserts", "samples"))
        self.lives = 0
        self.begin()

    def begin(self, state=None):
        ends = {name: port.wire.attach("server", 0, self.lives) for name, port in self.node.ports.items()}
        self.role = Replay(RoleContext(self.program, "replay", 0, self.lives, print), **{**self.node.arguments, **ends})
        self.lives += 1
        if state is not None:
            self.role.load({name: np.array(array) for name, array in state.items()})

    def serve(self):
        with pytest.raises(StopIteration):
            self.role.step().send(None)

    def insert(self, first):
        draft = done(self.actor.slot())
        ids = np.arange(first, first + len(draft.data["priority"]))
        draft.data["items"]["id"][:], draft.data["priority"][:] = ids, ids + FIRST
        return draft.send()

    def ask(self, keys=(), priorities=()):
        draft = done(self.learner.slot())
        draft.data["count"][0], draft.data["trim"][0] = len(keys), False
        draft.data["wanted"][0] = self.role.config.batch_size
        draft.data["key"][: len(keys)], draft.data["priority"][: len(keys)] = keys, priorities
        return draft.send()

    @property
    def late(self):
        return self.role.me.stats.get("priority_updates_late")


def done(coroutine):
    """The result of a coroutine that has nothing to wait for."""
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    return stop.value.value


TEN = {"capacity": 100, "min_size": 10, "batch_size": 4, "insert_batch": 10, "samples_per_insert": 4.0}


def test_an_insert_that_was_in_but_not_answered_when_the_table_was_saved_is_not_put_in_again():
    table = Table(**TEN)
    first = table.insert(1)
    table.serve()
    assert table.role.table.size == 10 and len(table.role.added) == 1, "in turns it is answered when the learner asks"
    table.begin(table.role.state())
    table.serve()
    assert table.role.table.size == 10 and not table.role.saved
    batch = table.ask()  # one is due with the first 10 items
    table.serve()
    done(batch.result())
    table.ask()
    table.serve()
    done(first.result())
    table.insert(11)
    table.serve()
    assert table.role.table.size == 20


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_what_is_saved_is_the_moment_however_long_it_is_written_and_no_copy(compression):
    table = Table(capacity=20, min_size=10, batch_size=4, insert_batch=10, samples_per_insert=4.0, compression=compression)
    role = table.role
    for first in (1, 11):
        role._store(items(first))
    saved = role.state()
    store, before = role.core.store, np.array(saved["chunks"])
    assert len(before) == saved["chunks"].nbytes and store._readers
    assert {id(part) for part in saved["chunks"].parts} >= {id(one.data) for one in store._encoded.values()}, "no image was copied"
    for first in range(21, 2021, 10):
        role._store(items(first))  # all that was saved has left the table
    assert set(role.table.keys()).isdisjoint(range(1, 21)) and np.array_equal(saved["chunks"], before)
    held = store.pool.used_bytes
    saved["chunks"].release()
    assert not store._readers and store.pool.used_bytes <= held, "its memory is used again"
    table.begin(saved | {"chunks": before})
    assert table.role.table.size == 20


def items(first):
    """An insert of ten."""
    ids = np.arange(first, first + 10)
    data = {"id": ids, "nest": {"x": np.zeros((10, 3), np.float32)}, "screen": screens(ids), "time": np.zeros(10)}
    return {"items": data, "priority": ids + FIRST, "decisions": np.array([10])}


def test_priorities_for_items_of_an_earlier_life_touch_nothing():
    table = Table(**TEN)
    table.insert(1)
    batch = table.ask()
    table.serve()
    old = done(batch.result())["key"]
    table.begin()  # killed, and nothing was saved: the insert is not answered, so its items are put in again
    table.serve()
    assert table.role.table.size == 10 and not set(old) & set(table.role.table.keys())
    table.ask(old, np.full(4, 1000.0))
    table.serve()
    assert table.late == 4 and table.role.core.info()["tables"]["replay"]["priorities"]["max"] == 10 + FIRST


def test_keys_go_on_above_all_earlier_ones_also_when_the_same_table_is_loaded_twice():
    table = Table(**TEN)
    table.insert(1)
    table.serve()
    saved, seen = table.role.state(), set()
    for life in range(3):
        table.begin(saved)
        table.serve()
        table.role._store(table.role.added[0].data)
        new = set(table.role.table.keys()[10:])
        assert len(new) == 10 and not new & seen, life
        seen |= new


@pytest.mark.parametrize("exponent", [None, -0.4])
def test_a_full_table_forgets_the_oldest_or_by_priority(exponent):
    """Of as many items with priority 1 as with 4, those with 1 leave 4^0.4 = 1.74 times as often (Ape-X DPG)."""
    table = Table(capacity=4000, min_size=1, batch_size=4, insert_batch=1000, samples_per_insert=4.0, evict_exponent=exponent)
    data = done(table.actor.slot()).data
    for first in range(0, 5000, 1000):
        ids = np.arange(first, first + 1000)
        data["items"]["id"][:], data["priority"][:] = ids, np.where(ids % 2, 4.0, 1.0) if first < 4000 else 1e12
        table.role._store(data)
    keys = np.array(sorted(table.role.table.keys()))
    gone = np.setdiff1d(np.arange(5000), keys - (keys[-1] - 4999))  # keys are numbered in the order of inserting
    assert table.role.table.size == 4000 and len(gone) == 1000
    if exponent is None:
        assert gone.max() == 999
    else:
        low, high = np.count_nonzero(gone % 2 == 0), np.count_nonzero(gone % 2)
        assert gone.max() > 3000 and 1.4 < low / high < 2.1


def test_an_insert_that_the_learner_was_told_of_is_not_counted_again_after_a_kill():
    """In turns an insert is answered late, so the successor of a killed table is asked to put it in once more."""
    table, seen = Table(**TEN), []
    sampler, inserter = ReplaySampler(table.parts, table.learner), ReplayInserter(table.actor)

    def insert(first):
        slot = done(inserter.slot())
        ids = np.arange(first, first + len(slot.data["priority"]))
        slot.data["items"]["id"][:], slot.data["priority"][:], slot.data["decisions"][0] = ids, ids + FIRST, 10
        slot.send()

    def take():
        batch = sampler.take()
        batch.send(None)  # it has asked
        table.serve()
        with pytest.raises(StopIteration):
            batch.send(None)
        seen.append(sampler.fresh)

    insert(1)
    table.serve()
    take()
    assert seen == [10] and table.role.added, "the learner was told, the actor has no answer yet"
    table.begin()  # killed, and nothing was saved
    table.serve()
    assert table.role.table.size == 10, "its items are in again"
    take()
    assert seen == [10, 0] and table.role.me.stats.get("replay_inserts") == 10
    waiting = sampler.take()
    waiting.send(None)
    table.serve()
    assert not table.role.added, "the updates were made: the actor is answered"
    insert(11)
    table.begin()  # killed before it was put in
    table.serve()
    with pytest.raises(StopIteration):
        waiting.send(None)
    assert sampler.fresh == 10 and table.role.me.stats.get("replay_inserts") == 20
