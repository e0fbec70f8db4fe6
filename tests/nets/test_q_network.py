"""The action-value net: heads, memory, what it sees of the past, flat parameters."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.nets import NetConfig
from shoal.nets.flat import flat_grad, flatten
from shoal.nets.q_network import HeadConfig, build_q
from tests.nets.intact import intact

VECTOR = gym.spaces.Box(-1, 1, (3,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (1, 10, 5), np.uint8)
BOTH = gym.spaces.Dict({"vector": VECTOR, "image": IMAGE})
FOUR = gym.spaces.Discrete(4)
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=8, prev_action_reward=True)


def net(config=None, head=None, space=VECTOR, seed=0):
    return build_q(space, FOUR, config or NetConfig(hidden=(16,)), head or HeadConfig(), seed)


def observe(space, *lead, seed=0):
    g = torch.Generator().manual_seed(seed)
    if isinstance(space, gym.spaces.Dict):
        return {name: observe(part, *lead, seed=seed) for name, part in space.spaces.items()}
    if space.dtype == np.uint8:
        return torch.randint(0, 255, (*lead, *space.shape), generator=g, dtype=torch.uint8)
    return torch.randn(*lead, *space.shape, generator=g)


@pytest.mark.parametrize("space", [VECTOR, IMAGE, BOTH])
@pytest.mark.parametrize("dueling", [False, True])
def test_one_value_per_action(space, dueling):
    """Every observation gives one value per action."""
    one = net(space=space, head=HeadConfig(dueling, 8))
    x = observe(space, 5, 2)
    q = one.unroll(x, None, {}).q
    assert q.shape == (5, 2, 4)
    folded = {name: part.flatten(0, 1) for name, part in x.items()} if isinstance(x, dict) else x.flatten(0, 1)
    torch.testing.assert_close(q.flatten(0, 1), one(folded))
    torch.testing.assert_close(one.step(folded, None, {}).q, one(folded))


def test_the_streams_of_a_dueling_head():
    """V + A - mean A, each stream with a hidden layer of its own."""
    one = net(head=HeadConfig(True, 8))
    x = observe(VECTOR, 6)
    features = one.trunk.torso(x)
    hidden = torch.relu(features @ one.streams.layers[0].weight.T + one.streams.layers[0].bias)
    v = hidden[:, :8] @ one.value_out.weight.T + one.value_out.bias
    a = hidden[:, 8:] @ one.out.weight.T + one.out.bias
    torch.testing.assert_close(one(x), v + a - a.mean(1, keepdim=True))
    before = one(x)
    with torch.no_grad():
        one.value_out.bias.add_(5)
    torch.testing.assert_close(one(x), before + 5)  # the greedy action does not depend on V


def test_stepping_is_unrolling():
    one, T, B = net(LSTM, HeadConfig(True)), 6, 3
    x, first = observe(VECTOR, T, B), torch.rand(T, B, generator=torch.Generator().manual_seed(1)) < 0.3
    action, reward = torch.randint(0, 4, (T, B)), torch.randn(T, B)
    state = {name: torch.randn(B, 8) for name in "hc"}
    whole = one.unroll(x, first, state, action, reward)
    for t in range(T):
        step = one.step(x[t], first[t], state, action[t], reward[t])
        state = step.state
        torch.testing.assert_close(step.q, whole.q[t])
        torch.testing.assert_close(state["h"], whole.states["h"][t])
    torch.testing.assert_close(state["c"], whole.state["c"])


def test_an_episode_begins_without_a_past():
    one = net(LSTM)
    x, first = observe(VECTOR, 2), torch.tensor([True, False])

    def q(value):
        state = {name: torch.full((2, 8), value) for name in "hc"}
        return one.step(x, first, state, torch.full((2,), int(2 * value)), torch.full((2,), value)).q

    same, other = (q(0.0) - q(1.0)).abs().amax(1)
    assert float(same) == 0 and float(other) > 1e-3
    alone = one.step(x[:1], torch.tensor([True]), one.initial_state(1), torch.tensor([3]), torch.tensor([1.0])).q
    torch.testing.assert_close(alone, q(1.0)[:1])
    without = torch.cat([one.trunk.torso(x[:1]), torch.zeros(1, 5)], 1)  # no action at all, not action 0
    torch.testing.assert_close(one._read(one.trunk.core.step(without, one.initial_state(1), None)[0]), alone)


def test_zero_heads_and_seeds():
    for dueling in (False, True):
        assert float(net(head=HeadConfig(dueling, 8, zero=True)).step(observe(VECTOR, 9), None, {}).q.abs().max()) == 0
    assert torch.equal(flatten(net(seed=1)), flatten(net(seed=1)))
    assert not torch.equal(flatten(net(seed=1)), flatten(net(seed=2)))
    before = torch.get_rng_state()
    net(seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_parameters_are_one_vector():
    one = net(LSTM, HeadConfig(True), BOTH)
    flat, grad = flatten(one), flat_grad(one)
    T, B = 3, 2
    q = one.unroll(observe(BOTH, T, B), None, one.initial_state(B), torch.zeros(T, B).long(), torch.zeros(T, B)).q
    q.square().sum().backward()
    assert intact(one, flat, grad) and float(grad.abs().max()) > 0


def test_what_it_cannot_do():
    with pytest.raises(ConfigError, match="need Discrete actions"):
        build_q(VECTOR, gym.spaces.MultiDiscrete([2, 2]), NetConfig(), HeadConfig())
    with pytest.raises(ConfigError, match="needs prev_action and prev_reward"):
        net(LSTM).step(observe(VECTOR, 1), None, net(LSTM).initial_state(1))
