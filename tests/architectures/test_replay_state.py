"""What a replay table saves and gets back, and requests that its death interrupts, one moment at a time."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.roles.replay import Replay
from shoal.roles.replay_config import ReplayConfig
from shoal.roles.replay_endpoints import ReplayInserter, ReplaySampler
from shoal.runtime.instance import RoleContext
from shoal.slots import InlineAllocator
from tests.architectures.graphs import go
from tests.architectures.replay_table import FIRST, SMALL, done, program_of, screens
from tests.runtime.harness import Watch, kill


def test_killed_table_is_filled_again(tmp_path):
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


def test_state_of_a_table(tmp_path):
    """The state of a table comes back with counters and priorities."""
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


def test_table_that_is_not_saved(tmp_path):
    """Nothing is kept of a table that is not to be saved."""
    folder = tmp_path / "save"
    folder.mkdir()

    def act(control):
        if not asked and control.total("learner_steps") >= 5:
            asked.append(True)
            control.checkpoint(folder)

    asked: list[bool] = []
    watch = go(program_of(SMALL), "inline", tmp_path, Watch(lambda c: c.total("learner_steps") >= 20, act, seconds=60))
    assert watch.reason == "until" and watch.saves == [(folder, True)] and not list(folder.iterdir())


# ---------------------------------------------------------------------------------------------- one moment at a time
class Table:
    """A Replay on real wires, driven by hand, and a successor for it at any moment."""

    def __init__(self, actors=1, turns=True, **config):
        self.program = program_of(ReplayConfig(checkpoint=True, **config), producers=actors, turns=turns)
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

    def another_actor(self, number, life=0):
        return self.program.wires["inserts"].attach("client", number, life)

    def insert(self, first, actor=None):
        draft = done((actor or self.actor).slot())
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


TEN = {"capacity": 100, "min_size": 10, "batch_size": 4, "insert_batch": 10, "samples_per_insert": 4.0}


def test_unanswered_insert_is_not_repeated():
    """An insert that was in but not answered when the table was saved is not put in again."""
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


@pytest.mark.parametrize("behind", [True, False])
def test_successor_of_an_actor_writes_early(behind):
    """A killed actor's insert is read, or lies behind another one, while its successor writes the next one in its place."""
    table = Table(actors=2, turns=False, **TEN)
    store, others = table.role.core.store, 10 * behind
    opened = store.open

    def open_late(*given):
        store.open = opened
        table.insert(2001, table.another_actor(0, life=1))
        return opened(*given)

    store.open = open_late
    if behind:
        table.insert(1, table.another_actor(1))
    table.insert(1001)
    table.serve()
    assert table.role.table.size == others, "what was read in part is not in"
    table.serve()
    assert table.role.table.size == others + 10
    seen = set()
    for _ in range(10):
        batch = table.ask()
        table.serve()
        seen |= set(table.role.layout.views(done(batch.result())["items"])["id"].ravel().tolist())
    assert seen <= {*range(1, 1 + others), *range(2001, 2011)} and seen & set(range(2001, 2011))


@pytest.mark.parametrize(("compression", "count"), [("none", 10), ("lz4", 10), ("none", 1)])
def test_saved_state_is_one_moment(compression, count):
    """What is saved is the moment however long it is written and no copy; small inserts share chunks, which are then open."""
    table = Table(capacity=20, min_size=10, batch_size=4, insert_batch=count, samples_per_insert=4.0, compression=compression)
    role = table.role
    for first in range(1, 21, count):
        role._store(items(first, count))
    saved = role.state()
    store, before = role.core.store, np.array(saved["chunks"])
    assert len(before) == saved["chunks"].nbytes and store._readers
    assert {id(part) for part in saved["chunks"].parts} >= {id(one.data) for one in store._encoded.values()}, "no image was copied"
    for first in range(21, 2021, count):
        role._store(items(first, count))  # all that was saved has left the table
    assert set(role.table.keys()).isdisjoint(range(1, 21)) and np.array_equal(saved["chunks"], before)
    held = store.pool.used_bytes
    saved["chunks"].release()
    assert not store._readers and store.pool.used_bytes <= held, "its memory is used again"
    table.begin(saved | {"chunks": before})
    assert table.role.table.size == 20


def items(first, count=10):
    """An insert."""
    ids = np.arange(first, first + count)
    data = {"id": ids, "nest": {"x": np.zeros((count, 3), np.float32)}, "screen": screens(ids), "time": np.zeros(count)}
    return {"items": data, "priority": ids + FIRST, "decisions": np.array([count])}


def test_priorities_of_an_earlier_life():
    """Priorities for items of an earlier life touch nothing."""
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


def test_keys_after_a_load():
    """Keys go on above all earlier ones also when the same table is loaded twice."""
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
def test_what_a_full_table_forgets(exponent):
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


def test_T21_evictions():
    """Of two classes with priorities 1 and 4 that are kept equally large, the first leaves 4^0.4 times as often."""
    size, evictions = 400, 60_000
    table = Table(capacity=size, min_size=1, batch_size=4, insert_batch=1, samples_per_insert=4.0, evict_exponent=-0.4)
    data, kinds, gone, left = done(table.actor.slot()).data, [], [0, 0], 0
    before, first = set(), 0
    for number in range(size + evictions):
        kinds.append(number % 2 if number <= size else left)  # as the item that left last
        data["items"]["id"][:], data["priority"][:] = number, 4.0 if kinds[-1] else 1.0
        table.role._store(data)
        now = set(table.role.table.keys())
        first = min(now) if number == 0 else first  # keys are numbered in the order of inserting
        for key in (before | {first + number}) - now:
            left = kinds[key - first]
            gone[left] += 1
        before = now
    assert sum(gone) == evictions and gone[0] / gone[1] == pytest.approx(1.741, abs=0.05)


def test_insert_is_counted_once_after_a_kill():
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
