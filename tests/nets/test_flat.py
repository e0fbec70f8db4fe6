"""The flat vector survives everything a learner does to it, also with convolutions channels-last."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from shoal.nets import NetConfig, build, flat_grad, flatten
from shoal.nets.flat import adopt
from shoal.ops import optimise
from tests.nets.intact import intact

IMAGE = spaces.Box(0, 255, (4, 44, 44), np.uint8)
SMALL = spaces.Box(0, 255, (1, 10, 5), np.uint8)
VECTOR = spaces.Box(-1, 1, (4,), np.float32)

STRICT = 1.3e-6  # relative; what torch.testing allows float32
NETS = {
    "mlp": (VECTOR, NetConfig()),
    "lstm": (VECTOR, NetConfig(recurrent="lstm", lstm_size=8)),
    "separate": (VECTOR, NetConfig(separate_value=True)),
    "nature": (IMAGE, NetConfig(torso="nature")),
    "impala": (IMAGE, NetConfig(torso="impala")),
    "small_conv": (SMALL, NetConfig()),
}


def observe(space, *lead):
    if space.dtype == np.uint8:
        return torch.randint(0, 256, (*lead, *space.shape), dtype=torch.uint8)
    return torch.randn(*lead, *space.shape)


def loss_of(net, observation):
    T, B = observation.shape[:2]
    out = net.unroll(observation, torch.zeros(T, B, dtype=torch.bool), net.initial_state(B))
    return out.params.square().mean() + out.value.square().mean()


def in_one_vector(net):
    """A parameter whose gradient is that of an ordinary net, in the order of the flat vector.

    PyTorch takes the norm of a list of gradients from the norms of its parts. Over 400,000 float32 numbers that differs by up to
    6e-6 from the norm of one vector, although the gradients are the same (their norms in float64 agree to 1e-15). So float32 norms
    are compared over the same order.
    """
    whole = nn.Parameter(torch.zeros(sum(p.numel() for p in net.parameters())))
    parts = [p.grad.permute(0, 2, 3, 1) if p.dim() == 4 else p.grad for p in net.parameters()]
    whole.grad = torch.cat([part.flatten() for part in parts])
    return whole


@pytest.mark.parametrize("name", NETS)
def test_views_survive_an_update(name):
    torch.manual_seed(0)
    space, config = NETS[name]
    net = build(space, spaces.Discrete(3), config, seed=1)
    twin = build(space, spaces.Discrete(3), config, seed=1)  # an ordinary module with ordinary gradients
    flat = flatten(net)
    grad = flat_grad(net)
    assert flat.numel() == sum(p.numel() for p in twin.parameters())
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    observation = observe(space, 2, 3)
    loss_of(net, observation).backward()
    loss_of(twin, observation).backward()
    assert intact(net, flat, grad)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-4)
    once = grad.clone()
    loss_of(net, observation).backward()  # accumulates into the same memory
    torch.testing.assert_close(grad, 2 * once, atol=1e-6, rtol=1e-4)
    grad.copy_(once)
    whole = in_one_vector(twin)
    torch.testing.assert_close(grad.double().norm(), whole.grad.double().norm(), rtol=STRICT, atol=0)
    m, v, count = torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros(())
    norm = optimise.clip_by_global_norm_(grad, 0.01)
    optimise.adam_(flat, grad, m, v, count, 1e-3, eps=1e-4)
    want = nn.utils.clip_grad_norm_([whole], 0.01)
    torch.testing.assert_close(norm, want, rtol=STRICT, atol=0)
    torch.testing.assert_close(grad, whole.grad, rtol=1e-4, atol=1e-6)
    nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    torch.optim.Adam(twin.parameters(), lr=1e-3, eps=1e-4).step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-3)
    assert intact(net, flat, grad)
    grad.zero_()
    assert all(not p.grad.any() for p in net.parameters())


@pytest.mark.parametrize("name", ["mlp", "nature"])
def test_copying_the_vector_copies_the_net(name):
    space, config = NETS[name]
    a, b = (build(space, spaces.Discrete(3), config, seed=s) for s in (1, 2))
    flat_a, flat_b = flatten(a), flatten(b)
    observation, first = observe(space, 3), torch.zeros(3, dtype=torch.bool)
    assert not torch.equal(a.step(observation, first, {}).params, b.step(observation, first, {}).params)
    flat_b.copy_(flat_a)
    assert torch.equal(a.step(observation, first, {}).params, b.step(observation, first, {}).params)
    assert intact(b, flat_b)
    c = build(space, spaces.Discrete(3), config, seed=3)
    flat_c = flatten(c)
    c.load_state_dict(a.state_dict())  # by name: in place, so the vector follows
    assert torch.equal(flat_c, flat_a) and intact(c, flat_c)


def test_conv_weights_channels_last():
    for name in ("nature", "impala", "small_conv"):
        space, config = NETS[name]
        net = build(space, spaces.Discrete(3), config)
        flatten(net)
        flat_grad(net)
        weights = [p for p in net.parameters() if p.dim() == 4]
        assert weights
        for p in weights:
            assert p.is_contiguous(memory_format=torch.channels_last)
            assert p.grad.stride() == p.stride()
            if p.shape[1] > 1:
                assert p.stride(1) == 1 and not p.is_contiguous()


def test_parameter_that_is_one_number():
    """Such as the logarithm of a temperature."""
    module = nn.Module()
    module.layer, module.log_alpha = nn.Linear(2, 1), nn.Parameter(torch.tensor(0.5))
    vector = flatten(module)
    assert vector.shape == (4,) and module.log_alpha.shape == ()
    vector[0] = 7.0
    assert float(next(module.parameters()).detach()) == 7.0


def test_activations_run_channels_last():
    net = build(IMAGE, spaces.Discrete(3), NetConfig(torso="nature"))
    flatten(net)
    seen = []
    for conv in net.trunk.torso.cnns[0].convs:
        conv.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0], out)))
    loss_of(net, observe(IMAGE, 1, 2)).backward()
    assert len(seen) == 3
    for x, out in seen:
        assert x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        assert out.is_contiguous(memory_format=torch.channels_last)


def test_adopting_memory_that_others_use():
    net = nn.Linear(3, 2)
    memory = torch.arange(8.0)
    assert adopt(net, memory) is memory
    assert torch.equal(memory[:6].view(2, 3), net.weight.detach())
    memory.fill_(2.0)
    assert bool((net.weight == 2).all())
    with pytest.raises(ValueError, match="8 parameters"):
        adopt(net, torch.zeros(9))


def test_intact_notices_replacement():
    net = nn.Linear(3, 2)
    flat, grad = flatten(net), flat_grad(net)
    assert intact(net, flat, grad)
    net.zero_grad()  # set_to_none is torch's default
    assert intact(net, flat) and not intact(net, flat, grad)
    net.weight.data = net.weight.data.clone()
    assert not intact(net, flat)
