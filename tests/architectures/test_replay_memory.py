"""What a table takes of memory: images come back bit for bit, what is counted is what is taken, and the warning comes in time."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from shoal import replay
from shoal.algorithms import dqn, r2d2
from shoal.nets import NetConfig
from shoal.replay.table.replay_core import Core
from shoal.roles import replay as role
from shoal.roles.replay_config import ReplayConfig
from shoal.roles.replay_memory import FIRST_LOOK, SLOT_BYTES, MemoryForecast, capacity_for, chosen_compression, codecs, table_bytes
from shoal.roles.replay_wires import Block, items_layout, store, stored_columns
from shoal.slots import Field, Layout
from tests.architectures.graphs import go, train
from tests.architectures.replay_table import ITEM, program_of
from tests.runtime.harness import Watch

SIDE, SOME = 64, 10
FRAMES = Layout({"after": Field((1, 3, SIDE, SIDE), "u1"), "before": Field((1, 3, SIDE, SIDE), "u1"), "few": Field((1, 9), "u1"),
                 "noise": Field((1, SIDE, SIDE), "u1"), "reward": Field((1,), "f4"), "state": Field((1, 512), "f4")})
COLUMNS = stored_columns(FRAMES)


def table_of(compression, items=0, **options):
    made = replay.Table("t", replay.Prioritized(0.6), replay.Fifo(), **{"max_size": 10**6, "limiter": replay.MinSize(1), **options})
    core = Core([made], compression=codecs(COLUMNS, compression), seed=3)
    rng = np.random.default_rng(1)
    for first in range(0, items, SOME):
        put(core, rng, first)
    return core


def put(core, rng, first):
    """A square that moves, a screen of noise, and the number of the item."""
    items = FRAMES.joined(SOME).empty()
    for i in range(SOME):
        for at in range(3):
            x = (first + i + at) % (SIDE - 8)
            items["before"][i, at, x:x + 8, x:x + 8] = 200
            items["after"][i, at, x + 1:x + 9, x:x + 8] = 201
    items["noise"][:] = rng.integers(0, 256, items["noise"].shape)
    items["state"][:] = rng.normal(size=items["state"].shape)
    items["reward"][:] = np.arange(first, first + SOME)
    store(core, core.table("t"), COLUMNS, items, rng.random(SOME) + 0.1)


def batch_of(core, count):
    block = Block(np.full(items_layout(FRAMES, count).nbytes, 7, np.uint8))
    core.try_sample("t", count, block, True, items_layout(FRAMES, count))
    return block.memory


def test_only_images_are_compressed():
    assert codecs(COLUMNS, "none") == {} and codecs(stored_columns(Layout({"x": Field((1, 9000), "f4")})), "auto") == {}
    assert codecs(COLUMNS, "auto") == dict.fromkeys(("after", "before", "noise"), "lz4+rows")
    assert codecs(COLUMNS, "zstd") == dict.fromkeys(("after", "before", "noise"), "zstd+rows")


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_same_bits_with_any_compression(compression):
    """The same bits come out whatever the compression."""
    plain, small = table_of("none", 300), table_of(compression, 300)
    for _ in range(5):
        assert (batch_of(plain, 64) == batch_of(small, 64)).all()
    noise = 300 * SIDE * SIDE  # stays as it is
    assert noise < small.table("t").nbytes < plain.table("t").nbytes - 300 * 6 * SIDE * SIDE * 0.9


def test_no_decompressed_copies_kept():
    core = table_of("lz4", 2000)
    before = core.store.pool.used_bytes
    for _ in range(20):
        batch_of(core, 512)
    assert core.store.pool.used_bytes == before and not core.store._decoded


def test_what_was_removed_is_given_back():
    core = table_of("lz4", 3000, max_size=500)
    assert core.table("t").size == 500 and len(core.store._encoded) == 2 * 50, "two images, in 50 inserts; noise is not encoded"
    assert core.table("t").nbytes < 1.1 * table_of("lz4", 500).table("t").nbytes


@pytest.mark.parametrize("items", [ITEM, FRAMES])
def test_bytes_of_a_full_table(items):
    """What is counted for a full table is what it takes."""
    columns, config = stored_columns(items), ReplayConfig(capacity=25 * SOME, insert_batch=SOME, compression="none")
    core = Core([replay.Table("t", replay.Prioritized(0.6), replay.Fifo(), max_size=config.capacity, limiter=replay.MinSize(1))])
    for _ in range(30):
        store(core, core.table("t"), columns, items.joined(SOME).empty(), np.ones(SOME))
    data = core.table("t").nbytes
    assert core.table("t").size == config.capacity and table_bytes(columns, config) == data + config.capacity * SLOT_BYTES
    assert data <= core.store.pool.used_bytes < 1.2 * data, "blocks are larger than what is in them, by an eighth at most"
    assert table_bytes(columns, replace(config, checkpoint=True)) == table_bytes(columns, config), "it is saved without a copy"


def test_slot_takes_no_more_than_is_counted():
    core = Core([replay.Table("t", replay.Prioritized(0.6), replay.Fifo(), max_size=100_000, limiter=replay.MinSize(1))])
    columns = stored_columns(Layout({"x": Field((1,), "f4")}))
    for _ in range(110):
        store(core, core.table("t"), columns, {"x": np.zeros(1000, np.float32)}, np.ones(1000))
    arrays = core.table("t").state._asdict()
    assert sum(arrays[name].nbytes for name in arrays if name not in ("values", "words")) <= SLOT_BYTES * 100_000


@pytest.mark.parametrize("shards", [1, 3])
def test_the_largest_capacity_that_fits(shards):
    def full(capacity):
        return table_bytes(COLUMNS, ReplayConfig(capacity=capacity, insert_batch=SOME, compression="none", shards=shards))

    most = capacity_for(COLUMNS, ReplayConfig(insert_batch=SOME, compression="none", shards=shards), 10**9)
    assert full(most) <= 10**9 < full(most + 1)


def test_table_that_is_never_full():
    """A table that a run cannot fill counts for what it can."""
    config = ReplayConfig(capacity=10**6, insert_batch=SOME, compression="none")
    assert table_bytes(COLUMNS, config, 20_000) == table_bytes(COLUMNS, replace(config, capacity=20_000))
    assert table_bytes(COLUMNS, config, 10**7) == table_bytes(COLUMNS, config) == table_bytes(COLUMNS, config, None)


# ------------------------------------------------------------------ the forecast
def fake(size, nbytes):
    return SimpleNamespace(size=size, nbytes=nbytes)


def grown(config, each, free, together=1, upto=10**6, budget=None):
    """What is said while a table grows, and when."""
    table, said = fake(0, 0), []
    forecast = MemoryForecast(table, config, together, lambda: free - together * each * table.size,
                              lambda text: said.append((table.size, text)), budget)
    for table.size in range(50, upto, 50):
        table.nbytes = (each - SLOT_BYTES) * table.size
        forecast.look()
    return said


def test_warning_comes_once_and_early():
    """A table that will not fit is reported once, and long before."""
    config = ReplayConfig(capacity=2_000_000)
    ((size, text),) = grown(config, 10_000, 10**10)  # a million items fit
    assert size <= FIRST_LOOK and re.search("5,000 items take 0.05 GB, .* full table would take 20 GB, and 9.95 GB are free", text)
    fits = int(re.search(r"give --replay.capacity (\d+) or fewer", text)[1])
    assert fits == 900_000, "nine tenths of what there is"
    assert not grown(ReplayConfig(capacity=fits), 10_000, 10**10)
    assert grown(ReplayConfig(capacity=fits + 1000), 10_000, 10**10)
    assert not grown(config, 10_000, 10**10, budget=fits), "a run that ends before the table is full"


def test_warning_for_large_items():
    """Large items are reported before there are many."""
    ((size, _),) = grown(ReplayConfig(capacity=100_000), 3_500_000, 20 * 10**9, upto=3_000)
    assert size * 3_500_000 < 0.03 * 20e9, "after a few per cent of the memory"


def test_items_that_grow_are_told_of_later():
    table, said = fake(0, 0), []
    forecast = MemoryForecast(table, ReplayConfig(capacity=10**6), 1, lambda: 10**10, said.append)
    for table.size, each, told in ((5_000, 1_000, 0), (9_000, 1_000, 0), (10_000, 20_000, 1), (20_000, 20_000, 1)):
        table.nbytes = table.size * each
        forecast.look()
        assert len(said) == told


def test_shards_share_a_machines_memory():
    """Shards on one machine share its memory; others do not."""
    config = ReplayConfig(capacity=2_000_000, shards=4)
    ((_, text),) = grown(config, 10_000, 10**10, together=4)
    assert "full table would take 20 GB" in text and "--replay.capacity 900000 or fewer" in text
    assert not grown(config, 10_000, 10**10, together=1), "a quarter of it is on this machine"


def test_the_role_says_it_to_the_event_log(tmp_path, monkeypatch):
    monkeypatch.setattr(role, "free_memory", lambda: 10**8)
    config = ReplayConfig(capacity=10**6, min_size=100, batch_size=16, insert_batch=10, samples_per_insert=4.0, compression="none")
    watch = go(program_of(config), "inline", tmp_path, Watch(lambda c: c.total("replay_inserts") >= 3000, seconds=60))
    said = [event["text"] for event in watch.events if event["kind"] == "note" and "--replay.capacity" in event["text"]]
    assert watch.reason == "until" and len(said) == 1 and "give --replay.capacity" in said[0]


@pytest.mark.parametrize("spread", [False, True])
def test_one_shard_warns_for_all(spread, tmp_path, monkeypatch):
    """Full, each takes 43 MB. There is room for one of them."""
    monkeypatch.setattr(role, "free_memory", lambda: 65 * 10**6)
    config = ReplayConfig(capacity=20_000, min_size=100, batch_size=16, insert_batch=10, samples_per_insert=4.0, compression="none",
                          shards=2)
    program = program_of(config)
    arguments = program.nodes["replay"].arguments
    arguments["parts"] = replace(arguments["parts"], spread=spread)
    watch = go(program, "inline", tmp_path, Watch(lambda c: c.total("replay_inserts") >= 1500, seconds=60))
    said = [event["text"] for event in watch.events if event["kind"] == "note" and "--replay.capacity" in event["text"]]
    assert watch.reason == "until" and len(said) == (0 if spread else 1)


# ------------------------------------------------------------------ training
class Screen(gym.Env):
    """A square on a grey ground, to be moved to the left."""

    observation_space = gym.spaces.Box(0, 255, (1, SIDE, SIDE), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = int(self.np_random.integers(8, 40)), 0
        return self._look(), {}

    def step(self, action):
        self.x, self.t = self.x + (2 if action else -2), self.t + 1
        return self._look(), float(-self.x) / SIDE, self.x < 4 or self.x > 50, self.t >= 12, {}

    def _look(self):
        screen = np.full((1, SIDE, SIDE), 60, np.uint8)
        screen[0, 20:30, self.x:self.x + 6] = 255
        return screen


def test_compressed_where_memory_is_short():
    config = ReplayConfig(capacity=1_000, insert_batch=SOME)
    full = table_bytes(COLUMNS, replace(config, compression="none"))
    assert chosen_compression(COLUMNS, config, None, 2 * full) == "none"
    assert chosen_compression(COLUMNS, config, None, 2 * full - 1) == "lz4"
    assert chosen_compression(COLUMNS, config, 100, full) == "none", "the run is too short to fill it"
    assert chosen_compression(COLUMNS, replace(config, compression="zstd"), None, 10**12) == "zstd"


LITTLE = {"capacity": 200, "min_size": 32, "batch_size": 8, "insert_batch": 4, "samples_per_insert": 2.0}


@pytest.mark.parametrize(("algorithm", "net"), [
    (dqn.Config(n_step=3, target_period_updates=5), {}),
    (r2d2.Config(burn_in=2, length=4, stride=2, target_period_updates=5), {"recurrent": "lstm", "lstm_size": 8})])
def test_same_weights_with_compression(algorithm, net, tmp_path):
    """Training gives the same weights with and without compression."""
    runs = [train(tmp_path, algorithm, "actor_learner", Screen, "inline", updates=6,
                  net=NetConfig(torso="nature", **net), envs_per_actor=2, replay=ReplayConfig(**LITTLE, compression=kind))
            for kind in ("none", "lz4", "zstd")]
    assert {run.reason for run in runs} == {"counted"} and len({run.hash for run in runs}) == 1
    sizes = [run.final["replay-0"]["replay_bytes"] / run.final["replay-0"]["replay_size"] for run in runs]
    assert sizes[0] > SIDE * SIDE and max(sizes[1:]) < 0.2 * sizes[0]
