"""Statistics for a few runs on several tasks, as in "Deep RL at the edge of the statistical precipice" (arXiv 2108.13264).

    scores [runs, tasks]     one task is a case of a suite (preset, environment, actors), one run is a seed

- the interquartile mean (25 % trimmed mean over all runs and tasks): robust like the median, precise like the mean;
- stratified bootstrap intervals: runs are drawn anew within each task, the tasks stay;
- performance profiles: the share of runs whose score is above tau, for every tau;
- the probability of improvement: how likely a run of X beats a run of Y on a task, ties counted half, averaged over tasks.

Tests hold these against numbers that rliable gave for the same scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Interval", "bootstrap", "geometric_mean", "interquartile_mean", "performance_profile", "probability_of_improvement"]

REPEATS = 2000
COVERAGE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    def excludes(self, neutral: float) -> bool:
        """Whether the difference from `neutral` is more than noise."""
        return not self.low <= neutral <= self.high


def interquartile_mean(scores: np.ndarray) -> float:
    """The mean of the middle half of all scores."""
    ordered = np.sort(np.asarray(scores, np.float64), axis=None)
    cut = int(0.25 * ordered.size)
    return float(ordered[cut : ordered.size - cut].mean())


def geometric_mean(scores: np.ndarray) -> float:
    """For ratios: twice and half cancel out."""
    return float(np.exp(np.log(np.asarray(scores, np.float64)).mean()))


def performance_profile(scores: np.ndarray, taus: Sequence[float] | np.ndarray) -> np.ndarray:
    """[len(taus)]: the share of all runs with a score above each tau."""
    flat = np.asarray(scores, np.float64).reshape(-1)
    return (flat[None, :] > np.asarray(taus, np.float64)[:, None]).mean(1)


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """P(a run of x > a run of y), per task, averaged. The numbers of runs may differ, the tasks are the same."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    wins = (x[:, None, :] > y[None, :, :]) + 0.5 * (x[:, None, :] == y[None, :, :])
    return float(wins.mean())


def bootstrap(statistic: Callable[..., float], *scores: Sequence[np.ndarray] | np.ndarray, seed: int = 0,
              repeats: int = REPEATS, coverage: float = COVERAGE) -> Interval:
    """The percentile interval of `statistic(*scores)`: every matrix drawn anew for itself, within each task.

    Each argument is a matrix [runs, tasks], or a list with the runs of each task where their numbers differ; the statistic is then
    given lists too.
    """
    rng = np.random.default_rng(seed)
    drawn = [statistic(*(_again(one, rng) for one in scores)) for _ in range(repeats)]
    tail = 50 * (1 - coverage)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Interval(float(statistic(*scores)), float(low), float(high))


def _again(scores: Sequence[np.ndarray] | np.ndarray, rng: np.random.Generator) -> Sequence[np.ndarray] | np.ndarray:
    if isinstance(scores, np.ndarray):
        rows = rng.integers(len(scores), size=scores.shape)
        return np.take_along_axis(scores, rows, 0)
    return [rng.choice(np.asarray(task, np.float64), len(task)) for task in scores]
