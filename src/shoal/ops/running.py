"""Running mean and variance, in float64, in forms that many processes can add up.

Two forms of the same three numbers per feature:
    Moments (count, mean, m2)       what is kept; merged pairwise by the parallel Welford rule (Chan et al. 1983)
    Sums    (count, s1, s2)         plain sums of (x - shift) and (x - shift)^2, so that an all-reduce may add them
Learners bring the sums of their new data to one frozen ``shift`` that all share (the current mean: plain sums around 0 would
cancel catastrophically), the group adds the vectors [count, s1, s2], and each merges the total with `merge_sums`. All end with
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Moments", "Sums", "empty", "merge", "merge_sums", "unpack", "variance"]


class Moments(NamedTuple):
    """count (0-d), mean and m2 = sum of squared deviations; float64."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which is not used
    mean: Tensor
    m2: Tensor


class Sums(NamedTuple):
    """count (0-d), sum of (x - shift), sum of (x - shift)^2; float64; additive for equal shifts."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which is not used
    s1: Tensor
    s2: Tensor


def empty(shape: Sequence[int] = ()) -> Moments:
    """Moments of no data."""
    zero = torch.zeros(tuple(shape), dtype=torch.float64)
    return Moments(torch.zeros((), dtype=torch.float64), zero, zero.clone())


@torch.no_grad()
def merge(a: Moments, b: Moments) -> Moments:
    """Moments of both sets of data together (parallel Welford)."""
    count = a.count + b.count
    share = b.count / count.clamp(min=1)
    delta = b.mean - a.mean
    return Moments(count, a.mean + delta * share, a.m2 + b.m2 + delta.square() * (a.count * share))


@torch.no_grad()
def merge_sums(a: Moments, total: Sums, shift: Tensor) -> Moments:
    """Moments of ``a`` together with the data behind ``total``, which were taken relative to ``shift``."""
    offset = total.s1 / total.count.clamp(min=1)
    m2 = (total.s2 - offset * total.s1).clamp(min=0)
    return merge(a, Moments(total.count, shift.to(torch.float64) + offset, m2))


def unpack(vector: Tensor, shape: Sequence[int]) -> Sums:
    """From one float64 vector ``[1 + 2 F]``, as an all-reduce adds it, for a mean of this shape."""
    s1, s2 = vector[1:].reshape(2, *shape).unbind(0)
    return Sums(vector[0], s1, s2)


def variance(a: Moments) -> Tensor:
    """Population variance; 1 where there are fewer than two samples, so that nothing is scaled yet."""
    return torch.where(a.count >= 2, a.m2 / a.count.clamp(min=1), 1.0)
