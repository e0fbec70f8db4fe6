"""Where a hyper-parameter may lie: drawn from there at first, perturbed within it later.

    shoal.loguniform(1e-4, 1e-2)    shoal.uniform(0, 1)    shoal.choice(8, 16, 32)
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shoal.errors import ConfigError

__all__ = ["Choice", "Prior", "Range", "choice", "explored", "loguniform", "parse_prior", "uniform"]

FACTORS = (1.2, 0.8)


class Prior(Protocol):
    """A distribution of one value."""

    def draw(self, rng: np.random.Generator) -> Any: ...
    def perturb(self, value: Any, rng: np.random.Generator) -> Any: ...
    def holds(self, value: Any) -> bool: ...
    def grid(self, count: int) -> list[Any]: ...  # `count` values, evenly spread; all that there are of a choice


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, evenly or evenly in their logarithm; whole numbers where both bounds are."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not all(-sys.float_info.max <= bound <= sys.float_info.max for bound in (self.low, self.high)):
            raise ConfigError(f"{'loguniform' if self.log else 'uniform'}: both bounds must be finite numbers")
        if self.low >= self.high:
            raise ConfigError(f"{self}: the first bound must be below the second one; give them in this order")
        if self.log and self.low <= 0:
            raise ConfigError(f"{self}: its bounds must be above 0; use uniform({self.low!r}, {self.high!r})")

    def __str__(self) -> str:
        return f"{'loguniform' if self.log else 'uniform'}({self.low!r}, {self.high!r})"

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, rng: np.random.Generator) -> float:
        return self._at(rng.random())

    def perturb(self, value: float, rng: np.random.Generator) -> float:
        """Times 1.2 or 0.8, within the bounds; a whole number that rounding would bring back moves by one."""
        factor = FACTORS[int(rng.integers(2))]
        moved = self._kept(float(value) * factor)
        return moved if moved != value or not self.whole else self._kept(value + math.copysign(1, factor - 1))

    def holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def grid(self, count: int) -> list[float]:
        return list(dict.fromkeys(self._at(0.5 if count == 1 else k / (count - 1)) for k in range(count)))

    def _at(self, share: float) -> float:
        if self.log:
            return self._kept(math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low))))
        return self._kept(self.low + share * (self.high - self.low))

    def _kept(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else value


@dataclass(frozen=True)
class Choice:
    """One of several values; a perturbation moves to a neighbour."""

    options: tuple[Any, ...]

    def __post_init__(self) -> None:
        if len(self.options) < 2:
            raise ConfigError(f"{self}: give at least two values to choose from")

    def __str__(self) -> str:
        return f"choice({', '.join(map(repr, self.options))})"

    def draw(self, rng: np.random.Generator) -> Any:
        return self.options[int(rng.integers(len(self.options)))]

    def perturb(self, value: Any, rng: np.random.Generator) -> Any:
        place = self.options.index(value) + (1 if rng.integers(2) else -1)
        return self.options[min(max(place, 0), len(self.options) - 1)]

    def holds(self, value: Any) -> bool:
        return str(value) in map(str, self.options)

    def grid(self, count: int) -> list[Any]:
        return list(self.options)


def loguniform(low: float, high: float) -> Range:
    """Evenly in the logarithm, between two bounds above 0."""
    return Range(low, high, log=True)


def uniform(low: float, high: float) -> Range:
    """Evenly between two bounds."""
    return Range(low, high)


def choice(*options: Any) -> Choice:
    """One of these. Tuples become lists, as they are in a study's files."""
    return Choice(tuple(list(one) if isinstance(one, tuple) else one for one in options))


def explored(values: dict[str, Any], priors: dict[str, Prior], resample: float, rng: np.random.Generator) -> dict[str, Any]:
    """Each value drawn anew with probability `resample`, else perturbed."""
    return {name: prior.draw(rng) if rng.random() < resample else prior.perturb(values[name], rng)
            for name, prior in priors.items()}


def parse_prior(text: str) -> Prior:
    """loguniform(1e-4, 1e-2), uniform(0, 1) or choice(8, 16), as on the command line."""
    kinds: dict[str, Callable[..., Prior]] = {"loguniform": loguniform, "uniform": uniform, "choice": choice}
    kind, _, rest = text.strip().partition("(")
    try:
        arguments = ast.literal_eval(f"({rest.removesuffix(')')},)")
        if kind not in kinds or not rest.endswith(")"):
            raise ValueError
        if kind != "choice" and (len(arguments) != 2 or not all(isinstance(one, int | float) for one in arguments)):
            raise ValueError
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ConfigError(f"{text[:60]} is not a range of values; write loguniform(1e-4, 1e-2), uniform(0.0, 1.0) or "
                          "choice(8, 16, 32)") from None
    return kinds[kind](*arguments)
