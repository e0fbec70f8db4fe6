"""A gradient and the metrics of it: read at once, or left on a device until they are read."""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.core import Vector
from shoal.device.transfer import to_host

__all__ = ["Readings", "flat_gradient"]


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


def flat_gradient(loss: torch.Tensor, metrics: Mapping[str, torch.Tensor], grad: torch.Tensor, lr: float | torch.Tensor,
                  waits: bool, *, parameters: Sequence[torch.Tensor] | None = None, prefix: str = "", adds: bool = False,
                  feeds: torch.Tensor | None = None) -> tuple[Vector, Mapping[str, float]]:
    """The flat gradient of a loss, which is put into `grad`, and the metrics as numbers; "loss", "grad_norm" and "learning_rate"
    are added, with a `prefix`. With `parameters`, only theirs is computed; those of them that another phase owns have theirs in
    `feeds`. That phase `adds` its own gradient to what is there.

    With `waits` these are an array and floats, otherwise a tensor and Readings. Where loss or gradient are not finite the gradient
    becomes NaN, so that every learner of a group leaves the update out.
    """
    if not adds:
        grad.zero_()
    if feeds is not None:
        feeds.zero_()
    loss.backward(inputs=parameters)
    metrics = {f"{prefix}loss": loss, **metrics, f"{prefix}grad_norm": torch.linalg.vector_norm(grad)}
    if not waits:
        finite = torch.isfinite(loss.detach()) & torch.isfinite(metrics[f"{prefix}grad_norm"])
        for found in (grad,) if feeds is None else (grad, feeds):
            found.add_(torch.where(finite, 0.0, math.nan))
        return grad, Readings({**metrics, f"{prefix}learning_rate": grad.new_zeros(()) + lr})
    values = torch.stack([value.detach() for value in metrics.values()]).tolist()
    numbers: dict[str, Any] = dict(zip(metrics, values, strict=True))
    if not (math.isfinite(numbers[f"{prefix}loss"]) and math.isfinite(numbers[f"{prefix}grad_norm"])):
        grad.fill_(math.nan)
        if feeds is not None:
            feeds.fill_(math.nan)
    return grad.numpy(), {**numbers, f"{prefix}learning_rate": float(lr)}
