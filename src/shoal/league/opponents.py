"""How a player chooses among its opponents.

Prioritised fictitious self-play (Vinyals et al. 2019): P(B) = f(x_B) / sum f, where x_B is how often one beats B.

    hard            (1 - x)^p      those that one loses to
    variance        x (1 - x)      those of one's own strength
    linear          1 - x
    linear_capped   min(1/2, 1 - x)
    uniform         1              fictitious play

Qualities (Berner et al. 2019, OpenAI Five): past versions are drawn by a softmax of q; q falls when one beats a version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from shoal.errors import ConfigError

__all__ = ["OpponentQualities", "Weighting", "pfsp"]

Weighting = Literal["hard", "variance", "linear", "linear_capped", "uniform"]
NOTHING = 1e-10  # where all weights are below it, opponents are drawn uniformly


def pfsp(rates: np.ndarray | Sequence[float], weighting: Weighting, power: float = 2.0) -> np.ndarray:
    """Probabilities of opponents that are beaten with these rates; `power` is that of "hard"."""
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
    """A quality for each past version, in the order in which they were added."""

    def __init__(self, rate: float = 0.01, qualities: Sequence[float] = ()) -> None:
        self.rate = rate
        self.qualities = np.array(qualities, np.float64)

    @property
    def probabilities(self) -> np.ndarray:
        weights = np.exp(self.qualities - self.qualities.max())
        return np.asarray(weights / weights.sum())

    def add(self) -> int:
        """A new version begins with the highest quality; returns its number."""
        best = self.qualities.max() if len(self.qualities) else 0.0
        self.qualities = np.append(self.qualities, best)
        return len(self.qualities) - 1

    def won(self, index: int) -> None:
        """The current version beat this one. Nothing is learned from a loss. Rarely drawn ones move more."""
        self.qualities[index] -= self.rate / (len(self.qualities) * self.probabilities[index])
