"""Statistics for a few runs on several tasks, as in "Deep RL at the edge of the statistical precipice" (arXiv 2108.13264).

    scores [runs, tasks]     one task is a case of a suite (preset, environment, actors), one run is a seed

- the interquartile mean (25 % trimmed mean over all runs and tasks): robust like the median, precise like the mean;
- stratified bootstrap intervals: runs are drawn again within each task, the tasks stay;
- the probability of improvement: how likely a run of X beats a run of Y on a task, ties counted half, averaged over tasks.

Tests hold these against numbers that rliable gave for the same scores. One is not from there: a permutation test, because the
bootstrap of a few runs is too sure of itself, and this is right with any number of them.

A statistic may be given many matrices at once, [..., runs, tasks], and gives [...]: the bootstrap asks for all its draws together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

__all__ = ["Interval", "bootstrap", "geometric_mean", "interquartile_mean", "permutation_test", "probability_of_improvement"]

REPEATS = 2000
COVERAGE = 0.95
EXACT = 5000


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    def excludes(self, neutral: float) -> bool:
        """Whether the difference from `neutral` is more than noise."""
        return not self.low <= neutral <= self.high


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean of the middle half of all scores."""
    scores = np.asarray(scores, np.float64)
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = int(0.25 * ordered.shape[-1])
    return np.asarray(ordered[..., cut : ordered.shape[-1] - cut].mean(-1))


def geometric_mean(ratios: np.ndarray) -> np.ndarray:
    """[..., tasks], for ratios: twice and half cancel out."""
    return np.asarray(np.exp(np.log(np.asarray(ratios, np.float64)).mean(-1)))


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """P(a run of x > a run of y), per task, averaged. The numbers of runs may differ, the tasks are the same."""
    one, other = np.asarray(x, np.float64)[..., :, None, :], np.asarray(y, np.float64)[..., None, :, :]
    return np.asarray(((one > other) + 0.5 * (one == other)).mean((-3, -2, -1)))


def bootstrap(statistic: Callable[..., np.ndarray], *scores: Sequence[np.ndarray] | np.ndarray, seed: int = 0,
              repeats: int = REPEATS, coverage: float = COVERAGE) -> Interval:
    """The percentile interval of `statistic(*scores)`: every matrix is resampled by itself, within each task.

    Each argument is a matrix [runs, tasks], or a list with the runs of each task where their numbers differ; the statistic is then
    given lists too, of [..., runs].
    """
    rng = np.random.default_rng(seed)
    drawn = statistic(*(_again(one, rng, repeats) for one in scores))  # [repeats]
    tail = 50 * (1 - coverage)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Interval(float(statistic(*scores)), float(low), float(high))


def _again(scores: Sequence[np.ndarray] | np.ndarray, rng: np.random.Generator, repeats: int) -> Sequence[np.ndarray] | np.ndarray:
    if isinstance(scores, np.ndarray):
        return scores[rng.integers(len(scores), size=(repeats, *scores.shape)), np.arange(scores.shape[1])]
    return [task[rng.integers(len(task), size=(repeats, len(task)))] for task in scores]


def permutation_test(x: Sequence[np.ndarray], y: Sequence[np.ndarray], scale: Callable[[np.ndarray], np.ndarray] = np.positive,
                     seed: int = 0, repeats: int = REPEATS) -> float:
    """How often sides that got their runs by lot, task by task, differ as much as x and y do: the p-value, both ways counted.

    x and y have the runs of each task. What differs is scale(mean of a task), averaged over tasks; with np.log these are ratios.
    All deals are tried where there is one task with few of them, otherwise `repeats` random ones.
    """
    rng = np.random.default_rng(seed)
    whole = len(x) == 1 and math.comb(len(x[0]) + len(y[0]), len(x[0])) <= EXACT
    seen, dealt = 0.0, np.zeros(1)
    for one, other in zip(x, y, strict=True):
        pool, n = np.concatenate([one, other]), len(one)
        seen += float(scale(other.mean()) - scale(one.mean()))
        drawn = np.array(list(combinations(range(len(pool)), n))) if whole else rng.random((repeats, len(pool))).argsort(1)[:, :n]
        mine = np.zeros((len(drawn), len(pool)))
        np.put_along_axis(mine, drawn, 1.0, 1)
        dealt = dealt + scale((1 - mine) @ pool / len(other)) - scale(mine @ pool / n)
    far = np.abs(dealt) >= abs(seen) * (1 - 1e-9)
    return float(far.mean()) if whole else float((far.sum() + 1) / (repeats + 1))
