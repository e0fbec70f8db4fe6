"""How a player chooses among its opponents.

Prioritised fictitious self-play (Vinyals et al. 2019): P(B) = f(x_B) / sum f, where x_B is how often one beats B.

    hard            (1 - x)^p      those that one loses to
    variance        x (1 - x)      those of one's own strength
    linear          1 - x
    linear_capped   min(1/2, 1 - x)
    uniform         1              fictitious play

Qualities (Berner et al. 2019, OpenAI Five; the weighting `quality`): past versions are drawn by a softmax of q; q falls when one
beats a version. They are kept by each player that draws so, not computed from the payoff table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from shoal.errors import ConfigError

__all__ = ["OpponentQualities", "Weighting", "pfsp"]

Weighting = Literal["hard", "variance", "linear", "linear_capped", "uniform", "quality"]
NOTHING = 1e-10  # where all weights are below it, opponents are drawn uniformly


def pfsp(rates: np.ndarray | Sequence[float], weighting: Weighting, power: float = 2.0) -> np.ndarray:
    """Probabilities of opponents that are beaten with these rates; `power` is that of "hard". Not for "quality", which does not
    follow from rates."""
    x = np.asarray(rates, np.float64)
    if not len(x):
        raise ValueError("pfsp: there are no opponents to choose from")
    if weighting == "hard":
        weights = (1 - x) ** power
    elif weighting == "variance":
        weights = x * (1 - x)
    elif weighting == "linear":
        weights = 1 - x
    elif weighting == "linear_capped":
        weights = np.minimum(0.5, 1 - x)
    elif weighting == "uniform":
        weights = np.ones(len(x))
    else:
        raise ConfigError(f"weighting={weighting!r}: use hard, variance, linear, linear_capped or uniform")
    if (weights < NOTHING).all():
        weights = np.ones(len(x))
    return np.asarray(weights / weights.sum())


class OpponentQualities:
    """A quality for each past version, by its name."""

    def __init__(self, rate: float = 0.01, qualities: Mapping[str, float] | None = None) -> None:
        self.rate = rate
        self.qualities = {name: float(quality) for name, quality in (qualities or {}).items()}

    def probabilities(self, names: Sequence[str]) -> np.ndarray:
        """A softmax over the qualities of these versions."""
        qualities = np.array([self.qualities[name] for name in names])
        weights = np.exp(qualities - qualities.max())
        return np.asarray(weights / weights.sum())

    def add(self, name: str) -> None:
        """A new version begins with the highest quality; one that is known keeps its own."""
        self.qualities.setdefault(name, max(self.qualities.values(), default=0.0))

    def won(self, name: str, chance: float) -> None:
        """The current version beat this one, which had been drawn with probability `chance`: rarely drawn ones move more. Nothing
        is learned from a loss."""
        self.qualities[name] -= self.rate / (len(self.qualities) * chance)

    def remove(self, name: str) -> None:
        """A version that is played no more."""
        self.qualities.pop(name, None)
