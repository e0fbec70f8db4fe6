"""Noisy layers: the paper's formula, one set of noise for all rows or one for each, statistics, and heads with atoms."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shoal.nets import NetConfig
from shoal.nets.flat import flat_grad, flatten
from shoal.nets.noisy import NoisyHead, NoisyLinear, noise_factors
from shoal.nets.q_network import HeadConfig, build_q
from shoal.nets.trunk import seeded
from shoal.ops import c51
from tests.nets.intact import intact

VECTOR, FOUR = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(4)
NOISY = HeadConfig(dueling=True, hidden=8, atoms=5, value_min=-1, value_max=3, noisy_sigma=0.5)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net(head, seed=0):
    return build_q(VECTOR, FOUR, NetConfig(hidden=(16,)), head, seed)


def test_layer_has_the_papers_weights():
    """A layer computes with the paper's noisy weights."""
    layer, x, noise = NoisyLinear(6, 4, 0.5), normal(7, 6), normal(10, seed=1)
    with torch.no_grad():
        layer.weight_sigma.copy_(normal(4, 6, seed=2))
        layer.bias_sigma.copy_(normal(4, seed=3))

    def f(x):
        return math.copysign(math.sqrt(abs(x)), x)

    enter, leave = [f(float(n)) for n in noise[:6]], [f(float(n)) for n in noise[6:]]
    weight, bias = layer.weight.clone(), layer.bias.clone()
    for j in range(4):
        bias[j] += layer.bias_sigma[j] * leave[j]
        for i in range(6):
            weight[j, i] += layer.weight_sigma[j, i] * leave[j] * enter[i]
    torch.testing.assert_close(layer(x, noise_factors(noise)), F.linear(x, weight, bias))


def test_layer_without_noise_is_plain():
    layer, x = NoisyLinear(6, 4, 0.5), normal(7, 6)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(layer.weight @ layer.weight.T, 2 * torch.eye(4))  # as plain layers begin
    for sigma in (layer.weight_sigma, layer.bias_sigma):
        torch.testing.assert_close(sigma, torch.full_like(sigma, 0.5 / math.sqrt(6)))


def test_rows_may_have_noise_of_their_own():
    layer, x, noise = NoisyLinear(6, 4, 0.5), normal(7, 6), noise_factors(normal(7, 10, seed=1))
    together = layer(x, noise)
    for row, alone, factors in zip(together, x, noise, strict=True):
        torch.testing.assert_close(row, layer(alone[None], factors)[0])


def test_moments_of_the_noise():
    """E f(x)^2 = E|x| = sqrt(2/pi); a weight's noise is the product of two, a bias's one factor."""
    factors = noise_factors(normal(200_000, 2).double())
    assert float(factors[:, 0].square().mean()) == pytest.approx(math.sqrt(2 / math.pi), rel=0.01)
    product = factors.prod(1)
    assert float(product.mean()) == pytest.approx(0, abs=0.01)
    assert float(product.square().mean()) == pytest.approx(2 / math.pi, rel=0.02)
    layer, x = NoisyLinear(6, 4, 0.5), normal(1, 6)
    with torch.no_grad():
        y = layer(x.expand(100_000, 6), noise_factors(normal(100_000, 10, seed=1)))
        plain, sigma = layer(x), 0.5 / math.sqrt(6)
    assert float((y.mean(0) - plain).abs().max()) < 0.02
    variance = sigma**2 * (float(x.square().sum()) * 2 / math.pi + math.sqrt(2 / math.pi))
    np.testing.assert_allclose(y.var(0), variance, rtol=0.05)


def test_layers_have_noise_of_their_own():
    """Each number changes what its own layer gives, and nothing of the other stream."""
    with seeded(0):
        head = NoisyHead(6, 2, 3, 0.5, 1.0, hidden=4)
    assert head.noise_size == (6 + 4) + (6 + 4) + (4 + 2) + (4 + 3)
    x, noise = normal(50, 6), normal(head.noise_size, seed=1)
    base = torch.cat(head(x, noise), 1)
    seen = []
    for i in range(head.noise_size):
        other = noise.clone()
        other[i] += 1
        seen.append((torch.cat(head(x, other), 1) != base).any(0).tolist())
    whole_value, whole_actions = [True, True, False, False, False], [False, False, True, True, True]
    single = torch.eye(5, dtype=torch.bool).tolist()
    assert seen == [*[whole_value] * 10, *[whole_actions] * 10, *[whole_value] * 4, *single[:2], *[whole_actions] * 4, *single[2:]]
    assert NoisyHead(6, 2, 3, 0.5, 1.0).noise_size == 6 + 3


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("atoms", [0, 5])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_every_head(dueling, atoms, sigma):
    """Every head gives values and distributions."""
    one = net(HeadConfig(dueling, 8, atoms=atoms, value_min=-1, value_max=3, noisy_sigma=sigma))
    x, noise = normal(6, 3), normal(6, one.noise_size, seed=1) if sigma else None
    q = one(x, noise)
    assert q.shape == (6, 4) and (one.noise_size > 0) == (sigma > 0)
    torch.testing.assert_close(one.step(x, None, {}).q, one(x))
    torch.testing.assert_close(one.unroll(x.view(2, 3, 3), None, {}).q, one(x).view(2, 3, 4))
    if atoms:
        logits = one.logits(x, noise)
        assert logits.shape == (6, 4, 5) and one.support.tolist() == [-1, 0, 1, 2, 3]
        torch.testing.assert_close(q, (logits.softmax(-1) * one.support).sum(-1))
    if sigma:
        assert not torch.allclose(q, one(x)) and not torch.allclose(q, one(x, noise.flip(0)))
        torch.testing.assert_close(one(x, noise)[2:3], one(x[2:3], noise[2]))


def test_the_streams_of_distributions():
    """Logits V + A - mean A of every atom, each of the four layers as a plain one computes it."""
    one, x = net(NOISY), normal(6, 3)
    head, features = one.noisy, one.trunk.torso(x)
    v = head.value_out(torch.relu(head.value_hidden(features)))[:, None]
    a = head.out(torch.relu(head.hidden(features))).view(6, 4, 5)
    torch.testing.assert_close(one.logits(x), v + a - a.mean(1, keepdim=True))
    torch.testing.assert_close(one(x), c51.expected(v + a - a.mean(1, keepdim=True), one.support))


def test_parameters_are_one_vector():
    """Parameters are one vector without noise or atoms."""
    one = net(NOISY)
    named = {name for name, _ in one.named_parameters()}
    assert {"noisy.out.weight", "noisy.out.weight_sigma"} <= named and "support" not in one.state_dict()
    flat, grad = flatten(one), flat_grad(one)
    before = flat.clone()
    one(normal(6, 3), normal(one.noise_size)).square().sum().backward()
    assert intact(one, flat, grad) and torch.equal(flat, before)
    assert all(float(p.grad.abs().max()) > 0 for name, p in one.named_parameters() if "sigma" in name)
    again = net(NOISY)
    assert torch.equal(flatten(again), flat) and not torch.equal(flatten(net(NOISY, seed=1)), flat)


def test_zero_head():
    """A zero head begins in the middle of its atoms."""
    for head in (HeadConfig(True, 8, True, 5, -1, 3), HeadConfig(False, 8, True, 5, -1, 3, 0.5)):
        torch.testing.assert_close(net(head)(normal(6, 3)), torch.ones(6, 4))
