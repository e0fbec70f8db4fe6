"""Observations, actions and masks in canonical form."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from shoal import envs
from shoal.errors import ConfigError, EnvironmentError_


class Echo(gym.Env):
    """Shows samples of any observation space and remembers the actions it got. Ends every third step."""

    def __init__(self, observation_space, action_space, info=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.info = info or (lambda t: {})
        self.got, self.shown, self.t = [], [], 0

    def _look(self):
        self.shown.append(self.observation_space.sample())
        return self.shown[-1], self.info(self.t)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t = 0
        return self._look()

    def step(self, action):
        assert self.action_space.contains(action), (action, self.action_space)
        self.got.append(action)
        self.t += 1
        observation, info = self._look()
        return observation, 1.0, False, self.t == 3, info


def echo(observation_space, action_space=None, info=None):
    made = []

    def maker():
        made.append(Echo(observation_space, action_space or spaces.Discrete(2), info))
        return made[-1]

    return maker, made


def both(maker, count, mode=AutoresetMode.SAME_STEP):
    """The loop and the vector stream over the same environments, one after the other."""
    yield envs.make(maker, count)
    yield envs.make(lambda: SyncVectorEnv([maker] * count, autoreset_mode=mode), count)


@pytest.mark.parametrize(
    ("space", "dtype", "shape"),
    [
        (spaces.Box(-1, 1, (3,), np.float64), np.float32, (3,)),
        (spaces.Box(0, 255, (1, 4, 4), np.uint8), np.uint8, (1, 4, 4)),
        (spaces.Box(-5, 5, (2,), np.int32), np.int32, (2,)),
        (spaces.Discrete(5), np.int64, ()),
        (spaces.MultiDiscrete([3, 4]), np.int64, (2,)),
        (spaces.MultiBinary(4), np.int8, (4,)),
    ],
)
def test_leaves(space, dtype, shape):
    maker, made = echo(space)
    for env in both(maker, 2):
        first = env.reset(seed=1)
        assert first.observation.dtype == dtype and first.observation.shape == (2, *shape)
        step = env.step(np.zeros(2, int))
        assert env.observation_space.shape == shape and env.observation_space.dtype == dtype
        shown = [one.shown[-1] for one in made[-2:]]
        np.testing.assert_allclose(step.observation, np.stack(shown).astype(dtype))


def test_integers_from_zero():
    maker, made = echo(spaces.Discrete(4, start=10), spaces.Discrete(3, start=-1))
    for env in both(maker, 2):
        assert env.action_space == spaces.Discrete(3) and env.observation_space == spaces.Discrete(4)
        env.reset(seed=0)
        step = env.step(np.array([0, 2]))
        assert [one.got[-1] for one in made[-2:]] == [-1, 1]
        assert step.observation.tolist() == [one.shown[-1] - 10 for one in made[-2:]]


def test_dict_and_tuple():
    space = spaces.Dict({"a": spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,)))), "b": spaces.Box(0, 9, (1,))})
    maker, made = echo(space)
    for env in both(maker, 3):
        env.reset(seed=0)
        for _ in range(3):
            step = env.step(np.zeros(3, int))
        assert set(step.observation) == {"a", "b"} and set(step.observation["a"]) == {"0", "1"}
        assert step.observation["a"]["1"].shape == (3, 2)
        assert step.final_rows.tolist() == [0, 1, 2]
        shown = np.stack([one.shown[-2]["b"] for one in made[-3:]])  # the last observation before the reset's
        np.testing.assert_array_equal(step.final_observation["b"], shown)
        assert env.observation_space["a"]["0"] == spaces.Discrete(3)


def test_actions():
    box, two = spaces.Box(-1, 1, (1,)), 2
    maker, made = echo(box, spaces.Box(np.float32([-2, 0]), np.float32([2, 1])))
    for env in both(maker, two):
        env.reset(seed=0)
        env.step(np.array([[9.0, 0.5], [-9.0, -1.0]]))
        np.testing.assert_array_equal(np.stack([one.got[-1] for one in made[-two:]]), [[2, 0.5], [-2, 0]])
    maker, made = echo(box, spaces.MultiDiscrete([2, 3], start=[5, 0]))
    for env in both(maker, two):
        env.reset(seed=0)
        env.step(np.array([[0, 1], [1, 2]]))
        np.testing.assert_array_equal(np.stack([one.got[-1] for one in made[-two:]]), [[5, 1], [6, 2]])
    maker, made = echo(box, spaces.MultiBinary(3))
    for env in both(maker, two):
        assert env.action_space == spaces.MultiDiscrete([2, 2, 2])
        env.reset(seed=0)
        env.step(np.array([[0, 1, 0], [1, 1, 1]]))
        np.testing.assert_array_equal(np.stack([one.got[-1] for one in made[-two:]]), [[0, 1, 0], [1, 1, 1]])


def test_wrong_actions():
    env = envs.make(echo(spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (2,)))[0], 2)
    env.reset(seed=0)
    with pytest.raises(EnvironmentError_, match=r"shape \(2,\) instead of \(2, 2\)"):
        env.step(np.zeros(2))
    with pytest.raises(EnvironmentError_, match="not finite: nan"):
        env.step(np.full((2, 2), np.nan))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_masks_in_info(mode):
    maker, _ = echo(spaces.Box(-1, 1, (1,)), spaces.Discrete(4), lambda t: {"action_mask": np.arange(4) <= t})
    for env in both(maker, 2, mode):
        step, t = env.reset(seed=0), 0
        for _ in range(10):
            np.testing.assert_array_equal(step.action_mask, [np.arange(4) <= t] * 2)
            step = env.step(np.zeros(2, int))
            t = 0 if step.first[0] else t + 1
    assert envs.describe(maker).has_action_mask and envs.describe(maker).mask_size == 4


def test_masks_in_observations():
    space = spaces.Dict({"observation": spaces.Box(0, 1, (3,)), "action_mask": spaces.MultiBinary(5)})

    class Masked(Echo):
        def _look(self):
            observation, info = super()._look()
            observation["action_mask"] = (np.arange(5) > self.t).astype(np.int8)
            return observation, info

    for env in both(lambda: Masked(space, spaces.MultiDiscrete([2, 3])), 2):
        step = env.reset(seed=0)
        assert step.observation.shape == (2, 3) and env.observation_space == spaces.Box(0, 1, (3,))
        with pytest.raises(EnvironmentError_, match="allows no action"):
            for _ in range(3):
                step = env.step(np.zeros((2, 2), int))
    assert step.action_mask.dtype == bool and step.action_mask.shape == (2, 5)


def test_unsupported_spaces():
    with pytest.raises(ConfigError, match="observation space Text"):
        envs.make(echo(spaces.Text(5))[0], 1)
    with pytest.raises(ConfigError, match="action space"):
        envs.make(echo(spaces.Box(0, 1), spaces.Dict({"a": spaces.Discrete(2)}))[0], 1)
