"""Environments in several processes: the same rows, and nothing is left of them."""

import os

import gymnasium as gym
import numpy as np
import psutil
import pytest

from shoal.envs import make
from shoal.envs.split_env import SplitEnv
from shoal.errors import EnvironmentError_


class Numbered(gym.Env):
    """Ends after as many steps as its seed says; truncated where that is odd."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.length = 0, 2 + int(self.np_random.integers(4))
        return np.array([os.getpid(), 0], np.float32), {}

    def step(self, action):
        if action == 8:
            raise RuntimeError("eight")
        self.steps += 1
        over = self.steps == self.length
        info = {"executed_action": 0} if action == 7 else {}
        return np.array([os.getpid(), self.steps], np.float32), float(action), over and self.length % 2 == 0, over, info


@pytest.fixture
def split():
    before = set(psutil.Process().children())  # of other tests in this process
    env = SplitEnv(lambda count: make(Numbered, count), 5, 3)
    yield env
    env.close()
    assert set(psutil.Process().children()) <= before, "a child is left"


def test_rows_keep_their_places(split):
    first = split.reset(seed=4)
    pids = first.observation[:, 0].tolist()
    assert split.num_seats == 5 and pids[0] == np.float32(os.getpid())
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 1]
    lengths, returns = np.zeros(5, int), np.zeros(5)
    for _ in range(12):
        step = split.step(np.arange(5))
        assert step.reward.tolist() == [0, 1, 2, 3, 4] and step.observation[:, 0].tolist() == pids
        lengths, returns = lengths + 1, returns + step.reward
        rows = np.flatnonzero(step.last)
        assert step.episode_length.tolist() == lengths[rows].tolist() and step.episode_return.tolist() == returns[rows].tolist()
        assert step.final_rows.tolist() == np.flatnonzero(step.truncated).tolist()
        if len(step.final_rows):
            assert step.final_observation[:, 1].tolist() == lengths[step.final_rows].tolist()
        lengths[rows] = returns[rows] = 0


def test_executed_actions_by_row(split):
    split.reset(seed=4)
    assert split.step(np.array([1, 2, 3, 4, 5])).executed_action is None
    assert split.step(np.array([1, 2, 3, 4, 7])).executed_action.tolist() == [1, 2, 3, 4, 0]


def test_error_of_another_process(split):
    """An error of another process is raised here."""
    split.reset(seed=4)
    with pytest.raises(EnvironmentError_, match="eight"):
        split.step(np.array([0, 0, 0, 0, 8]))


def test_a_process_that_dies_is_an_error(split):
    split.reset(seed=4)
    os.kill(split._processes[0][0], 9)
    with pytest.raises((EnvironmentError_, ConnectionError)):
        for _ in range(3):
            split.step(np.zeros(5, int))
