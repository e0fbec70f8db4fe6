"""A replay table in shards: drawn from as if it were one, filled evenly, at one rate, and each shard lives and dies alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.algorithms import dqn
from shoal.errors import ConfigError
from shoal.replay.client.sharding import SHARD_BIT
from shoal.roles.replay import Replay
from shoal.roles.replay_config import ReplayConfig
from shoal.roles.replay_endpoints import ReplayInserter, ReplaySampler, deal, shares
from shoal.runtime.instance import RoleContext
from shoal.slots import InlineAllocator
from tests.architectures.graphs import draw, go, train
from tests.architectures.replay_table import SMALL, FakeParts, done, program_of
from tests.runtime.harness import Killer, Saver, Watch

CATCH = "shoal/Catch-v0"


# ---------------------------------------------------------------------------------------------- the draw
@pytest.mark.parametrize("masses", [(1.0, 1.0), (0.1, 7.3), (1.0, 2.0, 3.5), (0.0, 4.0, 0.2, 0.1), (5.0,) * 7,
                                    (1e-9, 1.0, 1.0, 900.0)])
def test_parts_of_a_batch(masses):
    """Parts of a batch are exact on average and never too large."""
    config = ReplayConfig(batch_size=37, shards=len(masses))
    share = shares(np.array(masses), np.ones(len(masses), np.int64), 37, config.most_drawn)
    counts = np.array([deal(share, 37, offset) for offset in (np.arange(4000) + 0.5) / 4000])
    assert share.sum() == pytest.approx(1.0) and (counts.sum(1) == 37).all() and counts.min() >= 0
    assert counts.max() <= config.most_drawn
    np.testing.assert_allclose(counts.mean(0), 37 * share, atol=0.01)
    proportional = np.array(masses) / np.sum(masses)
    if 37 * proportional.max() <= config.most_drawn - 1:
        np.testing.assert_allclose(share, proportional)


def test_parts_without_masses():
    """Without masses the sizes count; without either all shards are alike."""
    assert shares(np.zeros(2), np.array([30, 10]), 8, 8).tolist() == [0.75, 0.25]
    assert shares(np.zeros(4), np.zeros(4, np.int64), 8, 4).tolist() == [0.25] * 4


class Shards:
    """Replays on real wires, driven by hand."""

    def __init__(self, shards, **config):
        self.config = ReplayConfig(shards=shards, samples_per_insert=None, prefetch=1, **config)
        self.program = program_of(self.config, producers=1)
        self.program.build(InlineAllocator())
        node = self.program.nodes["replay"]
        for end, count in (("server", shards), ("client", 1)):
            for wire in (port.wire for port in node.ports.values()):
                for member in range(count):
                    wire.enlist(end, member, True)
        self.roles = [Replay(RoleContext(self.program, "replay", k, 0, print), **{**node.arguments, **{
            name: port.wire.attach("server", k, 0) for name, port in node.ports.items()}}) for k in range(shards)]
        inserts, samples = (self.program.wires[name].attach("client", 0, 0) for name in ("inserts", "samples"))
        self.inserts = ReplayInserter(inserts, shards)
        self.samples = ReplaySampler(FakeParts(self.config), samples, np.random.default_rng(3))

    def put(self, ids, priorities):
        slot = done(self.inserts.slot())
        slot.data["items"]["id"][:], slot.data["priority"][:] = ids, priorities
        slot.send()
        self.serve()

    def serve(self):
        for role in self.roles:
            if role.inserts.asked().ready() or role.samples.asked().ready():
                done(role.step())

    def take(self):
        coroutine = self.samples.take()
        coroutine.send(None)  # it has asked, and waits
        self.serve()
        return done(coroutine)


def filled(shards=2, exponent=0.7):
    """Shards of very different masses; the priority of every item, by its id."""
    table = Shards(shards, capacity=1000, min_size=4 * shards, batch_size=16, insert_batch=6, exponent=exponent)
    priority = {}
    for turn in range(2 * shards):
        ids = np.arange(10 * turn, 10 * turn + 6)
        values = (1.0 + ids % 10) * (4.0 if turn % shards == 0 else 1.0)
        priority.update(zip(ids.tolist(), values.tolist(), strict=True))
        table.put(ids, values)
    assert [role.table.size for role in table.roles] == [12] * shards  # dealt evenly
    return table, priority


def drawn(table, batches):
    """How often each item came; and that every batch said how likely it was."""
    seen = {}
    for _ in range(batches):
        _, batch = table.take()
        for number, likely in zip(batch["id"].tolist(), batch["probability"].tolist(), strict=True):
            count, _ = seen.get(number, (0, 0.0))
            seen[number] = count + 1, likely
        assert (batch["table_size"] == 12 * len(table.roles)).all()
    return seen


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(("shards", "exponent"), [(2, 0.7), (3, 0.7), (2, 0.0)])
def test_draws_as_from_one_table(shards, exponent):
    """Items are drawn as from one table and their probabilities say so."""
    table, priority = filled(shards, exponent)
    _, first = table.take()  # nobody knows of any mass yet: even parts, and the probabilities of that
    within = np.array([priority[n] ** exponent for n in first["id"].tolist()])
    whose = (first["id"] // 10) % shards
    mass = np.array([sum(p ** exponent for n, p in priority.items() if (n // 10) % shards == k) for k in range(shards)])
    np.testing.assert_allclose(first["probability"], within / mass[whose] / shards)
    seen, batches = drawn(table, 800), 800
    ids = sorted(priority)
    exact = np.array([priority[n] ** exponent for n in ids])
    exact /= exact.sum()
    np.testing.assert_allclose([seen[n][1] for n in ids], exact)
    counts, total = np.array([seen[n][0] for n in ids]), 16 * batches
    free, spread = len(ids) - 1, 4 * np.sqrt(2 * (len(ids) - 1))  # mean and four sd of chi-square; rounding makes it less, not more
    assert chi_square(counts, exact * total) < free + spread
    if exponent:  # what even parts would give is told apart
        even = np.array([priority[n] ** exponent / mass[(n // 10) % shards] / shards for n in ids])
        assert chi_square(counts, even * total) > free + 20 * spread


def test_priorities_return_to_their_shard():
    """Priorities go back to the shard that the item came from."""
    table, priority = filled()
    for _ in range(40):
        keys, batch = table.take()
        assert ((keys >> SHARD_BIT) == (batch["id"] // 10) % 2).all()
        table.samples.update(keys, batch["id"] + 0.5)
        priority.update((n, n + 0.5) for n in batch["id"].tolist())
    table.take()  # the last ones are told with a question
    for k, role in enumerate(table.roles):
        held = {n: p for n, p in priority.items() if (n // 10) % 2 == k}
        assert role.table.mass == pytest.approx(sum(p ** 0.7 for p in held.values()))
        assert role.me.stats.get("priority_updates_late") == 0
    assert sum(role.me.stats.get("priority_updates") for role in table.roles) == 40 * 16


# ---------------------------------------------------------------------------------------------- the rate
@pytest.mark.parametrize(("kind", "shards"), [("inline", 3), ("local", 2)])
def test_items_and_rate(kind, shards, tmp_path):
    """Items come back whole and the rate is that of the whole."""
    config = replace(SMALL, shards=shards)
    watch = go(program_of(config), kind, tmp_path, Watch(lambda c: c.total("learner_steps") >= 250, seconds=60))
    assert watch.reason == "until"
    pages = [watch.final[f"replay-{k}"] for k in range(shards)]
    inserts, samples = (sum(page[name] for page in pages) for name in ("replay_inserts", "replay_samples"))
    assert abs(samples - 4.0 * (inserts - config.min_size)) <= config.band(2) + 4.0 * config.min_size
    for page in pages:
        assert page["replay_size"] == config.part(config.capacity)
        assert abs(page["replay_inserts"] - inserts / shards) <= config.band(2) / 4.0 / shards + config.insert_batch
        assert page["samples_masked"] > 0, "no priority was ever updated"
    updates = sum(page["priority_updates"] + page["priority_updates_late"] for page in pages)
    assert samples - 3 * config.batch_size <= updates <= samples


def test_one_actor_fills_all_shards():
    """An actor alone fills all shards and passes over one that does not answer."""
    table = Shards(3, capacity=100, min_size=3, batch_size=4, insert_batch=2)
    for _ in range(3):
        slot = done(table.inserts.slot())
        slot.data["priority"][:] = 1.0
        slot.send()
    with pytest.raises(StopIteration):
        table.roles[1].step().send(None)  # the others are dead, or their limiters hold them back
    for _ in range(2):
        slot = done(table.inserts.slot())
        slot.data["priority"][:] = 1.0
        slot.send()
        done(table.roles[1].step())
    assert [role.table.size for role in table.roles] == [0, 6, 0]
    table.serve()
    assert [role.table.size for role in table.roles] == [2, 6, 2]


# ---------------------------------------------------------------------------------------------- deaths and checkpoints
@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kill_9_of_a_shard(checkpoint, tmp_path):
    """Without a checkpoint it comes back empty: it is filled up while the others are held back by the rate, and nobody waits for
    ever."""
    config = ReplayConfig(capacity=3000, min_size=90, batch_size=16, insert_batch=10, samples_per_insert=4.0, shards=3,
                          checkpoint=checkpoint)
    killer = Killer(("replay-1", "replay-2", "consumer-0", "replay-1"), times=4, progress="learner_steps", every=60)
    save = Saver(tmp_path, every=15)

    def act(control):
        if checkpoint:
            save(control)
        killer(control)

    watch = go(program_of(config), "local", tmp_path, Watch(killer.done, act, seconds=120))
    assert watch.reason == "until" and killer.kills == 4
    assert watch.final["replay-0"]["restarts"] == 0 < watch.final["replay-1"]["restarts"]
    assert not [event for event in watch.events if event["kind"] == "error"], "a check failed in a role"
    assert watch.final["replay-0"]["replay_size"] >= config.part(config.min_size)


def test_every_shard_is_saved(tmp_path):
    """Every shard is saved and filled again by itself."""
    config = ReplayConfig(capacity=400, min_size=60, batch_size=16, insert_batch=10, samples_per_insert=4.0, shards=2,
                          checkpoint=True)
    folder, asked = tmp_path / "save", []
    folder.mkdir()

    def act(control):
        if not asked and control.total("learner_steps") >= 150:
            asked.append(True)
            control.checkpoint(folder)

    watch = go(program_of(config), "inline", tmp_path, Watch(lambda c: c.total("learner_steps") >= 160, act, seconds=60))
    assert watch.saves == [(folder, True)]
    assert sorted(path.name for path in folder.iterdir()) == ["replay-0.safetensors", "replay-1.safetensors"]
    again = Watch(lambda c: c.total("learner_steps") >= 1, seconds=60)
    again.folder = folder
    go(program_of(config), "inline", tmp_path, again)
    for k in range(2):
        page = again.final[f"replay-{k}"]
        assert page["replay_size"] >= 190 and page["replay_inserts"] <= 20, "the shard was full again at once"
    more = Watch(lambda c: c.total("learner_steps") >= 1, seconds=60)  # another number of shards: who has no file begins anew
    more.folder = folder
    go(program_of(replace(config, shards=3)), "inline", tmp_path, more)
    assert more.final["replay-0"]["replay_size"] >= 130 and more.final["replay-2"]["replay_size"] < 130


# ---------------------------------------------------------------------------------------------- in programs
TABLE = ReplayConfig(capacity=600, min_size=64, batch_size=16, insert_batch=10, samples_per_insert=8.0, shards=2)


@pytest.mark.parametrize(("architecture", "options"), [
    ("actor_learner", {"actors": 2}), ("actor_learner", {"actors": 1, "learners": 2}), ("central_inference", {"actors": 2}),
    ("parameter_server", {"actors": 2, "table": "global"}),
])
def test_every_architecture_with_a_table(architecture, options, tmp_path):
    """Every architecture with one table may have it in shards."""
    hashes = []
    for _ in range(2):
        watch = train(tmp_path, dqn.Config(epsilon_steps=500), architecture, CATCH, "inline", updates=20, replay=TABLE, **options)
        assert watch.reason == "counted" and all(watch.final[f"replay-{k}"]["replay_samples"] > 0 for k in range(2))
        hashes.append(watch.hash)
    assert hashes[0] == hashes[1], "inline is bit-exact for a seed"


@pytest.mark.parametrize(("architecture", "options", "words"), [
    ("synchronous", {}, "take turns at one table"), ("actor_learner", {"one_place": True}, "there is one process"),
    ("parameter_server", {"table": "local"}, "every bundle has a table of its own"),
])
def test_shards_without_a_table(architecture, options, words):
    """Where there is no such table shards are refused."""
    with pytest.raises(ConfigError, match=f"--replay.shards 2 .*does not fit.*{words}"):
        draw(dqn.Config(), architecture, CATCH, replay=TABLE, **options)


@pytest.mark.parametrize(("change", "words"), [({"shards": 0}, "--replay.shards is 0"), ({"shards": 17}, "more than the 16 items")])
def test_senseless_numbers_of_shards(change, words):
    """Numbers of shards that make no sense are refused."""
    with pytest.raises(ConfigError, match=words):
        replace(TABLE, **change).validate()
