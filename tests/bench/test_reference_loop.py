"""The hand-written loop really learns, and the shared environments are real."""

from __future__ import annotations

import pytest
import torch

from shoal.bench.peers.drivers import same_env
from shoal.bench.reference_loop import gae, train


def test_gae_by_hand():
    reward, value = torch.tensor([[1.0], [1.0]]), torch.tensor([[0.5], [0.5], [2.0]])
    no, yes = torch.tensor([[False], [False]]), torch.tensor([[False], [True]])
    assert gae(reward, value, no, no, gamma=0.5, lam=1.0).flatten().tolist() == pytest.approx([1.5, 1.5])
    assert gae(reward, value, yes, yes, gamma=0.5, lam=1.0).flatten().tolist() == pytest.approx([1.0, 0.5])


def test_it_learns():
    """Random play ends after about 22 steps. It takes two seconds; thirty are for a busy machine."""
    threads = torch.get_num_threads()
    try:
        result = train("cartpole", seconds=30.0, threads=1, until_return=60.0, envs=64, horizon=32, minibatches=4)
    finally:
        torch.set_num_threads(threads)
    assert result["returns"][-1] >= 60 and result["marks"][-1][1] > 0


def test_cartpole_is_gymnasiums():
    env = same_env.make("cartpole")
    assert env.spec.id == "CartPole-v1"
    env.close()


@pytest.mark.atari
def test_pong_is_an_ordinary_environment():
    pytest.importorskip("ale_py")
    env = same_env.make("pong")
    observation, _ = env.reset(seed=1)
    assert observation.shape == (4, 84, 84) and env.observation_space.contains(observation)
    following, reward, terminated, truncated, _ = env.step(0)
    assert following.shape == (4, 84, 84) and not terminated and not truncated and reward == 0.0
    floats, _ = same_env.make("pong", "HWC float32").reset(seed=1)
    assert floats.shape == (84, 84, 4) and floats.max() <= 1.0
