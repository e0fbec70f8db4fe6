"""Golden values of policy.md (sections 1e, 14), literal transcriptions as oracles, and properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.ops import returns

V = [1.0, 2.0, 0.5]
R = [1.0, 0.0, 2.0]
BOOT = 3.0


def col(values):
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1)


def inputs(discount=(0.9, 0.9, 0.9), v_t=(2.0, 0.5, BOOT)):
    return col(R), col(discount), col(V), col(v_t)


def near(got, want, tol=1e-9):
    torch.testing.assert_close(got.reshape(-1).double(), torch.tensor(want, dtype=torch.float64), atol=tol, rtol=0)


# --- golden -----------------------------------------------------------------------------------------------------------


def test_n_step_returns_golden():
    r, d, v, v_next = inputs()
    got = returns.n_step_returns(r, d, v_next)
    near(got, [4.807, 4.23, 4.7])
    near(got - v, [3.807, 2.23, 4.2])


@pytest.mark.parametrize(
    "discount, n, want",
    [((0.9, 0.0, 0.9, 0.9), 3, [2.8, 2, 39, 40]), ((0.9,) * 4, 5, [34.39, 37.1, 39, 40])],
)
def test_n_step_windows_golden(discount, n, want):
    """value.md T4: r = 1..4, values 10..40 after each step."""
    r, v_next = col([1.0, 2.0, 3.0, 4.0]), col([10.0, 20.0, 30.0, 40.0])
    near(returns.n_step_returns(r, col(discount), v_next, n=n), want)


VTRACE_ROWS = [
    # rho, thresholds, lambda, discount, delta, vs, pg "next", pg "mixed"
    ([1, 1, 1], (1, 1, 1), 1.0, (0.9,) * 3, [1.8, -1.55, 4.2], [4.807, 4.23, 4.7], [3.807, 2.23, 4.2], None),
    ([2, 0.5, 1.5], (1, 1, 1), 1.0, (0.9,) * 3, [1.8, -0.775, 4.2], [3.8035, 3.115, 4.7], [2.8035, 1.115, 4.2], None),
    ([2, 0.5, 1.5], (2, 1, 1), 1.0, (0.9,) * 3, [3.6, -0.775, 6.3], [6.454, 4.06, 6.8], [3.654, 2.06, 4.2], None),
    ([2, 0.5, 1.5], (2, 2, 2), 1.0, (0.9,) * 3, [3.6, -0.775, 6.3], [8.308, 4.06, 6.8], [7.308, 2.06, 6.3], None),
    (
        [2, 0.5, 1.5],
        (1, 1, 1),
        0.9,
        (0.9,) * 3,
        [1.8, -0.775, 4.2],
        [3.55006, 2.926, 4.7],
        [2.6334, 1.115, 4.2],
        [2.55006, 0.926, 4.2],
    ),
    ([2, 0.5, 1.5], (1, 1, 1), 1.0, (0.9, 0, 0.9), [1.8, -1, 4.2], [1.9, 1, 4.7], [0.9, -1, 4.2], None),
]


@pytest.mark.parametrize("row", range(len(VTRACE_ROWS)))
@pytest.mark.parametrize("bootstrap", ["next", "mixed"])
def test_vtrace_golden(row, bootstrap):
    rho, (rho_bar, c_bar, pg), lambda_, discount, delta, vs, pg_next, pg_mixed = VTRACE_ROWS[row]
    r, d, v, v_next = inputs(discount)
    got = returns.vtrace(
        col(rho).log(),
        r,
        d,
        v,
        v_next,
        lambda_=lambda_,
        rho_bar=rho_bar,
        c_bar=c_bar,
        pg_rho_bar=pg,
        bootstrap=bootstrap,
    )
    near(got.delta, delta, 1e-6)
    near(got.vs, vs, 1e-5)
    near(got.pg_advantage, pg_mixed if pg_mixed and bootstrap == "mixed" else pg_next, 1e-5)
    near(got.rho_clipped, [min(x, rho_bar) for x in rho], 1e-9)


def test_gae_golden():
    r, d, v, v_next = inputs()
    near(returns.gae(r, d, v, v_next, 0.95), [3.545055, 2.041, 4.2], 1e-6)
    near(returns.gae(r, d, v, v_next, 0.95) + v, [4.545055, 4.041, 4.7], 1e-6)


def test_gae_ends_golden():
    r, d, v, v_next = inputs((0.9, 0, 0.9))
    near(returns.gae(r, d, v, v_next, 0.95), [0.09, -2, 4.2])
    r, d, v, v_next = inputs(v_t=(2.0, 4.0, BOOT))  # the value of the true final observation is 4
    got = returns.gae(r, d, v, v_next, 0.95, keep_t=col([1, 0, 1]))
    near(got, [3.168, 1.6, 4.2])
    near(got + v, [4.168, 3.6, 4.7])


@pytest.mark.parametrize(
    "reward, want, advantage",
    [
        ([0, 0, 0, 1], [0.5, 1, 1, 1], [0.3, 0.5, 0.7, 0.4]),
        ([0, 0.1, -0.5, 1], [0.5, 0.4, 0.5, 1], [0.3, -0.1, 0.2, 0.4]),
    ],
)
def test_upgo_golden(reward, want, advantage):
    v, v_next, d = col([0.2, 0.5, 0.3, 0.6]), col([0.5, 0.3, 0.6, 9.0]), col([1, 1, 1, 0])
    got = returns.upgo_returns(col(reward), d, v, v_next)
    near(got, want)
    near(got - v, advantage)


def test_upgo_tie():
    """A step that does just as well as expected is followed."""
    got = returns.upgo_returns(col([0, 0.25, 0, 1]), col([1, 1, 1, 0]), col([0.25, 0.5, 0.25, 0.5]), col([0.5, 0.25, 0.5, 9.0]))
    near(got, [1.25, 1.25, 1, 1])


def test_td_lambda_golden():
    v_next, d = col([0.5, 0.3, 0.6, 9.0]), col([1, 1, 1, 0])
    near(returns.lambda_returns(col([0, 0, 0, 1]), d, v_next, 0.8), [0.7368, 0.796, 0.92, 1])


# --- literal transcriptions of the formulas, one batch row at a time ---


def slow_vtrace(log_rho, r, d, v, v_next, keep, lambda_, rho_bar, c_bar, pg_bar, mixed):
    """v_s = V_s + sum_t (prod_{i<t} d_i c_i keep_i) delta_t; the sums are written out."""
    T = len(r)
    rho = [math.exp(x) for x in log_rho]
    delta = [min(rho_bar, rho[t]) * (r[t] + d[t] * v_next[t] - v[t]) for t in range(T)]
    vs = []
    for s in range(T):
        total = v[s]
        for t in range(s, T):
            weight = 1.0
            for i in range(s, t):
                weight *= d[i] * lambda_ * min(c_bar, rho[i]) * keep[i]
            total += weight * delta[t]
        vs.append(total)
    pg = []
    for s in range(T):
        goes_on = s + 1 < T and keep[s]
        ahead = vs[s + 1] if goes_on else v_next[s]
        if mixed and goes_on:
            ahead = lambda_ * vs[s + 1] + (1 - lambda_) * v_next[s]
        pg.append(min(pg_bar, rho[s]) * (r[s] + d[s] * ahead - v[s]))
    return vs, pg


def slow_lambda(r, d, v_next, keep, lambda_):
    """Mixture over n of the n-step returns, each written as a sum; a cut or the end of the slice takes all the rest."""

    def n_step(s, n):
        total, weight = 0.0, 1.0
        for i in range(s, s + n):
            total += weight * r[i]
            weight *= d[i]
        return total + weight * v_next[s + n - 1]

    out = []
    for s in range(len(r)):
        total, left = 0.0, 1.0
        for n in range(1, len(r) - s + 1):
            last = s + n == len(r) or not keep[s + n - 1]
            share = left if last else left * (1 - lambda_)
            total += share * n_step(s, n)
            left -= share
            if last:
                break
        out.append(total)
    return out


def slow_n_step(r, d, v_next, keep, n):
    out = []
    for s in range(len(r)):
        total, weight, t = 0.0, 1.0, s
        while True:
            total += weight * r[t]
            weight *= d[t]
            if t == len(r) - 1 or t - s == n - 1 or not keep[t]:
                break
            t += 1
        out.append(total + weight * v_next[t])
    return out


@st.composite
def slices(draw):
    """A slice [T, B] in which v_t is v_tm1 shifted, except at truncations: there it is the final value."""
    T, B = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(T + 1, B, generator=g, dtype=torch.float64)
    keep = (torch.rand(T, B, generator=g) > 0.25).double()
    terminated = torch.rand(T, B, generator=g) < 0.2
    final = torch.randn(T, B, generator=g, dtype=torch.float64)
    return {
        "r_t": torch.randn(T, B, generator=g, dtype=torch.float64),
        "discount_t": torch.where(terminated, 0.0, 0.9).double(),
        "v_tm1": values[:-1],
        "v_t": torch.where(keep > 0, values[1:], final),
        "keep_t": keep,
        "log_rho_t": torch.randn(T, B, generator=g, dtype=torch.float64),
    }


def rows(x, *names):
    return zip(*[x[name].T.tolist() for name in names], strict=True)


@settings(max_examples=40, deadline=None)
@given(
    slices(), st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.sampled_from([(1, 1, 1), (2, 0.5, 1), (0.7, 3, 9)])
)
def test_vtrace_is_its_formula(x, lambda_, mixed, bars):
    rho_bar, c_bar, pg = bars
    got = returns.vtrace(
        x["log_rho_t"],
        x["r_t"],
        x["discount_t"],
        x["v_tm1"],
        x["v_t"],
        lambda_=lambda_,
        rho_bar=rho_bar,
        c_bar=c_bar,
        pg_rho_bar=pg,
        keep_t=x["keep_t"],
        bootstrap="mixed" if mixed else "next",
    )
    names = ("log_rho_t", "r_t", "discount_t", "v_tm1", "v_t", "keep_t")
    for b, row in enumerate(rows(x, *names)):
        vs, pg_advantage = slow_vtrace(*row, lambda_, rho_bar, c_bar, pg, mixed)
        near(got.vs[:, b], vs)
        near(got.pg_advantage[:, b], pg_advantage)


@settings(max_examples=40, deadline=None)
@given(slices(), st.sampled_from([0.0, 0.3, 0.95, 1.0]), st.integers(1, 14))
def test_returns_are_their_formulas(x, lambda_, n):
    r, d, v, v_next, keep = (x[k] for k in ("r_t", "discount_t", "v_tm1", "v_t", "keep_t"))
    got = returns.lambda_returns(r, d, v_next, lambda_, keep)
    torch.testing.assert_close(returns.gae(r, d, v, v_next, lambda_, keep)[-1], got[-1] - v[-1])
    windows = returns.n_step_returns(r, d, v_next, n, keep)
    for b, (r_b, d_b, v_b, keep_b) in enumerate(rows(x, "r_t", "discount_t", "v_t", "keep_t")):
        near(got[:, b], slow_lambda(r_b, d_b, v_b, keep_b, lambda_))
        near(windows[:, b], slow_n_step(r_b, d_b, v_b, keep_b, n))


# --- properties ---


@settings(max_examples=40, deadline=None)
@given(slices(), st.sampled_from([0.0, 0.5, 1.0]))
def test_three_ways_to_one_number(x, lambda_):
    """On-policy V-trace = TD(lambda) returns = GAE + V; at lambda 1 they are the n-step returns."""
    r, d, v, v_next, keep = (x[k] for k in ("r_t", "discount_t", "v_tm1", "v_t", "keep_t"))
    on_policy = torch.zeros_like(r)
    traced = returns.vtrace(on_policy, r, d, v, v_next, lambda_=lambda_, keep_t=keep, bootstrap="mixed")
    targets = returns.lambda_returns(r, d, v_next, lambda_, keep)
    torch.testing.assert_close(traced.vs, targets)
    torch.testing.assert_close(traced.pg_advantage, targets - v)  # rlax's form keeps vs = V + rho (q - V)
    torch.testing.assert_close(returns.gae(r, d, v, v_next, lambda_, keep) + v, targets)
    if lambda_ == 1.0:
        torch.testing.assert_close(returns.n_step_returns(r, d, v_next, keep_t=keep), targets)


@settings(max_examples=30, deadline=None)
@given(slices(), st.integers(0, 11))
def test_no_flow_over_an_end(x, at):
    """After a termination or truncation at t, whatever comes later cannot change steps up to t."""
    T = x["r_t"].shape[0]
    at %= T
    x["discount_t"][at] = 0.0
    changed = {k: v.clone() for k, v in x.items()}
    for key in ("r_t", "v_tm1", "v_t", "log_rho_t"):
        changed[key][at + 1 :] += 5.0
    changed["v_t"][at] += 7.0  # never looked at behind a discount of 0
    for a, b in zip(_all_outputs(x), _all_outputs(changed), strict=True):
        torch.testing.assert_close(a[: at + 1], b[: at + 1])
    x["discount_t"][at] = 0.9
    x["keep_t"][at] = 0.0
    changed = {k: v.clone() for k, v in x.items()}
    for key in ("r_t", "v_tm1", "v_t", "log_rho_t"):
        changed[key][at + 1 :] += 5.0
    for a, b in zip(_all_outputs(x), _all_outputs(changed), strict=True):
        torch.testing.assert_close(a[: at + 1], b[: at + 1])


def _all_outputs(x):
    r, d, v, v_next, keep = (x[k] for k in ("r_t", "discount_t", "v_tm1", "v_t", "keep_t"))
    traced = returns.vtrace(x["log_rho_t"], r, d, v, v_next, lambda_=0.9, keep_t=keep)
    return (
        traced.vs,
        traced.pg_advantage,
        returns.gae(r, d, v, v_next, 0.9, keep),
        returns.lambda_returns(r, d, v_next, 0.9, keep),
        returns.n_step_returns(r, d, v_next, 3, keep),
    )


@pytest.mark.parametrize("rho_bar, want", [(0.5, 1 / 3), (1.0, 0.5), (2.0, 2 / 3), (4.0, 0.8), (math.inf, 0.8)])
def test_vtrace_fixed_point(rho_bar, want):
    """pi (.8,.2), mu (.2,.8), reward (1,0): rho_bar decides which policy's value is learned."""
    log_rho = torch.tensor([[0.8 / 0.2, 0.2 / 0.8]]).double().log()
    r, d = torch.tensor([[1.0, 0.0]]).double(), torch.zeros(1, 2).double()
    mu = torch.tensor([0.2, 0.8]).double()
    value = torch.zeros((), dtype=torch.float64)
    for _ in range(600):
        v = value.expand(1, 2)
        vs = returns.vtrace(log_rho, r, d, v, v, rho_bar=rho_bar, c_bar=1.0).vs
        value = value + 0.5 * (mu * (vs - v)[0]).sum()
    assert abs(float(value) - want) < 1e-6


