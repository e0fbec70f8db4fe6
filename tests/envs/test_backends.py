"""Which back-end is chosen, ALE, envpool (through a stand-in that follows its documents), imports and speed."""

from __future__ import annotations

import subprocess
import sys
import types

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from shoal import envs
from shoal.errors import ConfigError
from tests.envs.env_toys import Counting, expected, record


def test_light_import():
    code = "import sys, shoal.envs as e, gymnasium; s = e.make('Pendulum-v1', 2); s.reset(seed=0); \
            assert not {'torch', 'numba', 'ale_py'} & set(sys.modules); gymnasium.make('shoal/Catch-v0')"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_public_names():
    assert sorted(envs.__all__) == sorted(
        ["BACKENDS", "BatchedEnv", "EnvSpec", "Finding", "MultiAgentEnv", "MultiAgentStep", "Step", "Tree", "describe",
         "describe_multi_agent", "diagnose", "make", "make_multi_agent"]
    )


@pytest.mark.parametrize(
    ("env", "backend", "limit"),
    [
        ("CartPole-v1", "vector", 500),
        ("CartPole-v0", "vector", 200),
        ("Pendulum-v1", "loop", 200),
        ("shoal/Catch-v0", "compiled", None),
        (Counting, "loop", None),
        (lambda: gym.wrappers.TimeLimit(Counting(), 7), "loop", 7),
        (lambda num_envs: gym.make_vec("CartPole-v1", num_envs), "vector", 500),
    ],
)
@pytest.mark.filterwarnings("ignore:.*out of date")
def test_choice_of_backend(env, backend, limit):
    spec = envs.describe(env)
    assert (spec.backend, spec.max_episode_steps, spec.frame_skip, spec.seats_per_env) == (backend, limit, 1, 1)
    assert f"'{backend}'" in spec.backend_reason and spec.backend_reason.endswith(".")
    made = envs.make(env, 3)
    assert isinstance(made, envs.BatchedEnv) and made.num_seats == 3
    assert made.reset(seed=0).reward.dtype == np.float32


def test_backend_on_request():
    assert envs.make("CartPole-v1", 2, backend="loop").backend == "loop"
    assert envs.make("CartPole-v1", 2, backend="vector").backend == "vector"
    assert envs.make("shoal/Catch-v0", 2, backend="loop").backend == "loop"


@pytest.mark.parametrize("backend", ["loop", "vector", "compiled"])
def test_seeds_repeat_and_differ(backend):
    def trace(**seed):
        env = envs.make("CartPole-v1", 4, backend=backend, seed=seed.get("made"))
        return env.reset(seed.get("reset")).observation.copy()

    assert np.array_equal(trace(reset=1), trace(reset=1)) and np.array_equal(trace(reset=1), trace(made=1))
    assert not np.array_equal(trace(reset=1), trace(reset=2))
    rows = np.concatenate([trace(reset=seed) for seed in range(4)])
    assert len(np.unique(rows, axis=0)) == 16  # neighbouring seeds share no environment


@pytest.mark.atari
def test_ale():
    pytest.importorskip("ale_py")
    spec = envs.describe("ALE/Pong-v5")
    assert spec.backend == "ale" and spec.frame_skip == 4 and spec.max_episode_steps == 27_000
    assert spec.observation_space.shape == (4, 84, 84) and spec.observation_space.dtype == np.uint8
    env = envs.make("ALE/Pong-v5", 3, max_num_frames_per_episode=80, seed=1)
    step = env.reset()
    for t in range(1, 45):
        step = env.step(np.zeros(3, int))
        assert step.valid.all() and step.observation.shape == (3, 4, 84, 84)
        assert step.truncated.all() == (t % 20 == 0)
        if step.truncated.any():
            assert step.final_observation.shape == (3, 4, 84, 84) and step.first.all()
            assert not np.array_equal(step.final_observation, step.observation)
            assert step.episode_length.tolist() == [20, 20, 20]
    env.close()


@pytest.mark.atari
def test_ale_reward_clipping():
    pytest.importorskip("ale_py")
    env = envs.make("ALE/SpaceInvaders-v5", 2, reward_clipping=True, max_num_frames_per_episode=1200, num_threads=2)
    env.reset(seed=0)
    rng, clipped, raw = np.random.default_rng(0), 0.0, []
    while not raw:
        step = env.step(rng.integers(0, 6, 2))
        assert np.abs(step.reward).max() <= 1
        clipped += step.reward.sum()
        raw += step.episode_return.tolist()
    assert max(raw) >= 5 and max(raw) % 5 == 0
    with pytest.raises(ConfigError, match="there is no option 'colour'"):
        envs.make("ALE/Pong-v5", 1, colour=1)
    with pytest.raises(ConfigError, match="ALE/Pong-v5"):
        envs.make("ALE/Pongg-v5", 1)
    with pytest.raises(ConfigError, match="ALE/Breakout-v5"):
        envs.make("Breakout-v5", 1)


class FakePool:
    """envpool's gymnasium interface over Counting: a row that ended is reset by its next step, action dropped."""

    made: list = []  # noqa: RUF012

    def __init__(self, task, env_type, num_envs, seed=None):
        assert (task, env_type) == ("Count-v0", "gymnasium")
        self.observation_space, self.action_space = Counting().observation_space, spaces.Discrete(3)
        self.envs, self.seed, self.over = [Counting(k) for k in range(num_envs)], seed, np.zeros(num_envs, bool)
        FakePool.made.append(self)

    def reset(self):
        return np.stack([env.reset()[0] for env in self.envs]), {"env_id": np.arange(len(self.envs))}

    def step(self, action):
        rows = []
        for env, over, one in zip(self.envs, self.over, action, strict=True):
            rows.append((env.reset()[0], 0.0, False, False) if over else env.step(one)[:4])
        observation, reward, terminated, truncated = map(np.array, zip(*rows, strict=True))
        self.over = terminated | truncated
        return observation, reward, terminated, truncated, {"elapsed_step": np.zeros(len(rows))}

    def close(self):
        self.closed = True


def test_envpool(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", types.SimpleNamespace(make=FakePool))
    env = envs.make("Count-v0", 3, backend="envpool")
    rows, _ = record(env, 60)
    assert all(row == expected(shift, len(row)) for shift, row in enumerate(rows))
    assert env.backend == "envpool" and FakePool.made[-1].seed is not None and FakePool.made[-2].closed
