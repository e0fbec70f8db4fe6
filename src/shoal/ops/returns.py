"""Returns, advantages and V-trace: what an actor-critic regresses to.

Papers: GAE (Schulman et al. 2016, 1506.02438), V-trace (Espeholt et al. 2018, 1802.01561), UPGO (Vinyals et al. 2019).
All inputs are ``[T, B]`` (any further axes broadcast along), the last axis of time is the newest; see ``shoal.ops`` for
the subscripts. Nothing here carries a gradient: targets and advantages are constants for every loss that uses them.

Every function is one linear recursion ``y_t = x_t + w_t y_{t+1}``, see `scan_back`; the rest is elementwise.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["VTraceTargets", "gae", "lambda_returns", "n_step_returns", "scan_back", "upgo_returns", "vtrace"]


class VTraceTargets(NamedTuple):
    """What V-trace yields, all ``[T, B]`` and without gradient."""

    vs: Tensor
    """Targets of the value function."""
    pg_advantage: Tensor
    """Advantages of the policy gradient, already multiplied by the clipped importance weight."""
    rho_clipped: Tensor
    """min(rho_bar, pi/mu). Its mean is the first thing to look at when learning off-policy: 1 means on-policy."""
    delta: Tensor
    """Clipped temporal differences rho_t (r_t + d_t V(x_{t+1}) - V(x_t))."""


@torch.no_grad()
def scan_back(x_t: Tensor, w_t: Tensor) -> Tensor:
    """Solve ``y_t = x_t + w_t y_{t+1}`` with ``y_T = 0``: one fused kernel per step, written in place."""
    y_t = x_t.clone(memory_format=torch.contiguous_format)
    rows = y_t.unbind(0)
    weights = w_t.expand_as(y_t).unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(weights[t], rows[t + 1])
    return y_t


@torch.no_grad()
def n_step_returns(
    r_t: Tensor, discount_t: Tensor, v_t: Tensor, n: int | None = None, keep_t: Tensor | None = None
) -> Tensor:
    """Discounted sum of the next ``n`` rewards plus a bootstrap; near the end of the slice with fewer than n.

    ``n=None`` goes to the end of the slice from every step (A3C: n from 1 to t_max). A window never crosses a
    truncation: it bootstraps there from ``v_t``.
    """
    if n is None or n >= r_t.shape[0]:
        return lambda_returns(r_t, discount_t, v_t, 1.0, keep_t)
    if n < 1:
        raise ValueError(f"n_step_returns: n = {n}, but at least 1 reward is needed")
    # Written as n backward sweeps over shifted copies. Past the end of the slice a step costs nothing (reward 0,
    # discount 1, the last value again), so that a late window is simply shorter.
    T = r_t.shape[0]
    last_v = v_t[-1:].expand(n - 1, *v_t.shape[1:])
    v_pad = torch.cat([v_t, last_v])
    r_pad = torch.cat([r_t, torch.zeros_like(last_v)])
    discount_pad = torch.cat([discount_t, torch.ones_like(last_v)])
    keep_pad = None if keep_t is None else torch.cat([keep_t.to(v_t.dtype), torch.ones_like(last_v)])
    y_t = v_pad[n - 1 : n - 1 + T].clone()
    for i in range(n - 1, -1, -1):
        window = slice(i, i + T)
        if keep_pad is not None and i < n - 1:
            y_t = torch.lerp(v_pad[window], y_t, keep_pad[window])
        y_t = torch.addcmul(r_pad[window], discount_pad[window], y_t)
    return y_t


@torch.no_grad()
def lambda_returns(
    r_t: Tensor, discount_t: Tensor, v_t: Tensor, lambda_: float | Tensor = 1.0, keep_t: Tensor | None = None
) -> Tensor:
    """TD(lambda) returns: G_t = r_t + d_t ((1 - lambda) v_t + lambda G_{t+1}), with G_T = v_t[-1].

    ``lambda_`` may be a number or a tensor that broadcasts to ``[T, B]``.
    """
    w_t = _trace(discount_t, lambda_, keep_t)
    x_t = torch.addcmul(r_t, discount_t - w_t, v_t)
    x_t[-1] = r_t[-1] + discount_t[-1] * v_t[-1]
    return scan_back(x_t, w_t)


@torch.no_grad()
def gae(
    r_t: Tensor,
    discount_t: Tensor,
    v_tm1: Tensor,
    v_t: Tensor,
    lambda_: float | Tensor,
    keep_t: Tensor | None = None,
) -> Tensor:
    """Generalised advantages: A_t = delta_t + d_t lambda keep_t A_{t+1}. The value target is ``A_t + v_tm1``."""
    delta_t = torch.addcmul(r_t, discount_t, v_t).sub_(v_tm1)
    return scan_back(delta_t, _trace(discount_t, lambda_, keep_t))


@torch.no_grad()
def vtrace(
    log_rho_t: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    v_tm1: Tensor,
    v_t: Tensor,
    *,
    lambda_: float | Tensor = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    keep_t: Tensor | None = None,
    bootstrap: Literal["next", "mixed"] = "next",
) -> VTraceTargets:
    """V-trace targets and policy-gradient advantages for actions of a behaviour policy mu.

    ``log_rho_t`` is log pi(a_t|x_t) - log mu(a_t|x_t); `math.inf` as a threshold means no clipping. rho_bar sets
    what is learned, c_bar only how fast. With lambda < 1 there are two conventions for the advantage (they agree at 1):
    "next" bootstraps from v_{s+1} (SEED), "mixed" from lambda v_{s+1} + (1 - lambda) V(x_{s+1}) (rlax), which keeps
    ``vs = V + rho (q - V)`` exact.
    """
    if bootstrap not in ("next", "mixed"):
        raise ValueError(f'vtrace: bootstrap = {bootstrap!r}; choose "next" (SEED) or "mixed" (rlax)')
    rho_t = log_rho_t.exp()
    rho_clipped_t = rho_t.clamp(max=rho_bar)
    # c must be clipped from the unclipped ratio: clipping rho_clipped would silently use min(rho_bar, c_bar).
    c_t = rho_t.clamp(max=c_bar)
    keep_trace_t = _trace(discount_t, lambda_, keep_t)
    delta_t = torch.addcmul(r_t, discount_t, v_t).sub_(v_tm1).mul_(rho_clipped_t)
    correction_t = scan_back(delta_t, keep_trace_t * c_t)  # v_s - V(x_s)
    # The bootstrap v_{s+1} is V(x_{s+1}) + its correction; at the end of the slice and at a cut it is v_t alone.
    reach_t = keep_trace_t if bootstrap == "mixed" else _trace(discount_t, 1.0, keep_t)
    q_t = torch.addcmul(r_t, discount_t, v_t)
    q_t[:-1].addcmul_(reach_t.expand_as(q_t)[:-1], correction_t[1:])
    pg_rho_t = rho_clipped_t if pg_rho_bar == rho_bar else rho_t.clamp(max=pg_rho_bar)
    pg_advantage_t = q_t.sub_(v_tm1).mul_(pg_rho_t)
    return VTraceTargets(correction_t.add_(v_tm1), pg_advantage_t, rho_clipped_t, delta_t)


@torch.no_grad()
def upgo_returns(r_t: Tensor, discount_t: Tensor, v_tm1: Tensor, v_t: Tensor, keep_t: Tensor | None = None) -> Tensor:
    """Upgoing returns (AlphaStar): follow the trajectory while it does at least as well as expected, else bootstrap.

    G_t = r_t + d_t (G_{t+1} if r_{t+1} + d_{t+1} V(x_{t+2}) >= V(x_{t+1}) else V(x_{t+1})).
    """
    as_good_tp1 = torch.addcmul(r_t, discount_t, v_t) >= v_tm1
    lambda_t = torch.ones_like(v_t)
    lambda_t[:-1] = as_good_tp1[1:].to(v_t.dtype)
    return lambda_returns(r_t, discount_t, v_t, lambda_t, keep_t)


def _trace(discount_t: Tensor, lambda_: float | Tensor, keep_t: Tensor | None) -> Tensor:
    """How much of step t+1 flows back to step t: d_t lambda keep_t."""
    w_t = discount_t if isinstance(lambda_, float | int) and lambda_ == 1 else discount_t * lambda_
    return w_t if keep_t is None else w_t * keep_t
