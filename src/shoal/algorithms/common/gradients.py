"""A gradient and the metrics of it: read at once, or left on a device until they are read."""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shoal.core import Vector
from shoal.device.transfer import DeviceEvent, to_host

__all__ = ["Readings", "descend", "fetched", "measured"]


class Readings(Mapping[str, float]):
    """Numbers that stay on a device until one is read: then all are fetched at once."""

    def __init__(self, numbers: Mapping[str, torch.Tensor]) -> None:
        self._names = tuple(numbers)
        self._values = torch.stack([value.detach() for value in numbers.values()])

    @classmethod
    def joined(cls, parts: Sequence[Readings]) -> Readings:
        """The numbers of several, which have different names."""
        if len(parts) == 1:
            return parts[0]
        whole = cls.__new__(cls)
        whole._names, whole._values = tuple(name for part in parts for name in part), torch.cat([part._values for part in parts])
        return whole

    def copy(self) -> Readings:
        """The same numbers, in memory of their own."""
        other = Readings.__new__(Readings)
        other._names, other._values = self._names, self._values.clone()
        return other

    def tensor(self, name: str) -> torch.Tensor:
        """One of the numbers, where it lies."""
        return self._values[self._names.index(name)]

    def with_number(self, name: str, value: torch.Tensor) -> Readings:
        """The same and one more."""
        other = Readings.__new__(Readings)
        other._names, other._values = (*self._names, name), torch.cat([self._values, value.unsqueeze(0)])
        return other

    def send(self) -> None:
        """Start copying them to the host; see `to_host` for when they may be read."""
        self._values = to_host(self._values)

    def read(self) -> dict[str, float]:
        return dict(zip(self._names, self._values.tolist(), strict=True))

    def __getitem__(self, name: str) -> float:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def items(self) -> ItemsView[str, float]:
        return self.read().items()


def measured(loss: torch.Tensor, metrics: Mapping[str, torch.Tensor], grad: torch.Tensor, *,
             parameters: Sequence[torch.Tensor] | None = None, prefix: str = "", adds: bool = False,
             feeds: torch.Tensor | None = None) -> Readings:
    """Put the flat gradient of a loss into `grad`. Its metrics stay where they are; "loss" and "grad_norm" are added, with a
    `prefix`. With `parameters`, only theirs is computed; those of them that another phase owns have theirs in `feeds`. That phase
    `adds` its own gradient to what is there."""
    if not adds:
        grad.zero_()
    if feeds is not None:
        feeds.zero_()
    loss.backward(inputs=parameters)
    return Readings({f"{prefix}loss": loss, **metrics, f"{prefix}grad_norm": torch.linalg.vector_norm(grad)})


def descend(found: Readings, grad: torch.Tensor, lr: float | torch.Tensor, waits: bool, *, prefix: str = "",
            feeds: torch.Tensor | None = None) -> tuple[Vector, Mapping[str, float]]:
    """The gradient that was `measured`, and the metrics as numbers, with "learning_rate".

    With `waits` these are an array and floats, otherwise a tensor and Readings. Where loss or gradient are not finite the gradient
    becomes NaN, so that every learner of a group leaves the update out.
    """
    if not waits:
        finite = torch.isfinite(found.tensor(f"{prefix}loss")) & torch.isfinite(found.tensor(f"{prefix}grad_norm"))
        for one in (grad,) if feeds is None else (grad, feeds):
            one.add_(torch.where(finite, 0.0, math.nan))
        return grad, found.with_number(f"{prefix}learning_rate", grad.new_zeros(()) + lr)
    numbers: dict[str, Any] = found.read()
    if not (math.isfinite(numbers[f"{prefix}loss"]) and math.isfinite(numbers[f"{prefix}grad_norm"])):
        grad.fill_(math.nan)
        if feeds is not None:
            feeds.fill_(math.nan)
    numbers[f"{prefix}learning_rate"] = float(lr)
    return grad.numpy(), numbers


def fetched(gradient: Vector, metrics: Mapping[str, float]) -> np.ndarray:
    """The gradient as an array on the host. From a GPU it comes together with its metrics: they are waited for once."""
    if isinstance(gradient, np.ndarray):
        return gradient
    if isinstance(metrics, Readings):
        metrics.send()
    copy = to_host(gradient)
    DeviceEvent(gradient.device).wait()
    array: np.ndarray = copy.numpy()
    return array
