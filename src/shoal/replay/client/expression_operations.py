"""The operations behind expressions, each on arrays with a leading batch axis: [B, T, ...].

Axes in parameters are those of one item; `_axis` moves non-negative ones past the batch axis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DYNAMIC", "OPERANDS", "OPERATIONS", "PARAMETERS", "result_bytes"]

Values = npt.NDArray[Any]


def _axis(axis: int) -> int:
    return axis + 1 if axis >= 0 else axis


def _axes(axes: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    if axes is None:
        return tuple(range(1, ndim))
    chosen = (axes,) if isinstance(axes, int) else tuple(axes)
    return tuple(_axis(axis) for axis in chosen)


def index(x: Values, at: int) -> Values:
    return x[:, operator.index(at)]


def slice_(x: Values, start: int | None, stop: int | None, step: int | None) -> Values:
    return x[:, start:stop:step]


def gather(x: Values, indices: Sequence[int]) -> Values:
    return x[:, [operator.index(at) for at in indices]]


def window(x: Values, n: int, stride: int) -> Values:
    """All windows of n steps, `stride` apart: [B, W, n, ...]."""
    if not 1 <= n <= x.shape[1] or stride < 1:
        raise ValueError(f"window({n}, stride={stride}) does not fit {x.shape[1]} steps")
    starts = np.arange(0, x.shape[1] - n + 1, stride)
    return x[:, starts[:, None] + np.arange(n)]


def _first_true(condition: Values) -> int:
    found = np.flatnonzero(condition.reshape(-1))
    return int(found[0]) if found.size else len(condition)


def _cut(x: Values, condition: Values, part: Callable[[int], slice]) -> Values:
    """Cut every item at its first true step; shorter results are padded with zeros."""
    if condition.shape != x.shape[:2]:
        raise ValueError(f"a condition has one value per step, got {condition.shape[1:]} for {x.shape[1:]}")
    pieces = [item[part(_first_true(flags))] for item, flags in zip(x, condition, strict=True)]
    result = np.zeros((len(x), max((len(piece) for piece in pieces), default=0), *x.shape[2:]), x.dtype)
    for at, piece in enumerate(pieces):
        result[at, : len(piece)] = piece
    return result


def before(x: Values, condition: Values) -> Values:
    """The steps before the first true one (all, where there is none)."""
    return _cut(x, condition, lambda at: slice(0, at))


def after(x: Values, condition: Values) -> Values:
    """The steps after the first true one."""
    return _cut(x, condition, lambda at: slice(at + 1, None))


def truncate(x: Values, condition: Values) -> Values:
    """The steps up to and with the first true one."""
    return _cut(x, condition, lambda at: slice(0, at + 1))


def concat(*xs: Values, axis: int) -> Values:
    return np.concatenate(xs, axis=_axis(axis))


def stack(x: Values, n: int) -> Values:
    """Every step with the n - 1 before it, the first repeated at the beginning: [B, T, n, ...]."""
    if n < 1:
        raise ValueError(f"stack needs at least one frame, got {n}")
    steps = np.arange(x.shape[1])[:, None] + np.arange(1 - n, 1)
    return x[:, np.maximum(steps, 0)]


def pad(x: Values, length: int, mode: str) -> Values:
    """To `length` steps: with zeros at the end or the beginning, or with the last step repeated ('edge')."""
    missing = length - x.shape[1]
    if missing < 0:
        raise ValueError(f"pad to {length} steps, but there are {x.shape[1]}")
    if mode == "edge":
        return np.concatenate([x, np.repeat(x[:, -1:], missing, axis=1)], axis=1)
    if mode not in ("end", "begin"):
        raise ValueError(f"pad mode must be 'end', 'begin' or 'edge', got {mode!r}")
    zeros = np.zeros((len(x), missing, *x.shape[2:]), x.dtype)
    return np.concatenate([x, zeros] if mode == "end" else [zeros, x], axis=1)


def transpose(x: Values, axes: Sequence[int]) -> Values:
    return x.transpose(0, *(_axis(axis) for axis in axes))


def reshape(x: Values, shape: Sequence[int]) -> Values:
    return x.reshape(len(x), *shape)


def shift(x: Values, k: int, fill: float) -> Values:
    """Move k steps later (earlier where negative); what is left open holds `fill`."""
    result = np.full_like(x, fill)
    if k >= 0:
        result[:, k:] = x[:, : max(0, x.shape[1] - k)]
    else:
        result[:, :k] = x[:, -k:]
    return result


def swap(x: Values) -> Values:
    """Time and the axis after it change places."""
    return np.swapaxes(x, 1, 2)


def _reduction(function: Callable[..., Values]) -> Callable[..., Values]:
    def reduce(x: Values, axes: int | Sequence[int] | None) -> Values:
        return function(x, axis=_axes(axes, x.ndim))

    return reduce


def cumsum(x: Values) -> Values:
    return np.cumsum(x, axis=1, dtype=x.dtype)


def cumprod(x: Values) -> Values:
    return np.cumprod(x, axis=1, dtype=x.dtype)


def running_max(x: Values) -> Values:
    return np.maximum.accumulate(x, axis=1)


def discounted_sum(x: Values, discount: Values) -> Values:
    """G_t = x_t + discount_t * G_{t+1}, from the end."""
    result = np.array(x, copy=True)
    for t in range(x.shape[1] - 2, -1, -1):
        result[:, t] += discount[:, t] * result[:, t + 1]
    return result


def _n_step(reward: Values, discount: Values, gamma: float, n: int, edge: str) -> tuple[Values, Values, Values]:
    if n < 1 or edge not in ("shorten", "drop", "mask"):
        raise ValueError(f"n_step needs n >= 1 and edge 'shorten', 'drop' or 'mask', got {n} and {edge!r}")
    steps = reward.shape[1]
    total = np.zeros_like(reward)
    product = np.ones_like(discount)
    for j in range(min(n, steps)):
        live = slice(0, steps - j)
        total[:, live] += product[:, live] * reward[:, j:]
        product[:, live] *= discount.dtype.type(gamma) * discount[:, j:]
    mask = np.broadcast_to(np.arange(steps) + n <= steps, reward.shape)
    if edge == "drop":
        keep = max(0, steps - n + 1)
        return total[:, :keep], product[:, :keep], mask[:, :keep]
    return total, product, np.ones_like(mask) if edge == "shorten" else mask


def n_step(reward: Values, discount: Values, gamma: float, n: int, edge: str, part: int) -> Values:
    """Part 0: the n-step return; 1: the product of discounts; 2: the mask of whole windows."""
    return _n_step(reward, discount, gamma, n, edge)[part]


OPERATIONS: dict[str, Callable[..., Values]] = {
    "index": index, "slice": slice_, "gather": gather, "window": window, "before": before, "after": after,
    "concat": concat, "stack": stack, "pad": pad, "truncate": truncate,
    "transpose": transpose, "reshape": reshape, "shift": shift, "swap": swap,
    "sum": _reduction(np.sum), "prod": _reduction(np.prod), "mean": _reduction(np.mean), "min": _reduction(np.min),
    "max": _reduction(np.max), "any": _reduction(np.any), "all": _reduction(np.all),
    "cumsum": cumsum, "cumprod": cumprod, "running_max": running_max, "discounted_sum": discounted_sum,
    "n_step": n_step,
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "negative": np.negative,
    "abs": np.abs, "maximum": np.maximum, "minimum": np.minimum, "power": np.power,
    "less": np.less, "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "equal": np.equal, "not_equal": np.not_equal, "logical_not": np.logical_not,
}  # fmt: skip

DYNAMIC = frozenset({"before", "after", "truncate"})
"""Operations whose length depends on the data."""

_NAMES = {
    "index": "at", "slice": "start stop step", "gather": "indices", "window": "n stride", "concat": "axis", "stack": "n",
    "pad": "length mode", "transpose": "axes", "reshape": "shape", "shift": "k fill", "n_step": "gamma n edge part",
    **dict.fromkeys(("sum", "prod", "mean", "min", "max", "any", "all"), "axes"),
}  # fmt: skip
PARAMETERS: dict[str, frozenset[str]] = {name: frozenset(_NAMES.get(name, "").split()) for name in OPERATIONS}
"""The parameters of every operation: NumPy's own functions would take others (`out`, `dtype`), which clients must not set."""