def test_no_gradient():
    r, d, v, v_next = inputs()
    v.requires_grad_(True)
    log_rho = torch.zeros_like(r).requires_grad_(True)
    before = [x.detach().clone() for x in (r, d, v, v_next)]
    got = returns.vtrace(log_rho, r, d, v, v_next)
    assert not any(x.requires_grad for x in got)
    assert not returns.gae(r, d, v, v_next, 0.9).requires_grad
    for x, y in zip((r, d, v, v_next), before, strict=True):
        assert torch.equal(x, y)


def test_bool_keep_and_tensor_lambda():
    r, d, v, v_next = inputs()
    keep = torch.tensor([[True], [False], [True]])
    a = returns.gae(r, d, v, v_next, torch.tensor(0.95).double(), keep)
    torch.testing.assert_close(a, returns.gae(r, d, v, v_next, 0.95, keep.double()))
    assert torch.equal(
        returns.n_step_returns(r, d, v_next, 2, keep), returns.n_step_returns(r, d, v_next, 2, keep * 1.0)
    )


def test_bad_arguments():
    r, d, v, v_next = inputs()
    with pytest.raises(ValueError, match="bootstrap = 'seed'"):
        returns.vtrace(torch.zeros_like(r), r, d, v, v_next, bootstrap="seed")
    with pytest.raises(ValueError, match="n = 0"):
        returns.n_step_returns(r, d, v_next, 0)
