"""The deterministic actor and the critics of continuous control: shapes, bounds, gradients, seeds, errors."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from shoal.errors import ConfigError
from shoal.nets import (
    NetConfig,
    build_actor,
    build_critic,
    build_policy,
    build_squashed_actor,
    build_values,
    flat_grad,
    flatten,
)
from tests.nets.intact import intact

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 40, 40), np.uint8)
BOTH = spaces.Dict({"camera": IMAGE, "joints": VECTOR})
LOPSIDED = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 3.0], np.float32))
MATRIX = spaces.Box(-2, 2, (2, 3), np.float32)


def observe(space, N, seed=0):
    if isinstance(space, gym.spaces.Dict):
        return {name: observe(part, N, seed) for name, part in space.spaces.items()}
    g = np.random.default_rng(seed)
    if space.dtype == np.uint8:
        return torch.from_numpy(g.integers(0, 256, (N, *space.shape), dtype=np.uint8))
    return torch.from_numpy(g.normal(size=(N, *space.shape)).astype(np.float32))


@pytest.mark.parametrize("actions", [LOPSIDED, MATRIX], ids=["vector", "matrix"])
@pytest.mark.parametrize("space", [VECTOR, IMAGE, BOTH], ids=["vector", "image", "both"])
def test_every_space(space, actions):
    actor, critic = build_actor(space, actions, seed=0), build_critic(space, actions, seed=0, count=2)
    x = observe(space, 5)
    action = actor(x)
    assert action.shape == (5, *actions.shape) and action.dtype == torch.float32
    q = critic(x, action)
    assert q.shape == (2, 5)
    assert not torch.equal(q[0], q[1])
    assert not torch.equal(critic(x, action + 0.5), q) and not torch.equal(critic(observe(space, 5, 1), action), q)


def test_actions_stay_within_their_bounds():
    actor = build_actor(VECTOR, LOPSIDED, seed=0)
    low, high = torch.tensor(LOPSIDED.low), torch.tensor(LOPSIDED.high)
    torch.testing.assert_close(actor(observe(VECTOR, 64)), ((low + high) / 2).expand(64, 2), atol=0.2, rtol=0)
    with torch.no_grad():
        actor.out.weight.mul_(1e6)
    action = actor(observe(VECTOR, 64))
    torch.testing.assert_close(action.min(0).values, low)
    torch.testing.assert_close(action.max(0).values, high)


def test_a_critic_is_the_usual_mlp():
    """[s, a] -> 16 -> 8 -> 1 with the action scaled to [-1, 1] (TD3, SAC)."""
    critic = build_critic(VECTOR, LOPSIDED, NetConfig(hidden=(16, 8), activation="relu"), seed=1, count=2)
    x, unit = observe(VECTOR, 7), torch.rand(7, 2) * 2 - 1
    action = unit * torch.tensor([2.0, 1.5]) + torch.tensor([0.0, 1.5])
    for k, q in enumerate(critic(x, action)):
        dense = [copied(layer, k) for layer in (*critic.values.mlp.layers, critic.values.mlp.out)]
        assert [(layer.in_features, layer.out_features) for layer in dense] == [(5, 16), (16, 8), (8, 1)]
        plain = nn.Sequential(dense[0], nn.ReLU(), dense[1], nn.ReLU(), dense[2])
        torch.testing.assert_close(q, plain(torch.cat([x, unit], 1))[:, 0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(critic.of_unit(x, unit)[k], q, atol=1e-6, rtol=1e-5)


def copied(layer, k):
    """The k-th of layers side by side, as an ordinary one."""
    linear = nn.Linear(layer.weight.shape[2], layer.weight.shape[1])
    linear.weight.data, linear.bias.data = layer.weight.data[k], layer.bias.data[k, 0]
    return linear


@pytest.mark.parametrize("space", [VECTOR, BOTH], ids=["vector", "both"])
def test_critics_share_nothing(space):
    critic = build_critic(space, LOPSIDED, seed=0, count=3)
    critic(observe(space, 4), torch.zeros(4, 2))[1].sum().backward()
    for name, p in critic.named_parameters():
        if "torsos" in name:  # a convolutional one each
            assert bool(p.grad.any()) == (".torsos.1." in name)
        else:
            assert p.grad[1].any() and not p.grad[[0, 2]].any()


@pytest.mark.parametrize("space", [VECTOR, IMAGE, BOTH], ids=["vector", "image", "both"])
def test_policies_and_values_of_replay(space):
    x, noise = observe(space, 6), torch.randn(6, 2)
    actor, policy = build_squashed_actor(space, LOPSIDED, seed=0), build_policy(space, 4, seed=0)
    action, log_prob = actor.sample(x, noise)
    assert action.shape == (6, 2) and log_prob.shape == (6,) and bool((action.abs() < 1).all())
    torch.testing.assert_close(actor.sample(x, torch.zeros(6, 2))[0], actor.unit(x))
    torch.testing.assert_close(action, torch.tanh(noise), atol=0.2, rtol=0)  # it starts near a standard normal
    assert policy(x).shape == (6, 4) and float(policy(x).detach().abs().max()) < 0.2
    values = build_values(space, 4, seed=0, count=2)
    assert values(x).shape == (2, 6, 4) and not torch.equal(values(x)[0], values(x)[1])


def test_an_actor_climbs_its_critic():
    """The deterministic policy gradient through both nets, on flat vectors: actions go where Q is higher."""
    actor, critic = build_actor(VECTOR, LOPSIDED, seed=0), build_critic(VECTOR, LOPSIDED, seed=0)
    flat, grad = flatten(actor), flat_grad(actor)
    x = observe(VECTOR, 32)
    before = critic(x, actor(x)).mean().item()
    for _ in range(20):
        grad.zero_()
        (-critic(x, actor(x)).mean()).backward()
        flat.sub_(0.1 * grad)
    assert intact(actor, flat, grad)
    assert critic(x, actor(x)).mean().item() > before + 0.05


def test_seeds():
    state = torch.get_rng_state()
    for make in (build_actor, build_critic):
        a, b, c = (flatten(make(VECTOR, LOPSIDED, seed=seed)) for seed in (1, 1, 2))
        assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("make", [build_actor, build_critic, build_squashed_actor])
def test_what_they_cannot_do(make):
    with pytest.raises(ConfigError, match="needs Box actions"):
        make(VECTOR, spaces.Discrete(2))
    with pytest.raises(ConfigError, match="needs bounded actions"):
        make(VECTOR, spaces.Box(-np.inf, np.inf, (2,)))
    with pytest.raises(ConfigError, match=r"--net\.recurrent none"):
        make(VECTOR, LOPSIDED, NetConfig(recurrent="lstm"))
    with pytest.raises(ConfigError, match="prev-action-reward"):
        make(VECTOR, LOPSIDED, NetConfig(prev_action_reward=True))
