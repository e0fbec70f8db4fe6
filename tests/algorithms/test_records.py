"""Unrolls: what is written where, the overlap of one observation, true last observations, moments."""

import gymnasium as gym
import numpy as np
import pytest

from shoal.algorithms.actor_critic.unroll_batch import UnrollBatch
from shoal.algorithms.records.unroll import Unroll
from shoal.envs.interface import Step
from shoal.errors import ConfigError

BOX = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
DICT = gym.spaces.Dict({"a": BOX, "b": gym.spaces.Dict({"image": gym.spaces.Box(0, 255, (2, 2), np.uint8)})})


class Counting:
    """Seat b counts its steps: x = [episode, step]. Episodes of seat b are truncated after `limits[b]` steps."""

    def __init__(self, limits, space=BOX):
        self.limits, self.space, self.seats = np.array(limits), space, len(limits)
        self.episode, self.age = np.zeros(self.seats), np.zeros(self.seats)

    def observe(self, rows=slice(None)):
        x = np.stack([self.episode, self.age], 1).astype(np.float32)[rows]
        if self.space is BOX:
            return x
        return {"a": x, "b": {"image": np.repeat(x[:, :1], 4, 1).reshape(-1, 2, 2).astype(np.uint8)}}

    def reset(self):
        none, all_ = np.zeros(self.seats, bool), np.ones(self.seats, bool)
        return Step(
            self.observe(), np.zeros(self.seats, np.float32), np.ones(self.seats, np.float32), all_, none, none, all_
        )

    def step(self, action):
        self.age += 1
        last = self.age >= self.limits
        rows = np.flatnonzero(last)
        final = self.observe(rows) if len(rows) else None
        reward = self.age.astype(np.float32) + 100 * np.asarray(action, np.float32)
        self.episode[rows] += 1
        self.age[rows] = 0
        return Step(
            self.observe(),
            reward,
            np.ones(self.seats, np.float32),
            last.copy(),
            last.copy(),
            last.copy(),
            np.ones(self.seats, bool),
            rows,
            final,
        )


def collect(record, env, unrolls, step=None, recorder=None):
    recorder = recorder or record.recorder()
    step = step or env.reset()
    out = []
    for n in range(unrolls):
        data = record.layout.empty()
        state = {name: np.full((record.seats, *shape), n, np.float32) for name, shape in record.state.items()}
        recorder.begin(data, step, state, n)
        for t in range(record.length):
            recorder.view(step)
            action = np.arange(record.seats) % 2
            step = env.step(action)
            recorder.write(t, action, {"log_prob": np.full(record.seats, -t, np.float32)}, step, n)
        out.append(data)
    return out


def unroll(length=4, seats=3, space=BOX, **more):
    return Unroll(length, seats, space, gym.spaces.Discrete(2), **more)


def test_round_trip_overlap_and_truncation():
    record = unroll(state={"h": (5,)}, max_episode_steps=3)
    one, two = collect(record, Counting([3, 100, 5]), 2)
    assert one["observation"].shape == (5, 3, 2) and one["action"].dtype == np.int64
    np.testing.assert_array_equal(one["observation"][-1], two["observation"][0])  # exactly one row is shared
    np.testing.assert_array_equal(one["first"][-1], two["first"][0])
    np.testing.assert_array_equal(one["observation"][:, 0], [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]])
    np.testing.assert_array_equal(one["first"][:, 0], [True, False, False, True, False])
    np.testing.assert_array_equal(
        one["reward"][:, 1], [101, 102, 103, 104]
    )  # action 1 adds 100, age follows the action
    np.testing.assert_array_equal(one["truncated"][:, 0], [False, False, True, False])
    assert one["final_index"][2, 0] == 0 and (np.delete(one["final_index"].ravel(), 6) == -1).all()
    np.testing.assert_array_equal(one["final_observation"][0], [0, 3])  # not [1, 0], the one after the reset
    np.testing.assert_array_equal(two["final_observation"][two["final_index"][0, 2]], [0, 5])
    np.testing.assert_array_equal(two["final_observation"][two["final_index"][1, 0]], [1, 3])
    assert (two["state"]["h"] == 1).all() and (two["weights_version"] == 1).all()
    assert (np.diff(one["time"][:, 0]) >= 0).all()
    np.testing.assert_array_equal(one["extras"]["log_prob"][:, 2], [0, -1, -2, -3])


def test_joined_slots_keep_final_rows():
    record = unroll(max_episode_steps=3)
    slots = collect(record, Counting([3, 100, 5]), 3)
    joined = record.layout.joined(3)
    batch = joined.empty()
    for position, slot in enumerate(slots):
        record.layout.gather(batch, position, slot)
    finals = UnrollBatch.of(batch, record.seats, record.final_capacity).finals
    seen = {(int(t), int(b)): x.tolist() for t, b, x in zip(finals.t, finals.b, finals.observation, strict=True)}
    assert seen == {(2, 0): [0, 3], (0, 5): [0, 5], (1, 3): [1, 3], (0, 6): [2, 3], (1, 8): [1, 5], (3, 6): [3, 3]}


