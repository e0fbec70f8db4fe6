"""Whole episodes: as many of every row, its first ones, with unclipped returns."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from shoal.envs import make
from shoal.envs.rollout import Rollout
from shoal.envs.vector_env import VectorEnvAdapter
from tests.envs.env_toys import ENDS, Counting


def ones(step, previous):
    return np.ones(len(step.first), int)


def expected(shift, count):
    """(return, length) of the first episodes of a Counting row: rewards are 100 x episode + t."""
    lengths = [ENDS[(episode + shift) % len(ENDS)][0] for episode in range(count)]
    return [(100.0 * episode * n + n * (n + 1) / 2, n) for episode, n in enumerate(lengths)]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_equal_share_per_row(mode):
    makers = [lambda s=s: Counting(s) for s in range(3)]
    env = VectorEnvAdapter("toy", SyncVectorEnv(makers, autoreset_mode=mode), reward_clip=1.0)
    rollout = Rollout(env, env.reset(seed=0), ones, episodes=7)
    assert rollout.remaining.tolist() == [3, 2, 2]
    found = {row: [] for row in range(3)}
    for played in rollout:
        assert np.abs(played.step.reward).max() <= 1
        for row, total, length in zip(played.finished, played.returns, played.lengths, strict=True):
            found[int(row)].append((float(total), int(length)))
    assert found == {row: expected(row, 3 if row == 0 else 2) for row in range(3)} and not rollout.remaining.any()


def test_previous_action():
    env, given = make("shoal/LureChain-v0", 2), []

    def act(step, previous):
        given.append(previous)
        return np.full(2, len(given) % 2)

    list(Rollout(env, env.reset(seed=0), act, episodes=4))
    assert given[0] is None and [one.tolist() for one in given[1:3]] == [[1, 1], [0, 0]]
