"""T1, T3, T4, T8-T10, T13, T14, T16, T26-T28, T31 and T37 of specs/value.md, the formulas written out, and properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.ops import value


def t(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def column(*numbers):
    return t(*numbers)[:, None]


def near(got, want, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(got, float).ravel(), np.asarray(want, float).ravel(), atol=tolerance, rtol=0)


# ---------------------------------------------------------------------------------------------- n steps
def test_T1_n_step_transition():
    rewards = t(1, 2, 3)
    for discounts, total, product, target in (
        (t(0.9, 0.9, 0.9), 5.23, 0.729, 12.52),
        (t(0.9, 0, 0.9), 2.8, 0, 2.8),  # terminated after the second reward
    ):
        R, D = value.n_step_transition(rewards, discounts)
        near([R, D, R + D * 10], [total, product, target])
    R, D = value.n_step_transition(rewards[:2], t(0.9, 0.9))  # truncated there
    near([R, D, R + D * 10], [2.8, 0.81, 10.9])


def test_T3_T4_n_steps():
    r, v = column(1, 2, 3, 4), column(10, 20, 30, 40)
    same = column(0.9, 0.9, 0.9, 0.9)
    near(value.transformed_targets(r, same, v, 2, rescaled=False), [19, 29, 39, 40])
    near(value.transformed_targets(r, column(0.9, 0, 0.9, 0.9), v, 3, rescaled=False), [2.8, 2, 39, 40])
    near(value.transformed_targets(r, same, v, 5, rescaled=False), [34.39, 37.1, 39, 40])


def literal_targets(r, d, v, keep, n, rescaled):
    """Step by step, for one sequence: h(sum of rewards + what the last value is worth)."""
    out = []
    for t0 in range(len(r)):
        total, product, t1 = 0.0, 1.0, t0
        while True:
            total += product * r[t1]
            product *= d[t1]
            if t1 - t0 + 1 == n or t1 == len(r) - 1 or not keep[t1]:
                break
            t1 += 1
        bootstrap = textbook_inverse(v[t1]) if rescaled else v[t1]
        goal = total + product * bootstrap
        out.append(textbook(goal) if rescaled else goal)
    return out


@pytest.mark.parametrize("n", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("rescaled", [False, True])
def test_targets_literal(n, rescaled):
    g = np.random.default_rng(n)
    for length in (1, 2, 7):
        r, v = g.normal(size=(2, length, 4)) * 3
        d, keep = 0.9 * (g.random((length, 4)) < 0.8), (g.random((length, 4)) < 0.8).astype(float)
        got = value.transformed_targets(*(torch.from_numpy(x) for x in (r, d, v)), n, torch.from_numpy(keep), rescaled)
        for b in range(4):
            near(got[:, b], literal_targets(r[:, b], d[:, b], v[:, b], keep[:, b], n, rescaled), 1e-9)


def test_ends_of_n():
    g = torch.Generator().manual_seed(0)
    r, v = torch.randn(2, 6, 3, generator=g, dtype=torch.float64)
    d = torch.full_like(r, 0.9)
    near(value.transformed_targets(r, d, v, 1, rescaled=False), r + d * v)
    d[-1] = 0  # the episode ends with the sequence
    whole = sum(0.9**k * r[k] for k in range(6))
    near(value.transformed_targets(r, d, v, 6, rescaled=False)[0], whole)
    near(value.transformed_targets(r, d, v, 60, rescaled=False)[0], whole)


# ---------------------------------------------------------------------------------------------- bootstraps
ONLINE, TARGET = t(1, 2.5, 2), t(3, 1.5, 4)


def test_T8_target_max():
    near(1 + 0.9 * value.q_values(TARGET), 4.6)
    near(1 + 0.0 * value.q_values(TARGET), 1.0)


def test_T9_double():
    near(1 + 0.9 * value.double_q_values(ONLINE, TARGET), 2.35)
    near(1 + 0.9 * value.double_q_values(TARGET, ONLINE), 2.8)  # the roles swapped


def test_double_below_plain():
    g = torch.Generator().manual_seed(1)
    online, target = torch.randn(2, 50, 6, generator=g)
    assert bool((value.double_q_values(online, target) <= value.q_values(target)).all())
    assert torch.equal(value.double_q_values(target, target), value.q_values(target))


def test_targets_no_gradient():
    online, target = torch.randn(2, 4, 3, requires_grad=True)
    assert not value.q_values(target).requires_grad
    assert not value.double_q_values(online, target).requires_grad
    assert not value.transformed_targets(online, online, target, 2).requires_grad


def test_illegal_actions():
    mask = torch.tensor([True, False, True])
    near(value.q_values(value.legal(ONLINE, mask)), 2)
    near(value.double_q_values(value.legal(ONLINE, mask), TARGET), 4)  # else 1.5
    assert value.legal(ONLINE, None) is ONLINE


# ---------------------------------------------------------------------------------------------- rescaling
H = {0: 0, 0.5: 0.22524487, 1: 0.41521356, 3: 1.003, -3: -1.003, 8: 2.008, 99: 9.099, 1000: 31.63858404, 9999: 108.999}
INVERSE = {0.5: 1.24626276, 1: 2.98805670, 2: 7.95234914, 5: 34.58616226, 10: 117.43032278, 100: 8546.62630718}


def textbook(x, e=1e-3):
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + e * x


def textbook_inverse(y, e=1e-3):
    return math.copysign(((math.sqrt(1 + 4 * e * (abs(y) + 1 + e)) - 1) / (2 * e)) ** 2 - 1, y)


def test_T10_rescaling():
    near(value.rescale(t(*H)), list(H.values()))
    near(value.unrescale(t(*INVERSE)), list(INVERSE.values()), 1e-6)


def test_rescaling_properties():
    x = torch.cat([torch.logspace(-6, 6, 400, dtype=torch.float64), t(0)])
    x = torch.cat([-x, x]).sort().values
    y = value.rescale(x)
    assert bool((y.diff()[x.diff() > 0] > 0).all())
    assert torch.equal(value.rescale(-x), -y)
    np.testing.assert_allclose(value.unrescale(y).numpy(), x.numpy(), rtol=1e-9)
    np.testing.assert_allclose(y.numpy(), [textbook(float(one)) for one in x], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("array", [torch.tensor, lambda x: np.array(x, np.float32)])
def test_rescaling_float32(array):
    x = array([1e-4, 1e-2, 1.0, 100.0, -1e-4, -1e4])
    back = value.unrescale(value.rescale(x))
    np.testing.assert_allclose(np.asarray(back), np.asarray(x), rtol=1e-6)  # the textbook's forms lose 6 % at 1e-4


def targets(rewards, bootstrap):
    n = len(rewards)
    v = torch.zeros(n, 1, dtype=torch.float64)
    v[-1] = bootstrap
    return value.transformed_targets(column(*rewards), torch.full_like(v, 0.997), v, n)[0]


def test_T26_two_steps():
    near(targets([1, 2], 1.003), 1.64719298)


def test_T27_five_steps():
    target = targets([1] * 5, 2.008)
    near(target, 2.73451814)
    near(target - 2, 0.73451814)


def test_T28_inverse():
    assert abs(float(targets([1] * 5, 2.008)) - 1.82619451) > 0.1  # what comes out where it is forgotten
    forgotten = value.rescale(t(sum(0.997**k for k in range(5)) + 0.997**5 * 2.008))
    near(forgotten, 1.82619451)


# ---------------------------------------------------------------------------------------------- losses and heads
def test_T13_weights():
    near((t(1, 0.5) * value.squared(t(1, -2))).mean(), 0.75)


def test_T14_huber():
    q = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    loss = value.huber(t(0.5, 3, -3) - q)
    near(loss.detach(), [0.125, 2.5, 2.5])
    loss.sum().backward()
    near(q.grad, [-0.5, -1, 1])


@pytest.mark.parametrize("delta", [0.5, 1.0, 2.0])
def test_huber_equals_torch(delta):
    error = torch.linspace(-5, 5, 101, dtype=torch.float64)
    want = torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)
    near(value.huber(error, delta), want, 1e-12)


def test_T16_dueling():
    near(value.dueling(t(2), t(1, 3, -1)), [2, 4, 0])
    assert int(value.dueling(t(7), t(1, 3, -1)).argmax()) == 1


def test_advantages_have_mean_zero():
    g = torch.Generator().manual_seed(2)
    v, a = torch.randn(5, 1, generator=g), torch.randn(5, 4, generator=g)
    near(value.dueling(v, a).mean(-1), v.ravel())


def test_T31_delta_q():
    near(value.delta_q(t(1, 2), t(1.3, 1.6), t(2.5)), 0.2)
    near(value.delta_q(t(1, 2), t(1, 2), t(-2.5)), 0.0)


def test_T37_soft_targets():
    target, params = t(1), t(3)
    value.polyak_(target, params, 0.005)
    near(target, 1.01)
    value.polyak_(target, params, 0.005)
    near(target, 1.01995)
    value.polyak_(target, params, 1.0)
    assert torch.equal(target, params)
