"""Environments as tensor code are the ordinary ones, step for step; a simulator of one's own takes part."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal import envs
from shoal.envs.device import CartPole, TensorEnv, TensorStep, make_tensor_env
from shoal.envs.device.host_adapter import TensorEnvAdapter
from shoal.errors import ConfigError

B = 32
CASES = [("CartPole-v1", {}), ("CartPole-v1", {"sutton_barto_reward": True}), ("CartPole-v1", {"max_episode_steps": 12}),
         ("shoal/Catch-v0", {}), ("shoal/Catch-v0", {"observation": "pixels", "rows": 6, "columns": 4, "reward_scale": 2.0}),
         ("shoal/Catch-v0", {"ball_column": 3, "max_episode_steps": 5}), ("shoal/PixelCatch-v0", {}),
         ("shoal/PixelCatch-v0", {"crop": "centre"})]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_compiled(name, options):
    """From the same states, by the same actions: observations, rewards, ends, and last observations."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    ordinary = envs.make(name, B, backend="compiled", **options)
    tensors = make_tensor_env(name, B, "cpu", **options)
    ordinary.reset(seed=1)
    tensors.reset(generator)
    ended = truncated = 0
    for _ in range(120):
        tensors.state.copy_(torch.from_numpy(ordinary._state))
        tensors.lengths.copy_(torch.from_numpy(ordinary._out.lengths))
        action = rng.integers(ordinary.action_space.n, size=B)
        one, other = ordinary.step(action), tensors.step(torch.from_numpy(action), generator)
        np.testing.assert_array_equal(one.last & ~one.truncated, other.terminated)
        np.testing.assert_array_equal(one.truncated, other.truncated)
        np.testing.assert_array_equal(one.reward, other.reward)
        going = ~one.last
        assert other.observation.numpy().dtype == one.observation.dtype
        np.testing.assert_allclose(one.observation[going], other.observation[going], rtol=1e-6, atol=1e-7)
        if len(one.final_rows):
            np.testing.assert_allclose(one.final_observation, other.final_observation[one.final_rows], rtol=1e-6, atol=1e-7)
        ended, truncated = ended + int(one.last.sum()), truncated + int(one.truncated.sum())
    assert ended > B
    assert bool(truncated) == bool(options.get("max_episode_steps"))


def test_cartpole_is_gymnasiums():
    rng, generator = np.random.default_rng(3), torch.Generator().manual_seed(0)
    single, tensors = gym.make("CartPole-v1").unwrapped, CartPole(1, "cpu")
    for episode in range(20):
        observation, _ = single.reset(seed=episode)
        tensors.reset(generator)
        tensors.state.copy_(torch.tensor(single.state, dtype=torch.float64).view(4, 1))
        over = False
        while not over:
            action = int(rng.integers(2))
            observation, reward, over, _, _ = single.step(action)
            step = tensors.step(torch.tensor([action]), generator)
            assert float(step.reward) == reward and bool(step.terminated) == over
            np.testing.assert_allclose(step.final_observation[0], observation, rtol=1e-6, atol=1e-7)


def test_initial_states():
    generator = torch.Generator().manual_seed(0)
    pole = CartPole(20_000, "cpu").reset(generator)
    assert pole.abs().max() <= 0.05 and abs(float(pole.mean())) < 1e-3 and 0.0285 < float(pole.std()) < 0.0292
    catch = make_tensor_env("shoal/Catch-v0", 20_000, "cpu")
    catch.reset(generator)
    counts = torch.bincount(catch.state[1], minlength=5)
    assert len(counts) == 5 and (counts - 4000).abs().max() < 300
    assert (catch.state[0] == 0).all() and (catch.state[2] == 2).all()


class Corridor:
    """Somebody's own simulator: walk right; the end is worth 1."""

    observation_space = gym.spaces.Box(0.0, 9.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    max_episode_steps = 6

    def __init__(self, num_envs: int, device: torch.device, length: int = 3) -> None:
        self.num_envs, self.device, self.length = num_envs, device, length
        self.place, self.time = (torch.zeros(num_envs, device=device) for _ in range(2))

    def reset(self, generator):
        self.place.zero_()
        self.time.zero_()
        return self.place[:, None].clone()

    def step(self, action, generator):
        self.place.add_(action)
        self.time.add_(1)
        over = self.place >= self.length
        cut = (self.time >= self.max_episode_steps) & ~over
        final = self.place[:, None].clone()
        self.place.mul_(~(over | cut))
        self.time.mul_(~(over | cut))
        return TensorStep(self.place[:, None].clone(), over.float(), over, cut, final)


def test_own_simulator():
    stream = envs.make(Corridor, 2, length=2)
    assert isinstance(stream, TensorEnvAdapter) and isinstance(stream.env, TensorEnv) and stream.max_episode_steps == 6
    step = stream.reset(seed=0)
    assert step.first.all() and not step.last.any()
    seen = []
    for _ in range(6):
        step = stream.step(np.array([1, 0]))
        seen.append((step.observation[:, 0].tolist(), step.reward.tolist(), step.discount.tolist(), step.last.tolist()))
    assert seen[1] == ([0, 0], [1, 0], [0, 1], [True, False])
    assert seen[5] == ([0, 0], [1, 0], [0, 1], [True, True]) and step.truncated.tolist() == [False, True]
    assert step.final_rows.tolist() == [1] and step.final_observation.tolist() == [[0.0]]
    assert step.episode_return.tolist() == [1, 0] and step.episode_length.tolist() == [2, 6]
    assert envs.describe(Corridor).backend == "tensors"


def test_refused():
    with pytest.raises(ConfigError, match=r"Pendulum-v1 has no tensor version.*CartPole-v1"):
        make_tensor_env("Pendulum-v1", 2, "cpu")
    with pytest.raises(ConfigError, match="which is not a TensorEnv: it needs num_envs"):
        make_tensor_env(lambda num_envs, device: 3, 2, "cpu")
    with pytest.raises(ConfigError, match="colour"):
        make_tensor_env("CartPole-v1", 2, "cpu", colour=1)
