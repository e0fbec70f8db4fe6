"""The dataset reader: each item once in an epoch, within its memory, and the same after a resume; a file that disappears."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from shoal import algorithms
from shoal.algorithms import bc
from shoal.envs.recorded_env import RecordedEnv
from shoal.nets import NetConfig
from shoal.offline import DemoWriter, Episode, RecordingInfo
from shoal.offline.data_config import DataConfig
from shoal.roles.dataset_reader import DatasetReader, windows_of
from shoal.roles.parts import EnvSource, Parts
from shoal.roles.replay_config import ReplayConfig
from shoal.slots import Layout
from tests.architectures.test_demos import fake_me

ENV = RecordedEnv("numbers", gym.spaces.Box(-np.inf, np.inf, (1,), np.float32), gym.spaces.Discrete(2))
FILES, EPISODES, STEPS, BATCH = 6, 3, 5, 8
TOTAL = FILES * EPISODES * STEPS


def numbered(path):
    """A recording in several files in which every observation is another number."""
    info, at = RecordingInfo(ENV.name, ENV.observation_space, ENV.action_space, kwargs={}), 0
    writer = DemoWriter.create(path, info, {})
    for _ in range(FILES):
        for _ in range(EPISODES):
            seen = np.arange(at, at + STEPS + 1, dtype=np.float32)[:, None]
            ends = np.arange(STEPS) == STEPS - 1
            writer.add(Episode(seen, np.zeros(STEPS, np.int64), np.ones(STEPS, np.float32), ends, ~ends & False))
            at += 10
        writer.flush()
    return path


@pytest.fixture
def reader(tmp_path):
    def made(memory_mb=1024.0, seed=0, normalised=False):
        algorithm = algorithms.make(bc.Config(normalise_observations=normalised), ENV.describe(), NetConfig(hidden=(4,)), 1)
        parts = Parts(algorithm, EnvSource(ENV), 1, seed=seed, demos=str(path), offline=True, data=DataConfig(memory_mb),
                      replay=ReplayConfig(batch_size=BATCH, exponent=0.0))
        return DatasetReader(me, parts, None)

    failures: list[str] = []
    me = SimpleNamespace(**{**vars(fake_me()), "fail": failures.append})
    me.stats.phase = lambda name: nullcontext()
    path = numbered(tmp_path / "x")
    return SimpleNamespace(make=made, path=path, failures=failures)


def drawn(reader, batches):
    """The observations of the next batches."""
    fields = {"items": reader.layout.nbytes}
    found = []
    for _ in range(batches):
        answer = {"items": np.zeros(fields["items"], np.uint8), "key": np.zeros(BATCH, np.int64), "probability": np.zeros(BATCH),
                  "table_size": np.zeros(BATCH, np.int64), "fresh": np.zeros(1, np.int64)}
        if reader.record.observation_moments:
            from shoal.roles.observation_moments import moments_fields

            answer |= Layout(moments_fields(1)).empty()
        reader._answer(answer)
        assert (answer["probability"] * answer["table_size"] == 1).all()
        found.append((reader.layout.views(answer["items"])["observation"][:, 0].copy(), answer))
    return found


ITEM = 36  # bytes
SMALL = 5 * EPISODES * STEPS * ITEM / 1e6  # five of six files


@pytest.mark.parametrize("memory", [1024.0, SMALL])
def test_each_item_once_per_epoch(reader, memory):
    made = reader.make(memory)
    assert (made.most < TOTAL) == (memory == SMALL)
    seen = np.concatenate([rows for rows, _ in drawn(made, 3 * TOTAL // BATCH + 1)])
    epochs = [seen[k * TOTAL : (k + 1) * TOTAL] for k in range(3)]
    assert all(len(np.unique(one)) == TOTAL for one in epochs) and not (epochs[0] == epochs[1]).all()
    assert made.epoch == 3
    again = reader.make(memory, seed=1)
    assert not (drawn(again, 1)[0][0] == seen[:BATCH]).all()


@pytest.mark.parametrize("memory", [1024.0, SMALL])
@pytest.mark.parametrize("before", [1, 7, 12, 29])
def test_resumed_reader(reader, memory, before):
    """A resumed reader goes on with the very next item."""
    one, other = reader.make(memory), reader.make(memory)
    drawn(one, before)
    other.load(one.state())
    for (rows, _), (same, _) in zip(drawn(one, 20), drawn(other, 20), strict=True):
        np.testing.assert_array_equal(rows, same)


def test_two_windows_in_memory(reader):
    """Two windows are in memory and the next is ready when it is needed."""
    made = reader.make(SMALL)
    for _ in range(40):
        drawn(made, 1)
        held = made.current.size + (made.following.size if made.following is not None else 0)
        assert held * ITEM <= SMALL * 1e6
        if made.following is not None:
            assert made.following.cut * made.current.size >= made.following.size * made.current.drawn


def test_observations_count_once(reader):
    """Observations count once for the statistics."""
    for memory in (1024.0, SMALL):
        made = reader.make(memory, normalised=True)
        counts = [float(answer["observation_moments"]["count"].sum()) for _, answer in drawn(made, 3 * TOTAL // BATCH)]
        assert sum(counts) == TOTAL


def test_file_disappears(reader):
    made = reader.make(SMALL)
    drawn(made, 1)
    for file in reader.path.glob("episodes-*.safetensors"):
        file.unlink()

    class Asked:
        async def take(self, most):
            return [SimpleNamespace(answer={"items": np.zeros(made.layout.nbytes, np.uint8), "key": np.zeros(BATCH, np.int64),
                                            "probability": np.zeros(BATCH), "table_size": np.zeros(BATCH, np.int64),
                                            "fresh": np.zeros(1, np.int64)}, reply=lambda answer: None)]

    made.samples = Asked()
    for _ in range(TOTAL // BATCH):
        with pytest.raises(StopIteration):
            made.step().send(None)
    assert "copy the recording again" in reader.failures[0]


def test_recording_that_has_changed(reader):
    """A recording that has changed is read from the beginning."""
    made = reader.make()
    notes = []
    made.me = SimpleNamespace(**{**vars(made.me), "note": notes.append})
    made.load({"place": np.array([3, 0, 7, 1, TOTAL + 1])})
    assert made.epoch == 0 and "has changed" in notes[0]


def test_too_little_memory_is_a_sentence(reader):
    reader.make(2 * EPISODES * STEPS * ITEM / 1e6)
    assert "three times as much is needed" in reader.failures[0] and "--data.memory-mb 0.00162" in reader.failures[0]


def test_windows_hold_whole_files():
    assert windows_of([3, 3, 3, 9], np.array([2, 3, 0, 1]), 6) == [[2], [3], [0, 1]]
