"""Losses of policy-gradient learners, per element, and the masked reductions that turn them into one number.

A loss has the shape of its inputs (``[T, B]``); the caller reduces it with `masked_mean` (PPO, SEED, APPO) or
`masked_sum` (IMPALA), because the choice changes the meaning of the learning rate by T x B and belongs in the config.
``valid`` is 1 (or True) where an element counts; elements with 0 change neither the loss nor any gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "approx_kl",
    "clip_fraction",
    "explained_variance",
    "importance_ratio",
    "masked_mean",
    "masked_mean_std",
    "masked_sum",
    "normalise",
    "policy_gradient_loss",
    "ppo_clip_loss",
    "value_loss",
]


def masked_sum(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """Sum over the valid elements. A non-finite value in an invalid one does not reach the sum."""
    return x.sum() if valid is None else torch.where(valid.bool(), x, 0).sum()


def masked_mean(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean over the valid elements; 0 when there is none."""
    if valid is None:
        return x.mean()
    keep = valid.bool()
    return torch.where(keep, x, 0).sum() / keep.expand_as(x).sum().clamp(min=1)


def masked_mean_std(x: Tensor, valid: Tensor | None = None, ddof: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the valid elements (``ddof`` 0: population, 1: sample)."""
    mean = masked_mean(x, valid)
    square = masked_sum((x - mean).square(), valid)
    if valid is None:
        return mean, (square / max(x.numel() - ddof, 1)).sqrt()
    divisor = (valid.bool().expand_as(x).sum() - ddof).clamp(min=1)
    return mean, (square / divisor).sqrt()


def normalise(advantage_t: Tensor, mean: Tensor | float, std: Tensor | float, floor: float = 1e-7) -> Tensor:
    """(A - mean) / max(std, floor). The statistics are given, so that they can be global over several learners."""
    scale = std.clamp(min=floor) if isinstance(std, Tensor) else max(std, floor)
    return (advantage_t - mean) / scale


def importance_ratio(
    log_prob_t: Tensor, behaviour_log_prob_t: Tensor, lower: float | None = None, upper: float | None = None
) -> Tensor:
    """pi/mu from log-probabilities, optionally clamped (Sample Factory: 0.05 to 20).

    The clamp acts before the exponential, and at e^20 in any case: an overflow to infinity would turn the zero gradient
    of a masked or clipped element into NaN.
    """
    low = None if lower is None else math.log(lower)
    high = 20.0 if upper is None else math.log(upper)
    return (log_prob_t - behaviour_log_prob_t).clamp(min=low, max=high).exp()


def policy_gradient_loss(log_prob_t: Tensor, advantage_t: Tensor) -> Tensor:
    """-A log pi(a). The advantage is a constant: no value gradient may leak through it."""
    return -log_prob_t * advantage_t.detach()


def ppo_clip_loss(ratio_t: Tensor, advantage_t: Tensor, lower: float, upper: float) -> Tensor:
    """-min(ratio A, clip(ratio, lower, upper) A).

    PPO: (1 - eps, 1 + eps). Sample Factory: (1 / (1 + eps), 1 + eps), the reciprocal lower bound.
    """
    advantage_t = advantage_t.detach()
    return -torch.minimum(ratio_t * advantage_t, ratio_t.clamp(lower, upper) * advantage_t)


def clip_fraction(ratio_t: Tensor, lower: float, upper: float, valid: Tensor | None = None) -> Tensor:
    """Share of valid elements whose ratio lies outside the bounds."""
    outside = (ratio_t < lower) | (ratio_t > upper)
    return masked_mean(outside.to(ratio_t.dtype), valid)


def value_loss(v_tm1: Tensor, target_t: Tensor, old_v_tm1: Tensor | None = None, clip: float | None = None) -> Tensor:
    """0.5 (V - target)^2; with ``clip`` the larger of that and the error of V held within +-clip of ``old_v_tm1``."""
    target_t = target_t.detach()
    error = (v_tm1 - target_t).square()
    if clip is not None:
        if old_v_tm1 is None:
            raise ValueError("value_loss: clip needs old_v_tm1, the values at collection time")
        held = old_v_tm1 + (v_tm1 - old_v_tm1).clamp(-clip, clip)
        error = torch.maximum(error, (held - target_t).square())
    return 0.5 * error


def approx_kl(log_prob_t: Tensor, behaviour_log_prob_t: Tensor) -> Tensor:
    """(rho - 1) - log rho: an estimate of KL(mu || pi) that is never negative and has low variance."""
    log_ratio_t = log_prob_t - behaviour_log_prob_t
    return torch.expm1(log_ratio_t) - log_ratio_t


def explained_variance(v_tm1: Tensor, target_t: Tensor, valid: Tensor | None = None) -> Tensor:
    """1 - Var(target - V) / Var(target): 1 is perfect, 0 no better than a constant. NaN if the targets are constant."""
    _, residual_std = masked_mean_std(target_t - v_tm1, valid)
    _, target_std = masked_mean_std(target_t, valid)
    return torch.where(target_std > 0, 1 - (residual_std / target_std).square(), torch.nan)
