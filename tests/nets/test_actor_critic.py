"""Spaces in, shapes out; unroll equals step; masks, dict observations, previous actions, errors."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

from shoal.errors import ConfigError
from shoal.nets import NetConfig, build
from shoal.nets.torsos import ImpalaResNet, NatureCNN, SmallConv, tanh

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
ATARI = spaces.Box(0, 255, (4, 84, 84), np.uint8)
BOARD = spaces.Box(0, 255, (1, 10, 5), np.uint8)
NESTED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (3, 40, 40), np.uint8),
        "body": spaces.Dict({"joints": VECTOR, "contact": spaces.MultiBinary(3)}),
        "goal": spaces.Discrete(5),
        "digits": spaces.MultiDiscrete([2, 3]),
    }
)
OBSERVATIONS = {
    "vector": VECTOR,
    "double": spaces.Box(-1, 1, (4,), np.float64),
    "matrix": spaces.Box(-1, 1, (3, 4), np.float32),
    "ram": spaces.Box(0, 255, (128,), np.uint8),
    "discrete": spaces.Discrete(7),
    "multi": spaces.MultiDiscrete([3, 2]),
    "board": BOARD,
    "atari": ATARI,
    "rgb": spaces.Box(0, 255, (64, 48, 3), np.uint8),
    "planes": spaces.Box(0, 1, (3, 10, 10), np.float32),
    "nested": NESTED,
    "tuple": spaces.Tuple([VECTOR, spaces.Discrete(3)]),
}
ACTIONS = {
    "discrete": (spaces.Discrete(3), 3, ()),
    "multi": (spaces.MultiDiscrete([2, 4]), 6, (2,)),
    "binary": (spaces.MultiBinary(3), 6, (3,)),
    "box": (spaces.Box(-2, 2, (2,), np.float32), 4, (2,)),
    "box_matrix": (spaces.Box(-2, 2, (2, 3), np.float32), 12, (2, 3)),
}


def observe(space, *lead, seed=0):
    g = np.random.default_rng(seed)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return {str(k): observe(part, *lead, seed=seed + i) for i, (k, part) in enumerate(items)}
    if isinstance(space, spaces.Discrete):
        return torch.from_numpy(g.integers(0, space.n, lead))
    if isinstance(space, spaces.MultiDiscrete):
        return torch.from_numpy(g.integers(0, space.nvec, (*lead, len(space.nvec))))
    if space.dtype in (np.uint8, np.int8):
        top = 2 if isinstance(space, spaces.MultiBinary) else 256
        return torch.from_numpy(g.integers(0, top, (*lead, *space.shape), dtype=space.dtype))
    return torch.from_numpy(g.normal(size=(*lead, *space.shape)).astype(np.float32))


def at(observation, *index):
    if isinstance(observation, dict):
        return {k: at(v, *index) for k, v in observation.items()}
    return observation[index]


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_every_observation_space(name):
    space = OBSERVATIONS[name]
    net = build(space, spaces.Discrete(3), seed=0)
    T, B = 2, 3
    observation, first = observe(space, T, B), torch.zeros(T, B, dtype=torch.bool)
    out = net.unroll(observation, first, net.initial_state(B))
    assert out.params.shape == (T, B, 3) and out.value.shape == (T, B)
    assert out.state == {} and out.states is None
    step = net.step(at(observation, 1), first[1], {})
    torch.testing.assert_close(step.params, out.params[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(step.value, out.value[1], atol=1e-5, rtol=1e-5)
    assert not step.params.requires_grad
    # every leaf matters
    other = net.step(at(observe(space, T, B, seed=9), 1), first[1], {})
    assert not torch.equal(other.value, step.value)


def test_nested_leaves_each_reach_the_value():
    net = build(NESTED, spaces.Discrete(2), seed=0)
    base = observe(NESTED, 64)
    value = net.step(base, None, {}).value
    for path in (("camera",), ("body", "joints"), ("body", "contact"), ("goal",), ("digits",)):
        changed = {k: dict(v) if isinstance(v, dict) else v for k, v in base.items()}
        node = changed
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = node[path[-1]].flip(0)
        assert not torch.equal(net.step(changed, None, {}).value, value), path
    assert len(net.trunk.torso.cnns) == 1 and net.trunk.torso.features == 512 + 64


def test_default_torsos():
    kind = {name: build(OBSERVATIONS[name], spaces.Discrete(2)).trunk.torso for name in ("board", "atari", "rgb", "planes")}
    assert isinstance(kind["atari"].cnns[0], NatureCNN) and isinstance(kind["rgb"].cnns[0], NatureCNN)
    assert isinstance(kind["board"].cnns[0], SmallConv)
    assert not kind["planes"].cnns  # small floats are flattened, unless told otherwise
    explicit = build(OBSERVATIONS["planes"], spaces.Discrete(2), NetConfig(torso="small_conv"))
    assert isinstance(explicit.trunk.torso.cnns[0], SmallConv)
    rank_2 = spaces.Box(0, 1, (10, 5), np.float32)
    net = build(rank_2, spaces.Discrete(2), NetConfig(torso="small_conv"))
    assert net.step(observe(rank_2, 3), None, {}).value.shape == (3,)
    deep = build(ATARI, spaces.Discrete(2), NetConfig(torso="impala"))
    assert isinstance(deep.trunk.torso.cnns[0], ImpalaResNet)
    assert deep.trunk.torso.cnns[0].dense.in_features == 32 * 11 * 11
    assert not build(ATARI, spaces.Discrete(2), NetConfig(torso="mlp", hidden=(4,))).trunk.torso.cnns


def test_images():
    """Bytes are scaled and channels may come last."""
    torso = SmallConv((3, 6, 7))
    image = torch.randint(0, 256, (2, 3, 6, 7), dtype=torch.uint8)
    before = image.clone()
    torch.testing.assert_close(torso(image), torso(image.float() / 255))
    assert torch.equal(image, before)
    floats = image.float()
    torso(floats)
    assert torch.equal(floats, before.float())  # a float image is not scaled, nor changed
    chw, hwc = spaces.Box(0, 255, (3, 20, 20), np.uint8), spaces.Box(0, 255, (20, 20, 3), np.uint8)
    a, b = (build(space, spaces.Discrete(2), seed=3) for space in (chw, hwc))
    x = observe(chw, 4)
    torch.testing.assert_close(a.step(x, None, {}).value, b.step(x.permute(0, 2, 3, 1), None, {}).value)


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_space(name):
    space, P, shape = ACTIONS[name]
    net = build(VECTOR, space, seed=0)
    g = torch.Generator().manual_seed(0)
    x = observe(VECTOR, 3, 5)
    out = net.unroll(x, None, {})
    assert out.params.shape == (3, 5, P)
    action, log_prob = net.head.sample(out.params, g)
    assert action.shape == (3, 5, *shape) and log_prob.shape == (3, 5)
    torch.testing.assert_close(net.head.log_prob(out.params, action), log_prob)
    assert net.head.mode(out.params).shape == action.shape
    assert net.head.entropy(out.params).shape == (3, 5)
    assert float(net.head.kl(out.params, out.params).detach().abs().max()) < 1e-6
    assert net.head.encode(action).shape == (3, 5, net.head.encoded)
    assert action.dtype == (torch.float32 if name.startswith("box") else torch.int64)
    net.head.log_prob(out.params, action.detach()).sum().backward()
    assert all(p.grad is not None for n, p in net.named_parameters() if "value" not in n)


def test_first_outputs():
    """Policy starts near uniform and value does not."""
    net = build(VECTOR, spaces.Discrete(4), seed=0)
    out = net.step(observe(VECTOR, 256), None, {})
    assert float(net.head.entropy(out.params).mean()) > 0.999 * np.log(4)
    assert float(net.out.weight[:4].detach().norm(dim=1).mean()) == pytest.approx(0.01, abs=1e-4)
    assert float(net.out.weight[4].norm().detach()) == pytest.approx(1.0, abs=1e-4)
    assert not net.out.bias.any()
    weight = net.trunk.torso.mlp.layers[1].weight.detach()
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(64), atol=1e-4, rtol=0)


def test_seed():
    """Seed is reproducible and leaves the global generator alone."""
    state = torch.get_rng_state()
    a, b, c = (build(VECTOR, spaces.Discrete(2), seed=s) for s in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(a.out.weight, b.out.weight) and not torch.equal(a.out.weight, c.out.weight)


# --- recurrence, previous action, truncated episodes ---


@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize("space", [VECTOR, BOARD], ids=["vector", "board"])
def test_lstm_unroll_equals_steps(space, previous):
    net = build(
        space, spaces.Discrete(3), NetConfig(recurrent="lstm", lstm_size=8, prev_action_reward=previous), seed=0
    )
    T, B = 6, 4
    g = torch.Generator().manual_seed(0)
    x, first = observe(space, T, B), torch.rand(T, B, generator=g) < 0.3
    action, reward = torch.randint(3, (T, B), generator=g), torch.randn(T, B, generator=g) * 3
    state = {k: torch.randn(B, 8, generator=g) for k in ("h", "c")}
    extra = (action, reward) if previous else (None, None)
    out = net.unroll(x, first, state, *extra, all_states=True)
    for t in range(T):
        step = net.step(x[t], first[t], state, *(None if e is None else e[t] for e in extra))
        state = step.state
        torch.testing.assert_close(step.params, out.params[t], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(step.value, out.value[t], atol=1e-6, rtol=1e-5)
        for key in ("h", "c"):
            torch.testing.assert_close(out.states[key][t], state[key], atol=1e-6, rtol=1e-5)
    for key in ("h", "c"):
        torch.testing.assert_close(out.state[key], state[key], atol=1e-6, rtol=1e-5)


def test_previous_step():
    """Previous action and reward matter except at the start."""
    net = build(VECTOR, spaces.Discrete(3), NetConfig(prev_action_reward=True), seed=0)
    x, action = observe(VECTOR, 2), torch.tensor([0, 0])
    first = torch.tensor([True, False])
    a = net.step(x, first, {}, action, torch.zeros(2)).value
    b = net.step(x, first, {}, action + 1, torch.zeros(2)).value
    c = net.step(x, first, {}, action, torch.full((2,), 5.0)).value
    d = net.step(x, first, {}, action, torch.ones(2)).value
    assert a[0] == b[0] == c[0] and a[1] != b[1] and a[1] != c[1]
    assert torch.equal(c, d)  # rewards are clipped to 1
    with pytest.raises(ConfigError, match="prev_action"):
        net.step(x, first, {})


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
@pytest.mark.parametrize("previous", [False, True])
def test_final_values_of_truncated_episodes(recurrent, previous):
    """The value of the final observation is what the net would have said had the episode gone on to it."""
    config = NetConfig(recurrent=recurrent, lstm_size=8, prev_action_reward=previous)
    net = build(VECTOR, spaces.Discrete(3), config, seed=0)
    T, B = 5, 3
    x, final = observe(VECTOR, T, B), observe(VECTOR, 2, seed=5)
    action, reward = torch.randint(3, (T, B)), torch.randn(T, B)
    prev_action, prev_reward = action.roll(1, 0), reward.roll(1, 0)
    extra = (prev_action, prev_reward) if previous else (None, None)
    first = torch.zeros(T, B, dtype=torch.bool)
    t, b = torch.tensor([1, 3]), torch.tensor([0, 2])  # truncated after these steps
    first[t + 1, b] = True
    out = net.unroll(x, first, net.initial_state(B), *extra, all_states=True)
    after = {k: s[t, b] for k, s in out.states.items()}
    led_by = (action[t, b], reward[t, b]) if previous else (None, None)
    got = net.final_values(final, after, *led_by)
    assert got.shape == (2,) and not got.requires_grad
    for k in range(2):  # go on without the reset, seeing the final observation instead of the new episode's first
        y, f = x.clone(), first.clone()
        y[t[k] + 1, b[k]] = final[k]
        f[t[k] + 1, b[k]] = False
        want = net.unroll(y, f, net.initial_state(B), *extra).value[t[k] + 1, b[k]]
        torch.testing.assert_close(got[k], want.detach(), atol=1e-6, rtol=1e-5)
    empty = net.final_values(
        final[:0], {k: s[:0] for k, s in after.items()}, *(e if e is None else e[:0] for e in led_by)
    )
    assert empty.shape == (0,)


def test_separate_value_shares_nothing():
    net = build(VECTOR, spaces.Box(-2, 2, (1,), np.float32), NetConfig(separate_value=True), seed=0)
    out = net.unroll(observe(VECTOR, 2, 3), None, {})
    out.value.sum().backward()
    touched = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched and all(name.startswith("value_") for name in touched)


# --- heads: masks, mixtures, continuous actions ---


@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.MultiDiscrete([2, 3])], ids=["discrete", "multi"])
def test_masks_and_mixture(space):
    net = build(VECTOR, space, mask_size=5, seed=0)
    B = 512
    params = net.step(observe(VECTOR, B), None, {}).params
    mask = torch.tensor([True, False, False, True, True]).expand(B, 5)
    g = torch.Generator().manual_seed(0)
    for mix in (None, torch.linspace(0, 1, B)):
        action, log_prob = net.head.sample(params, g, mask, mix)
        legal = mask.gather(1, action[:, None]) if space.shape == () else mask.gather(1, action + torch.tensor([0, 2]))
        assert bool(legal.all())
        torch.testing.assert_close(net.head.log_prob(params, action, mask, mix), log_prob)
    limit = np.log(3) if space.shape == () else np.log(2)
    assert float(net.head.entropy(params, mask).max()) <= limit + 1e-5
    assert float(net.head.kl(params, params, mask).abs().max()) < 1e-6
    uniform = net.head.sample(params, g, mask, torch.ones(B))[1]
    torch.testing.assert_close(uniform, torch.full((B,), -float(limit)), atol=1e-5, rtol=0)
    mode = net.head.mode(params, mask)
    assert bool((mask.gather(1, mode[:, None]) if space.shape == () else mode[:, 0] == 0).all())


def test_mixture_draws_what_it_says():
    net = build(VECTOR, spaces.Discrete(2), seed=0)
    params = torch.tensor([0.9, 0.1]).log().expand(40_000, 2)
    action, _ = net.head.sample(params, torch.Generator().manual_seed(0), None, torch.full((40_000,), 0.5))
    assert abs(float(action.float().mean()) - (0.5 * 0.1 + 0.25)) < 0.01


@pytest.mark.parametrize("continuous", ["gaussian", "gaussian_state_std", "tanh_gaussian"])
def test_continuous_heads(continuous):
    space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 3.0], np.float32))
    net = build(VECTOR, space, NetConfig(continuous=continuous), seed=0)
    out = net.unroll(observe(VECTOR, 2, 64), None, {})
    action, log_prob = net.head.sample(out.params, torch.Generator().manual_seed(0))
    assert out.params.shape == (2, 64, 4)
    assert (net.log_std is not None) == (continuous == "gaussian")
    torch.testing.assert_close(net.head.log_prob(out.params, action), log_prob, atol=1e-3, rtol=1e-3)
    if continuous == "tanh_gaussian":
        assert bool((action >= torch.tensor(space.low)).all() and (action <= torch.tensor(space.high)).all())
        middle = net.head.log_prob(torch.zeros(1, 4), torch.tensor([[0.0, 1.5]]))  # half widths 2 and 1.5
        assert float(middle) == pytest.approx(-np.log(2 * np.pi) - np.log(2 * 1.5), abs=1e-5)
        entropy = net.head.entropy(torch.zeros(1, 4))
        unit = -net.head.sample(torch.zeros(50_000, 4), torch.Generator().manual_seed(0))[1].mean()
        assert float(entropy) == pytest.approx(float(unit), abs=0.02)
    with pytest.raises(ConfigError, match="uniform"):
        net.head.sample(out.params, None, None, torch.ones(64))


# --- errors ---


@pytest.mark.parametrize(
    "config, words",
    [
        (NetConfig(torso="resnet"), "--net.torso is 'resnet'"),
        (NetConfig(hidden=(64, 0)), "net.hidden"),
        (NetConfig(recurrent="lstm", lstm_size=0), "--net.lstm-size is 0; it must be at least 1"),
        (NetConfig(recurrent="lstm", separate_value=True), "--net.separate-value does not fit"),
        (NetConfig(torso="mlp", module="a:B"), "leave one of them out"),
        (NetConfig(torso="nature"), "no part of the observation"),
    ],
)
def test_bad_configurations_name_the_values(config, words):
    with pytest.raises(ConfigError, match=words):
        build(VECTOR, spaces.Discrete(2), config)


def test_other_bad_builds():
    with pytest.raises(ConfigError, match="at least 36 x 36"):
        build(BOARD, spaces.Discrete(2), NetConfig(torso="nature"))
    with pytest.raises(ConfigError, match="4 entries"):
        build(VECTOR, spaces.Discrete(2), mask_size=4)
    with pytest.raises(ConfigError, match="bounded"):
        build(VECTOR, spaces.Box(-np.inf, np.inf, (2,)), NetConfig(continuous="tanh_gaussian"))
    with pytest.raises(ConfigError, match="Text"):
        build(spaces.Text(3), spaces.Discrete(2))
    with pytest.raises(ConfigError, match="no policy head"):
        build(VECTOR, spaces.Dict({"a": spaces.Discrete(2)}))


# --- odds and ends ---


def test_fast_tanh_is_tanh():
    for n in (10, 20_000):
        x = (torch.randn(n) * 3).requires_grad_(True)
        y = tanh(x)
        assert float((y - torch.tanh(x)).detach().abs().max()) < 3e-7
        (g,) = torch.autograd.grad(y.sum(), x)
        (want,) = torch.autograd.grad(torch.tanh(x).sum(), x)
        torch.testing.assert_close(g, want, atol=1e-6, rtol=1e-5)
        assert torch.equal(tanh(x.detach()), y.detach())
    assert tanh(torch.tensor([1e30, -1e30] * 5000)).unique().tolist() == [-1.0, 1.0]


def test_the_config_costs_no_torch():
    import subprocess

    code = "import sys; from shoal.nets import NetConfig; NetConfig().validate(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