OPERANDS: dict[str, int] = dict.fromkeys(OPERATIONS, 1) | {
    name: 2 for name in (
        "before", "after", "truncate", "discounted_sum", "n_step", "add", "subtract", "multiply", "divide", "maximum", "minimum",
        "power", "less", "less_equal", "greater", "greater_equal", "equal", "not_equal",
    )
}  # fmt: skip
"""How many expressions an operation combines; concat takes any number from one on."""


def result_bytes(name: str, values: Sequence[Any], parameters: Mapping[str, Any]) -> int:
    """About how many bytes an operation will take, before it runs; raises what the operation would for parameters it cannot use."""
    shape, size = np.shape(values[0]), np.asarray(values[0]).itemsize
    if name == "concat":
        return int(sum(np.asarray(value).nbytes for value in values))
    if name in DYNAMIC:
        return int(math.prod(shape) * size)
    if OPERANDS[name] == 2:
        size = 8 if name == "divide" else np.result_type(*values).itemsize
        return int(math.prod(np.broadcast_shapes(*(np.shape(value) for value in values))) * size)
    if name not in LENGTHENING or len(shape) < 2:
        return int(math.prod(shape) * (8 if name == "mean" else size))
    steps = LENGTHENING[name](shape[1], parameters)
    return int(steps * (math.prod(shape) // max(1, shape[1]) * size + 8))  # the cells, and their indices


LENGTHENING: dict[str, Callable[[int, Mapping[str, Any]], int]] = {
    "window": lambda steps, given: max(0, (steps - given["n"]) // given["stride"] + 1) * given["n"],
    "stack": lambda steps, given: steps * given["n"],
    "pad": lambda steps, given: max(steps, given["length"]),
    "gather": lambda steps, given: len(given["indices"]),
}
"""Steps of the results of operations that make an item longer."""
