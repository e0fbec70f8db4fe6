"""Running mean and variance, in float64, in forms that many processes can add up.

Two forms of the same three numbers per feature:
    Moments (count, mean, m2)       what is kept; merged pairwise by the parallel Welford rule (Chan et al. 1983)
    Sums    (count, s1, s2)         plain sums of (x - shift) and (x - shift)^2, so that an all-reduce may add them
Actors or learners compute `sums` of their new data relative to one frozen ``shift`` that all share (the current mean:
plain sums around 0 would cancel catastrophically), the group adds the packed vectors, and each merges the total with
`merge_sums`. Everybody ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Moments",
    "Sums",
    "empty",
    "merge",
    "merge_sums",
    "moments",
    "normalise",
    "pack",
    "sums",
    "unpack",
    "variance",
]


class Moments(NamedTuple):
    """count (0-d), mean and m2 = sum of squared deviations; float64."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody misses
    mean: Tensor
    m2: Tensor


class Sums(NamedTuple):
    """count (0-d), sum of (x - shift), sum of (x - shift)^2; float64; additive for equal shifts."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody misses
    s1: Tensor
    s2: Tensor


def empty(shape: Sequence[int] = ()) -> Moments:
    """Moments of no data."""
    zero = torch.zeros(tuple(shape), dtype=torch.float64)
    return Moments(torch.zeros((), dtype=torch.float64), zero, zero.clone())


@torch.no_grad()
def moments(x: Tensor, axes: int | Sequence[int] = 0, valid: Tensor | None = None) -> Moments:
    """Moments of ``x`` over ``axes``. ``valid`` has one entry per element of the reduced, leading axes."""
    values, weight, dims, count = _prepare(x, axes, valid)
    divisor = count.clamp(min=1)
    mean = (values if weight is None else values * weight).sum(dims, keepdim=True) / divisor
    square = (values - mean).square_()
    m2 = (square if weight is None else square.mul_(weight)).sum(dims)
    return Moments(count, mean.squeeze(dims), m2)


@torch.no_grad()
def sums(x: Tensor, shift: Tensor, axes: int | Sequence[int] = 0, valid: Tensor | None = None) -> Sums:
    """Additive sums of ``x`` over ``axes`` relative to ``shift`` (shape of the mean); ``valid`` as in `moments`."""
    values, weight, dims, count = _prepare(x, axes, valid)
    offset = shift.to(torch.float64)
    for dim in sorted(dims):
        offset = offset.unsqueeze(dim)
    delta = values - offset
    if weight is not None:
        delta.mul_(weight)
    return Sums(count, delta.sum(dims), delta.square_().sum(dims))


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


def pack(total: Sums) -> Tensor:
    """One float64 vector ``[1 + 2 F]`` to all-reduce."""
    return torch.cat([total.count.reshape(1), total.s1.reshape(-1), total.s2.reshape(-1)])


def unpack(vector: Tensor, shape: Sequence[int]) -> Sums:
    """The reverse of `pack` for a mean of this shape."""
    s1, s2 = vector[1:].reshape(2, *shape).unbind(0)
    return Sums(vector[0], s1, s2)


def variance(a: Moments) -> Tensor:
    """Population variance; 1 where there are fewer than two samples, so that nothing is scaled yet."""
    return torch.where(a.count >= 2, a.m2 / a.count.clamp(min=1), 1.0)


def normalise(x: Tensor, mean: Tensor | None, var: Tensor, clip: float | None = None, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps), clipped to +-clip, in float32. ``mean=None`` only scales (rewards)."""
    scale = torch.rsqrt(var + eps).to(torch.float32)
    y = x.to(torch.float32)
    y = y * scale if mean is None else (y - mean.to(torch.float32)) * scale
    return y if clip is None else y.clamp(-clip, clip)


def _prepare(
    x: Tensor, axes: int | Sequence[int], valid: Tensor | None
) -> tuple[Tensor, Tensor | None, list[int], Tensor]:
    dims = [axis % x.dim() for axis in ([axes] if isinstance(axes, int) else axes)]
    values = x.to(torch.float64)
    if valid is None:
        size = 1
        for dim in dims:
            size *= x.shape[dim]
        return values, None, dims, torch.tensor(float(size), dtype=torch.float64, device=x.device)
    if sorted(dims) != list(range(valid.dim())) or valid.shape != x.shape[: valid.dim()]:
        raise ValueError(
            f"running: valid has shape {tuple(valid.shape)}, but axes {dims} of x {tuple(x.shape)} are reduced"
        )
    weight = valid.to(torch.float64).reshape(*valid.shape, *(1,) * (x.dim() - valid.dim()))
    values = torch.where(weight > 0, values, 0)
    return values, weight, dims, weight.sum()
