"""The dataset reader: each item once in an epoch, within its memory, and the same after a resume; a file that disappears."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from shoal import algorithms
from shoal.algorithms import bc
from shoal.algorithms.records.moments import observation_moment_fields
from shoal.envs.recorded_env import RecordedEnv
from shoal.nets import NetConfig
from shoal.offline import DemoWriter, Episode, RecordingInfo
from shoal.offline.data_config import DataConfig
from shoal.roles.dataset_reader import DatasetReader, windows_of
from shoal.roles.parts import EnvSource, Parts
from shoal.roles.recorded_moments import reply_fields
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


def reader_of(path, failures, memory_mb=1024.0, seed=0, normalised=False, index=0, replicas=1):
    """A reader of this recording; what it fails with is added to a list."""
    algorithm = algorithms.make(bc.Config(normalise_observations=normalised), ENV.describe(), NetConfig(hidden=(4,)), 1)
    parts = Parts(algorithm, EnvSource(ENV), 1, seed=seed, demos=str(path), offline=True, data=DataConfig(memory_mb),
                  replay=ReplayConfig(batch_size=BATCH, exponent=0.0))
    me = SimpleNamespace(**{**vars(fake_me()), "fail": failures.append}, index=index, replicas=replicas)
    me.stats.phase = lambda name: nullcontext()
    return DatasetReader(me, parts, None)


@pytest.fixture
def reader(tmp_path):
    failures: list[str] = []
    path = numbered(tmp_path / "x")
    return SimpleNamespace(make=partial(reader_of, path, failures), path=path, failures=failures)


def failing(made, steps):
    """Ask for as many batches."""

    class Asked:
        async def take(self, most):
            return [SimpleNamespace(answer=an_answer(made), data=a_question(), reply=lambda answer: None)]

    made.samples = Asked()
    for _ in range(steps):
        with pytest.raises(StopIteration):
            made.step().send(None)


def a_question(count=BATCH, counted=(1, 0, 0, 0)):
    """A learner's; as if of its first session."""
    return {"wanted": np.array([count]), "counted": np.array(counted)}


def an_answer(reader):
    """Memory for a batch."""
    answer = {"items": np.zeros(reader.layout.nbytes, np.uint8), "key": np.zeros(BATCH, np.int64), "probability": np.zeros(BATCH),
              "table_size": np.zeros(BATCH, np.int64), "fresh": np.zeros(1, np.int64), "mass": np.zeros(1)}
    return answer | (Layout(observation_moment_fields(1) | reply_fields()).empty() if reader.record.observation_moments else {})


def drawn(reader, batches, count=BATCH, counted=(1, 0, 0, 0)):
    """The observations of the next batches."""
    found = []
    for _ in range(batches):
        answer = an_answer(reader)
        reader._answer(a_question(count, counted), answer)
        assert (answer["probability"] * answer["table_size"] == 1).all() and answer["mass"][0] == reader.total
        found.append((reader.layout.views(answer["items"])["observation"][:count, 0].copy(), answer))
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


@pytest.mark.parametrize("memory", [1024.0, 4 * SMALL])
def test_several_readers_share_the_files(reader, memory):
    """Together they draw each item once in an epoch; each has its own order, and its share of the memory."""
    two = [reader.make(memory, index=index, replicas=2) for index in range(2)]
    assert [one.total for one in two] == [TOTAL // 2] * 2 and not reader.failures
    seen = [np.concatenate([rows for rows, _ in drawn(one, TOTAL // 2, count=1)]) for one in two]
    assert len(np.unique(np.concatenate(seen))) == TOTAL
    reader.make(2 * SMALL / 5, index=1, replicas=2)
    assert "three times as much is needed for each reader" in reader.failures[0]


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


@pytest.mark.parametrize("memory", [1024.0, SMALL])
@pytest.mark.parametrize("before", [0, 1, 5, 7, 12, 29])
def test_observations_count_once_after_a_resume(reader, memory, before):
    """Also if the checkpoint was made before the first batch, or in the middle of the first epoch."""
    one, other = reader.make(memory, normalised=True), reader.make(memory, normalised=True)
    answers = drawn(one, before)
    other.load(one.state())
    answers += drawn(other, 3 * TOTAL // BATCH, counted=(2, *(answers[-1][1]["counted"][2:] if answers else (0, 0, 0))))
    assert sum(float(answer["observation_moments"]["count"].sum()) for _, answer in answers) == TOTAL


def test_file_disappears(reader):
    made = reader.make(SMALL)
    drawn(made, 1)
    for file in reader.path.glob("episodes-*.safetensors"):
        file.unlink()
    failing(made, TOTAL // BATCH)
    assert "copy the recording again" in reader.failures[0]


def test_recording_that_has_changed(reader):
    """A recording that has changed is read from the beginning."""
    made = reader.make()
    notes = []
    made.me = SimpleNamespace(**{**vars(made.me), "note": notes.append})
    made.load({"place": np.array([3, 0, 7, 1, TOTAL + 1])})
    assert made.epoch == 0 and "has changed" in notes[0]


@pytest.mark.parametrize(("then", "now"), [(SMALL, 1024.0), (1024.0, SMALL)])
def test_other_memory_after_a_resume(reader, then, now):
    """The windows are others: the recording is read from the beginning, and what was counted is not counted again."""
    one, other, notes = reader.make(then, normalised=True), reader.make(now, normalised=True), []
    *_, (_, last) = drawn(one, 3 * TOTAL // BATCH)
    other.me = SimpleNamespace(**{**vars(other.me), "note": notes.append})
    other.load(one.state())
    seen = drawn(other, TOTAL // BATCH, counted=(2, *last["counted"][2:]))
    assert "--data.memory-mb" in notes[0] and len(np.unique(np.concatenate([rows for rows, _ in seen]))) == len(seen) * BATCH
    assert not any(answer["observation_moments"]["count"].any() for _, answer in seen)


def test_too_little_memory_is_a_sentence(reader):
    reader.make(2 * EPISODES * STEPS * ITEM / 1e6)
    assert "three times as much is needed" in reader.failures[0] and "--data.memory-mb 0.00162" in reader.failures[0]


def test_windows_hold_whole_files():
    assert windows_of([3, 3, 3, 9], np.array([2, 3, 0, 1]), 6) == [[2], [3], [0, 1]]
