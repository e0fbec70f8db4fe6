"""Gymnasium's three autoreset modes and our own loop give one and the same stream."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from shoal import envs
from shoal.errors import ConfigError, EnvironmentError_
from tests.envs.env_toys import Counting, CountingDict, expected, record

MODES = list(AutoresetMode)
SHIFTS = (0, 1, 4)


def vector(mode, kind=Counting, copy=True):
    return lambda: SyncVectorEnv([lambda s=s: kind(s) for s in SHIFTS], autoreset_mode=mode, copy=copy)


@pytest.mark.parametrize("kind", [Counting, CountingDict])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode, kind):
    env = envs.make(vector(mode, kind), 3)
    rows, episodes = record(env, 60)
    for shift, row in zip(SHIFTS, rows, strict=True):
        assert len(row) > 35
        assert row == expected(shift, len(row))
    if mode is not AutoresetMode.NEXT_STEP:
        assert all(len(row) == 60 for row in rows)
    assert episodes[:2] == [(1.0, 1), (6.0, 3)] and len(episodes) > 40


@pytest.mark.parametrize("mode", MODES)
def test_reused_arrays(mode):
    rows, _ = record(envs.make(vector(mode, copy=False), 3), 40)
    assert all(row == expected(shift, len(row)) for shift, row in zip(SHIFTS, rows, strict=True))


@pytest.mark.parametrize("kind", [Counting, CountingDict])
def test_loop(kind):
    shifts = iter(SHIFTS)
    env = envs.make(lambda: kind(next(shifts)), 3)
    rows, episodes = record(env, 60)
    assert env.backend == "loop" and rows == [expected(shift, 60) for shift in SHIFTS]
    assert sum(length for _, length in episodes) <= 180 and episodes[:2] == [(1.0, 1), (6.0, 3)]


def test_dead_row_would_be_noticed():
    rows, _ = record(envs.make(vector(AutoresetMode.NEXT_STEP), 3), 60, trust_valid=False)
    assert any(row != expected(shift, len(row)) for shift, row in zip(SHIFTS, rows, strict=True))


def test_wrong_final_would_be_noticed(monkeypatch):
    env = envs.make(vector(AutoresetMode.SAME_STEP), 3)
    monkeypatch.setattr(env, "_final_from", lambda info, rows: ([np.zeros((len(rows), 2), np.float32)], None))
    rows, _ = record(env, 60)
    assert any(row != expected(shift, len(row)) for shift, row in zip(SHIFTS, rows, strict=True))


def test_next_step_invalid_rows():
    env = envs.make(vector(AutoresetMode.NEXT_STEP), 3)
    env.reset(seed=0)
    ended = np.zeros(3, bool)
    for _ in range(40):
        step = env.step(np.ones(3, int))
        assert (step.valid == ~ended).all() and (step.first == ended).all()
        assert (step.reward[ended] == 0).all() and (step.discount[ended] == 1).all()
        ended = step.last.copy()


def test_same_step_preferred():
    def maker(num_envs, autoreset_mode=AutoresetMode.NEXT_STEP):
        return SyncVectorEnv([Counting] * num_envs, autoreset_mode=autoreset_mode)

    assert envs.make(maker, 2).mode is AutoresetMode.SAME_STEP


def test_unknown_mode():
    def maker():
        env = SyncVectorEnv([Counting])
        env.autoreset_mode, env.metadata["autoreset_mode"] = None, "whenever"
        return env

    with pytest.raises(ConfigError, match="unknown autoreset mode 'whenever'"):
        envs.make(maker, 1)


def test_missing_final_observation():
    class Forgetful(gym.vector.VectorWrapper):
        def step(self, actions):
            *rest, _ = self.env.step(actions)
            return *rest, {}

    env = envs.make(lambda: Forgetful(vector(AutoresetMode.SAME_STEP)()), 3)
    with pytest.raises(EnvironmentError_, match="truncated without info"):
        record(env, 10)


def test_second_reset():
    env = envs.make(vector(AutoresetMode.NEXT_STEP), 3)
    record(env, 3)
    step = env.reset()
    assert step.first.all() and step.valid.all() and not step.last.any() and (step.reward == 0).all()
    assert env.step(np.ones(3, int)).valid.all()


def test_gymnasiums_cartpole():
    """NEXT_STEP only, 500 steps at most: lengths counted by the stream agree with the truth."""
    env = envs.make("CartPole-v1", 16, backend="vector", max_episode_steps=30)
    assert env.backend == "vector" and env.mode is AutoresetMode.NEXT_STEP
    step = env.reset(seed=3)
    length, rng, seen = np.zeros(16, int), np.random.default_rng(0), []
    for _ in range(300):
        step = env.step(rng.integers(0, 2, 16))
        length += step.valid
        assert (step.reward == step.valid).all()
        assert sorted(step.episode_length) == sorted(length[step.last])
        assert (length[step.truncated] == 30).all() and (length[step.last] <= 30).all()
        seen += length[step.last].tolist()
        length[step.last] = 0
    assert len(seen) > 100 and 30 in seen
