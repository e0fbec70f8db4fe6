"""What a policy is worth, from episodes of another one: weighted importance sampling and weighted doubly robust estimates.

    ratio[i, t]      pi(a_t|x_t) / mu(a_t|x_t) of episode i; 1 behind its end
    w[i, t]          prod_{k <= t} ratio[i, k], divided by its sum over episodes: at each step weights add up to 1
    importance       sum_{i,t} gamma^t w[i, t] r[i, t]
    doubly robust    sum_{i,t} gamma^t ( w[i, t] (r[i, t] - Q(x_t, a_t)) + w[i, t-1] V(x_t) ),   w[i, -1] = 1 / episodes

Precup et al. 2000 (per-decision, weighted); Thomas and Brunskill 2016 (1604.00923, weighted doubly robust). Arrays are [episodes,
longest], and behind the end of an episode rewards, Q and V are 0. `counts` [B, episodes] says how often each episode counts in each
of B resamples; there is an estimate of each [B].
"""

from __future__ import annotations

import numpy as np

__all__ = ["doubly_robust", "effective_size", "importance"]

TINY = np.finfo(np.float64).tiny  # a step at which no episode has a weight counts for nothing


def importance(log_ratio: np.ndarray, reward: np.ndarray, gamma: float, counts: np.ndarray) -> np.ndarray:
    weight = _weights(log_ratio)
    found: np.ndarray = _mean(counts, weight, reward) @ _powers(reward.shape[1], gamma)
    return found


def doubly_robust(log_ratio: np.ndarray, reward: np.ndarray, q: np.ndarray, v: np.ndarray, gamma: float,
                  counts: np.ndarray) -> np.ndarray:
    weight = _weights(log_ratio)
    before = np.concatenate([np.ones((len(weight), 1)), weight[:, :-1]], 1)
    found: np.ndarray = (_mean(counts, weight, reward - q) + _mean(counts, before, v)) @ _powers(reward.shape[1], gamma)
    return found


def effective_size(log_ratio: np.ndarray) -> float:
    """(sum w)^2 / sum w^2 of whole episodes: how many episodes of the policy itself would tell as much."""
    weight = _weights(log_ratio)[:, -1]
    return float(weight.sum() ** 2 / max(np.square(weight).sum(), TINY))


def _weights(log_ratio: np.ndarray) -> np.ndarray:
    """Products of ratios up to each step, in units of the largest at that step."""
    total = np.cumsum(log_ratio, 1, dtype=np.float64)
    most = total.max(0, keepdims=True)
    weight: np.ndarray = np.exp(total - np.where(np.isfinite(most), most, 0.0))
    return weight


def _mean(counts: np.ndarray, weight: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Weighted means over episodes, [B, longest]."""
    found: np.ndarray = (counts @ (weight * values)) / np.maximum(counts @ weight, TINY)
    return found


def _powers(length: int, gamma: float) -> np.ndarray:
    return gamma ** np.arange(length)
