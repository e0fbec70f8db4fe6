"""The hand-written loop really learns, and the shared environments are real."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.peers.drivers import drive_reference_loop as loop
from benchmarks.peers.drivers import same_env
from benchmarks.peers.drivers.drive_reference_loop import SETTINGS, gae, train


def test_gae_by_hand():
    reward, value = torch.tensor([[1.0], [1.0]]), torch.tensor([[0.5], [0.5], [2.0]])
    no, yes = torch.tensor([[False], [False]]), torch.tensor([[False], [True]])
    assert gae(reward, value, no, no, gamma=0.5, lam=1.0).flatten().tolist() == pytest.approx([1.5, 1.5])
    assert gae(reward, value, yes, yes, gamma=0.5, lam=1.0).flatten().tolist() == pytest.approx([1.0, 0.5])


def test_it_learns():
    """Random play ends after about 22 steps. It takes two seconds; thirty are for a busy machine."""
    threads = torch.get_num_threads()
    try:
        settings = {**SETTINGS["cartpole"], "envs": 64, "horizon": 32}
        result = train("cartpole", 30.0, settings, threads=1, until_return=60.0)
    finally:
        torch.set_num_threads(threads)
    assert result["train_return"] >= 60 and result["marks"][-1][1] > 0


def test_peer_reports_what_is_asked(capsys, monkeypatch):
    """With the faster number of threads, which it tries first."""
    monkeypatch.setattr(loop, "TRIAL_SECONDS", 0.0)
    threads, small = torch.get_num_threads(), {"envs": 4, "horizon": 4, "minibatches": 2}
    try:
        loop.main({"scene": "cartpole", "seconds": 0.0, "seed": 1, "settings": small})
    finally:
        torch.set_num_threads(threads)
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["envs"] == 4 and report["threads"] >= 1 and len(report["marks"]) >= 4
    assert report["samples_per_insert"] == 1 and report["began_at"] > 0


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
