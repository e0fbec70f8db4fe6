"""Environments whose best return is known and reached at once."""

import os
import time

import gymnasium as gym
import numpy as np


class Gift(gym.Env):
    """Two steps, one point each, whatever is done."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 2
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert action in (5, 6)
        self.left -= 1
        return np.full(3, 0.5, np.float32), 1.0, self.left == 0, False, {}


class Nested(Gift):
    """A Tuple of observations, a MultiDiscrete action."""

    observation_space = gym.spaces.Tuple((gym.spaces.Box(-1.0, 1.0, (2,), np.float64), gym.spaces.Discrete(4)))
    action_space = gym.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return (np.zeros(2), 1), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action))
        self.left -= 1
        return (np.ones(2), 3), 1.0, self.left == 0, False, {}


class Poison(Gift):
    """Breaks its contract after a while."""

    steps = 0

    def step(self, action):
        self.steps += 1
        observation, reward, *rest = super().step(action)
        return (observation, float("nan") if self.steps > 200 else reward, *rest)


class Endless(Gift):
    """One point a step, and no end."""

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        return np.full(3, 0.5, np.float32), 1.0, False, False, {}


class Sleepy(Endless):
    """Episodes of 2000 slow steps: a hundred of them, side by side in one process, take a quarter of an hour."""

    def step(self, action):
        time.sleep(0.005)
        observation, reward, _, _, info = super().step(action)
        return observation, reward, self.steps >= 2000, False, info


class Unlearnable(Gift):
    """Actions that no algorithm here can do."""

    action_space = gym.spaces.Dict({"a": gym.spaces.Discrete(2)})


class Fatal(Gift):
    """Ends the process that it is in, after an episode."""

    def step(self, action):
        return super().step(action) if self.left > 1 else os._exit(9)
