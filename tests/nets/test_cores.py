"""The LSTM: one unroll equals step by step with resets, and the hand-written gradient equals autograd's."""

from __future__ import annotations

import pytest
import torch

from shoal.nets.cores import LSTMCore, PassThrough


def setup(T=7, B=5, inputs=3, size=4, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    core = LSTMCore(inputs, size).to(dtype)
    x = torch.randn(T, B, inputs, dtype=dtype)
    first = torch.rand(T, B) < 0.3
    state = {"h": torch.randn(B, size, dtype=dtype), "c": torch.randn(B, size, dtype=dtype)}
    return core, x, first, state


def stepwise(core, x, first, state):
    hs, cs = [], []
    for t in range(len(x)):
        y, state = core.step(x[t], state, None if first is None else first[t])
        hs.append(y)
        cs.append(state["c"])
    return torch.stack(hs), torch.stack(cs), state


@pytest.mark.parametrize("resets", [True, False])
def test_unroll_equals_steps(resets):
    core, x, first, state = setup()
    first = first if resets else None
    out, final, states = core(x, state, first)
    hs, cs, last = stepwise(core, x, first, state)
    torch.testing.assert_close(out, hs)
    torch.testing.assert_close(states["h"], hs)
    torch.testing.assert_close(states["c"], cs)
    for key in ("h", "c"):
        torch.testing.assert_close(final[key], last[key])


def test_the_cell_is_torchs():
    core, x, _, state = setup()
    ref = torch.nn.LSTM(3, 4, dtype=torch.float64)
    H = 4
    cell, enter, forget, out = (slice(i * H, (i + 1) * H) for i in range(4))
    with torch.no_grad():
        for mine, theirs in ((core.weight_x, ref.weight_ih_l0), (core.weight_h, ref.weight_hh_l0)):
            theirs.copy_(torch.cat([mine[enter], mine[forget], mine[cell], mine[out]]))
        ref.bias_ih_l0.copy_(torch.cat([core.bias[enter], core.bias[forget], core.bias[cell], core.bias[out]]))
        ref.bias_hh_l0.zero_()
    want, (h, c) = ref(x, (state["h"][None], state["c"][None]))
    got, final, _ = core(x, state, None)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(final["h"], h[0])
    torch.testing.assert_close(final["c"], c[0])


def test_reset_is_exact_and_before_the_step():
    """An episode that starts inside a sequence is bit for bit what it is alone from a zero state."""
    core, x, _, state = setup(dtype=torch.float32)
    first = torch.zeros(7, 5, dtype=torch.bool)
    first[3] = True
    out, _, _ = core(x, state, first)
    fresh, _, _ = core(x[3:], core.initial_state(5), None)
    assert torch.equal(out[3:], fresh)
    untouched, _, _ = core(x[:3], state, None)
    assert torch.equal(out[:3], untouched)


@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("use_cells", [True, False])
def test_gradients_equal_autograd(resets, use_cells):
    core, x, first, state = setup()
    first = first if resets else None
    state = {k: v.requires_grad_(True) for k, v in state.items()}
    x.requires_grad_(True)
    weights = torch.randn(7, 5, 4, dtype=torch.float64)
    leaves = [x, *state.values(), *core.parameters()]

    def loss(hs, cs):
        total = (hs * weights).sum() + (hs[-1] ** 3).sum()
        return total + (cs * weights.flip(0)).sum() if use_cells else total

    out, _, states = core(x, state, first)
    got = torch.autograd.grad(loss(out, states["c"]), leaves)
    hs, cs, _ = stepwise(core, x, first, state)
    want = torch.autograd.grad(loss(hs, cs), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_gradient_only_of_the_last_cell():
    core, x, first, state = setup()
    _, final, _ = core(x, state, first)
    got = torch.autograd.grad(final["c"].sum(), core.weight_h)[0]
    _, cs, _ = stepwise(core, x, first, state)
    torch.testing.assert_close(got, torch.autograd.grad(cs[-1].sum(), core.weight_h)[0])


def test_no_gradient_crosses_a_reset():
    core, x, _, state = setup()
    first = torch.zeros(7, 5, dtype=torch.bool)
    first[4] = True
    x.requires_grad_(True)
    out, _, _ = core(x, state, first)
    out[4:].sum().backward()
    assert not x.grad[:4].any() and bool(x.grad[4:].any())


def test_initial_state_and_forget_bias():
    core = LSTMCore(3, 4)
    state = core.initial_state(6)
    assert state["h"].shape == state["c"].shape == (6, 4) and not state["h"].any()
    assert core.bias.tolist() == [0.0] * 8 + [1.0] * 4 + [0.0] * 4


def test_pass_through():
    core = PassThrough(3)
    x = torch.randn(2, 3)
    assert core.initial_state(2) == {} and core.features == 3
    assert core.step(x, {}, None) == (x, {})
    assert core(x, {}, None) == (x, {}, {})
