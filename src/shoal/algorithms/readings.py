"""A gradient and the numbers that tell of it: read at once, or left on a device until they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shoal.algorithms.pinning import to_host

__all__ = ["Readings", "descend"]


class Readings(Mapping[str, float]):
    """Numbers that lie on a device until somebody looks: then they are fetched, all at once."""

    def __init__(self, numbers: Mapping[str, torch.Tensor]) -> None:
        self._names = tuple(numbers)
        self._values = torch.stack([value.detach() for value in numbers.values()])

    def copy(self) -> Readings:
        """The same numbers, in memory of their own."""
        other = Readings.__new__(Readings)
        other._names, other._values = self._names, self._values.clone()
        return other

    def send(self) -> None:
        """Start them on their way; see `to_host` for when they may be read."""
        self._values = to_host(self._values)

    def read(self) -> dict[str, float]:
        return dict(zip(self._names, self._values.tolist(), strict=True))

    def __getitem__(self, name: str) -> float:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def items(self) -> Any:
        return self.read().items()


def descend(loss: torch.Tensor, metrics: Mapping[str, torch.Tensor], grad: torch.Tensor, lr: float | torch.Tensor,
            waits: bool) -> tuple[Any, Mapping[str, float]]:
    """Of a loss the flat gradient, which is put into `grad`, and the metrics as numbers.

    Who `waits` gets an array and floats, others a tensor and Readings. Where loss or gradient are not finite the gradient becomes
    NaN, so that every learner of a group leaves the update out.
    """
    grad.zero_()
    loss.backward()
    metrics = {"loss": loss, **metrics, "grad_norm": torch.linalg.vector_norm(grad)}
    if not waits:
        unread = torch.isfinite(metrics["loss"].detach()) & torch.isfinite(metrics["grad_norm"])
        grad.add_(torch.where(unread, 0.0, math.nan))
        return grad, Readings({**metrics, "learning_rate": grad.new_zeros(()) + lr, "skipped": (~unread).float()})
    values = torch.stack([value.detach() for value in metrics.values()]).tolist()
    numbers = dict(zip(metrics, values, strict=True))
    finite = math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])
    if not finite:
        grad.fill_(math.nan)
    return grad.numpy(), {**numbers, "learning_rate": lr, "skipped": 0.0 if finite else 1.0}  # type: ignore[dict-item]
