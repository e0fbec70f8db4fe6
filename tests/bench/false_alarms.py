"""How often `shoal bench compare` tells two equal programs apart: `python -m tests.bench.false_alarms` (a minute).

Runs of A and of B come from the same distribution, so everything but "noise" is a false alarm. docs/benchmark.md and
bench/compare.py name these figures; a slow test computes them again.
"""

from __future__ import annotations

import sys

import numpy as np

from shoal.bench.compare import Difference, together
from shoal.bench.result_columns import ResultColumn

__all__ = ["DRAWS", "RUNS", "figures", "over_all", "rates"]

SPEED = ResultColumn("env_steps_per_second", "env steps/s", "", better=1)
DRAWS = {
    "normal": lambda rng, runs: rng.normal(100.0, 10.0, runs),
    "skewed": lambda rng, runs: rng.lognormal(4.6, 0.5, runs),
}
RUNS, TRIALS = (3, 4, 5, 10), 4000


def rates(noise: str, runs: int, trials: int = TRIALS) -> tuple[float, float]:
    """Of one case: what the bootstrap's interval alone gets wrong, and what the whole rule does."""
    rng = np.random.default_rng(runs)
    found = [Difference("c", SPEED, *(DRAWS[noise](rng, runs) for _ in "ab")) for _ in range(trials)]
    alone = sum(one.ratio is not None and one.ratio.excludes(1.0) for one in found)
    return alone / trials, sum(one.judgement() != "noise" for one in found) / trials


def over_all(noise: str, runs: int, cases: int = 10, trials: int = TRIALS // 4) -> float:
    """Of the line over all cases."""
    rng = np.random.default_rng(runs)
    drawn = ([Difference("c", SPEED, *(DRAWS[noise](rng, runs) for _ in "ab")) for _ in range(cases)] for _ in range(trials))
    return sum(together(found)[-1] != "noise" for found in drawn) / trials


def figures(runs: int) -> list[str]:
    """Per cent, for each noise: one case, the bootstrap alone, the line over ten cases."""
    found = [figure for noise in DRAWS for figure in (*reversed(rates(noise, runs)), over_all(noise, runs))]
    return [f"{100 * figure:.1f}" for figure in found]


def main() -> None:
    for runs in RUNS:
        sys.stdout.write(f"| {runs} runs a side | {' | '.join(f'{figure} %' for figure in figures(runs))} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