def test_dictionaries():
    record = unroll(space=DICT, max_episode_steps=3)
    one, two = collect(record, Counting([3, 100, 5], DICT), 2)
    np.testing.assert_array_equal(one["observation"]["a"][:, 0, 1], [0, 1, 2, 0, 1])
    assert one["observation"]["b"]["image"].dtype == np.uint8
    assert (two["observation"]["b"]["image"][:, 0] == np.array([1, 1, 2, 2, 2])[:, None, None]).all()
    row = one["final_index"][2, 0]
    np.testing.assert_array_equal(one["final_observation"]["a"][row], [0, 3])
    assert (one["final_observation"]["b"]["image"][row] == 0).all()


def test_room_for_final_observations():
    assert unroll(20, 8, max_episode_steps=500).final_capacity == 8
    assert unroll(501, 8, max_episode_steps=500).final_capacity == 16
    assert unroll(20, 8).final_capacity == 160  # a row is 8 bytes
    assert unroll(20, 8, gym.spaces.Box(0, 255, (84, 84), np.uint8)).final_capacity == 24
    assert unroll(20, 8, final_rows=5).final_capacity == 5
    with pytest.raises(ConfigError, match="final_rows"):
        collect(unroll(final_rows=1), Counting([1, 1, 1]), 1)


def test_previous_action_and_reward():
    record = unroll(previous=True)
    one, two = collect(record, Counting([3, 100, 5]), 2)
    np.testing.assert_array_equal(one["prev_action"][:, 1], [0, 1, 1, 1, 1])
    np.testing.assert_array_equal(one["prev_reward"][:, 1], [0, 101, 102, 103, 104])
    np.testing.assert_array_equal(one["prev_reward"][:, 0], [0, 1, 2, 0, 1])  # an episode begins without
    np.testing.assert_array_equal(one["prev_reward"][-1], two["prev_reward"][0])


def test_last_observation_after_execution():
    """Not the one that was chosen: the net sees what the environment did, here as everywhere."""
    record = unroll(previous=True)
    env, recorder, data = Counting([3, 100, 3]), record.recorder(), record.layout.empty()
    step = env.reset()
    recorder.begin(data, step, {}, 0)
    for t in range(4):
        chosen = np.zeros(3, int)
        step = env.step(chosen)
        step.executed_action = np.array([1, 1, t])
        recorder.write(t, chosen, {"log_prob": np.zeros(3, np.float32)}, step, 0)
    batch = UnrollBatch.of(data, record.seats, record.final_capacity)
    assert (batch.action == 0).all()
    np.testing.assert_array_equal(batch.prev_action[1:3, 2], [0, 1])
    assert dict(zip(batch.finals.b.tolist(), batch.finals.prev_action.tolist(), strict=True)) == {0: 1, 2: 2}


def test_moments_are_those_of_the_data():
    record = unroll(length=7, observation_moments=2, return_moments=True, gamma=0.9)
    slots = collect(record, Counting([3, 100, 5]), 4)
    values = np.concatenate([slot["observation"][:-1].reshape(-1, 2) for slot in slots]).astype(np.float64)
    from shoal.algorithms.common.normaliser import Normaliser

    normaliser, returns = Normaliser({}, "x", 2), Normaliser({}, "r", 1)
    for pair in (slots[:2], slots[2:]):  # two learners' sums added, twice
        normaliser.merge(sum(normaliser.sums(slot["observation_moments"]) for slot in pair))
        returns.merge(sum(returns.sums(slot["return_moments"]) for slot in pair))
    normaliser.freeze()
    np.testing.assert_allclose(normaliser.mean.numpy(), values.mean(0), rtol=1e-6)
    np.testing.assert_allclose(1 / normaliser.scale.numpy(), values.std(0), rtol=1e-5)
    running, all_returns = np.zeros(3), []
    for slot in slots:
        for reward, last in zip(slot["reward"].astype(np.float64), slot["last"], strict=True):
            running = 0.9 * running + reward
            all_returns.append(running.copy())
            running[last] = 0
    returns.freeze()
    np.testing.assert_allclose(1 / returns.scale.numpy(), np.std(all_returns), rtol=1e-5)


def test_what_is_not_valid_does_not_count():
    record = unroll(length=2, seats=2, observation_moments=2)
    recorder, data = record.recorder(), record.layout.empty()
    env = Counting([9, 9])
    step = env.reset()
    recorder.begin(data, step, {}, 0)
    for t in range(2):
        step = env.step(np.zeros(2))
        step.valid = np.array([True, False])
        recorder.write(t, np.zeros(2), {"log_prob": np.zeros(2)}, step, 0)
    assert data["observation_moments"]["count"].item() == 2
    np.testing.assert_allclose(
        data["observation_moments"]["shift"][0] + data["observation_moments"]["sum"][0] / 2, [0, 0.5]
    )
