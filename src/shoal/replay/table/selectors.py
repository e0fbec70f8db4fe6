"""Selectors: which item is drawn, or removed. They are descriptions; the work is compiled in `item_kernels`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from shoal.errors import ConfigError

__all__ = ["Fifo", "Lifo", "MaxHeap", "MinHeap", "Prioritized", "Selector", "Uniform", "selector_from"]

FIFO, LIFO, UNIFORM, PRIORITIZED, MIN_HEAP, MAX_HEAP = range(6)


@dataclass(frozen=True)
class Selector:
    """The base of the six."""

    kind: ClassVar[int]
    """Names it to the compiled code."""

    @property
    def power(self) -> float:
        """The exponent on priorities; 1 where it plays no part."""
        return 1.0

    uniform_mix = 0.0
    """The part of the draws that is uniform."""


@dataclass(frozen=True)
class Fifo(Selector):
    """The item inserted first."""

    kind = FIFO


@dataclass(frozen=True)
class Lifo(Selector):
    """The item inserted last."""

    kind = LIFO


@dataclass(frozen=True)
class Uniform(Selector):
    """Every item alike."""

    kind = UNIFORM


@dataclass(frozen=True)
class Prioritized(Selector):
    """Probability p^exponent / sum; zero is never drawn while any other is positive; all zero is uniform.

    A negative exponent prefers small priorities, as Ape-X DPG's remover does. uniform_mix u draws with
    (1 - u) p^exponent / sum + u / N instead, which reaches zero priorities too.
    """

    kind = PRIORITIZED
    exponent: float = 0.6
    uniform_mix: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.uniform_mix <= 1.0:
            raise ConfigError(f"Prioritized uniform_mix must be within 0 and 1, got {self.uniform_mix}")
        if not math.isfinite(self.exponent):
            raise ConfigError(f"Prioritized exponent must be finite, got {self.exponent}")

    @property
    def power(self) -> float:
        return self.exponent


@dataclass(frozen=True)
class MinHeap(Selector):
    """The smallest priority; ties go to the least recently inserted or updated."""

    kind = MIN_HEAP


@dataclass(frozen=True)
class MaxHeap(Selector):
    """The largest priority; ties go to the least recently inserted or updated."""

    kind = MAX_HEAP


def selector_from(name: str, exponent: float = 1.0, uniform_mix: float = 0.0) -> Selector:
    """The selector of a name as `describe` gives it."""
    if name == "Prioritized":
        return Prioritized(exponent, uniform_mix)
    kinds: dict[str, type[Selector]] = {kind.__name__: kind for kind in (Fifo, Lifo, Uniform, MinHeap, MaxHeap)}
    if name not in kinds:
        raise ConfigError(f"unknown selector {name!r}; choose from {sorted([*kinds, 'Prioritized'])}")
    return kinds[name]()
