"""`run.policy` and `run.module` after training."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import shoal
from shoal.errors import ConfigError

QUIET = {"runtime": "inline", "max_env_steps": 300, "eval.enabled": False, "console.mode": "none", "tensorboard": False,
         "net.hidden": (8,), "actors": 1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path_factory.mktemp("plain") / "run"), **QUIET)


def observations(rows=16):
    return np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)


def test_a_batch_is_its_rows(plain):
    seen = observations()
    actions = plain.policy.act(seen)
    assert actions.shape == (16,)
    assert actions.tolist() == [plain.policy.act(row) for row in seen]


def test_sampled_actions_differ(plain):
    seen = np.zeros((200, 4), np.float32)
    assert len(set(plain.policy.act(seen).tolist())) == 1
    assert len(set(plain.policy.act(seen, deterministic=False).tolist())) == 2


def test_masks_of_a_batch(plain):
    legal = np.tile([True, False], (16, 1))
    assert not plain.policy.act(observations(), mask=legal).any()
    with pytest.raises(ConfigError, match=r"the mask does not fit: action_mask has shape \(16, 3\)"):
        plain.policy.act(observations(), mask=np.ones((16, 3)))


def test_a_vector_env_takes_it(plain):
    env = gym.make_vec("CartPole-v1", 3)
    seen, _ = env.reset(seed=1)
    for _ in range(5):
        seen, *_ = env.step(plain.policy.act(seen, deterministic=False))
    assert seen.shape == (3, 4)


def test_rows_that_begin_forget(tmp_path):
    run = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), **QUIET, **{"net.recurrent": "lstm", "net.lstm_size": 4})
    policy, seen = run.policy, observations(2)
    policy.act(seen)
    with pytest.raises(ConfigError, match=r"remembers 2 episodes and is asked to act in 1; call policy.reset\(\)"):
        policy.act(seen[0])
    policy.reset()
    policy.act(seen)
    after = [leaf.clone() for leaf in policy._state.values()]
    policy.act(seen[::-1].copy())
    policy.act(seen, first=[True, False])
    for before, now in zip(after, policy._state.values(), strict=True):
        assert np.allclose(before[0], now[0]) and not np.allclose(before[1], now[1])


def test_the_module_is_saved_and_loaded(plain, tmp_path):
    torch.save(plain.module.state_dict(), tmp_path / "policy.pt")
    loaded = torch.load(tmp_path / "policy.pt", weights_only=True)
    assert loaded and all(torch.equal(loaded[name], tensor) for name, tensor in plain.module.state_dict().items())
