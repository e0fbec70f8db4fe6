"""Two folders of results against each other: ratios B / A with intervals, and which differences are noise.

Only groups that both have are compared, and only runs that did not fail. A ratio is that of the means over seeds; its interval
is a stratified bootstrap over the runs of both (bench/statistics.py). A difference is noise when the interval holds 1. A bootstrap
of three or four runs is too sure of itself (of two equal programs it tells apart 21 % and 15 %), so with fewer than five runs on
a side the ranges must not overlap either (11 % and 3 %); with fewer than three nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.bench.columns import COLUMNS, Column
from shoal.bench.ledger import Ledger
from shoal.bench.statistics import Interval, bootstrap, geometric_mean, interquartile_mean, probability_of_improvement
from shoal.bench.tables import markdown, short

__all__ = ["Difference", "comparison", "differences"]

FEWEST, FEW = 3, 5
COMPARED = ("env_steps_per_second", "efficiency", "learner_idle", "policy_lag_mean", "data_age_mean", "bytes_per_env_step",
            "cpu_seconds_per_million", "peak_memory_mb", "startup_seconds", "env_steps_to_threshold", "seconds_to_threshold",
            "final_return")


class Difference:
    """One column of one group, in A and in B."""

    def __init__(self, group: str, column: Column, a: Sequence[float], b: Sequence[float]) -> None:
        self.group, self.column, self.a, self.b = group, column, np.array(a, float), np.array(b, float)

    def ratio(self) -> Interval | None:
        """B / A; None where a mean is not above zero (returns may be negative)."""
        if min(self.a.min(), self.b.min()) <= 0:
            return None
        return bootstrap(lambda a, b: float(b.mean() / a.mean()), self.a[:, None], self.b[:, None])

    def judgement(self) -> str:
        if min(len(self.a), len(self.b)) < FEWEST:
            return f"too few runs ({len(self.a)} and {len(self.b)}; {FEWEST} are needed)"
        ratio = self.ratio()
        if ratio is None:
            better = bootstrap(probability_of_improvement, self.b[:, None], self.a[:, None])
            sure, up = better.excludes(0.5), better.value > 0.5
        else:
            sure, up = ratio.excludes(1.0), ratio.value > 1
        if min(len(self.a), len(self.b)) < FEW:
            sure = sure and (self.a.max() < self.b.min() or self.b.max() < self.a.min())
        if not sure:
            return "noise"
        if not self.column.better:
            return "differs"
        return "better" if up == (self.column.better > 0) else "WORSE"


def differences(a: Mapping[str, Sequence[Mapping[str, Any]]], b: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Difference]:
    """Everything that both measured."""
    found = []
    for group in (name for name in a if name in b):
        good = [[row for row in side[group] if not row["error"]] for side in (a, b)]
        for column in (one for one in COLUMNS if one.name in COMPARED):
            values = [column.values(rows) for rows in good]
            if all(values):
                found.append(Difference(group, column, *values))
        found += _rates(group, *good)
    return found


def _rates(group: str, a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Replay: every operation is a column."""
    names = dict.fromkeys(name for row in (*a, *b) for name in row.get("rates") or {})
    found = []
    for name in names:
        values = [[row["rates"][name] for row in rows if name in (row.get("rates") or {})] for rows in (a, b)]
        if all(values):
            found.append(Difference(group, Column(name, f"{name} items/s", "", better=1), *values))
    return found


def comparison(a: Ledger, b: Ledger) -> str:
    """The whole answer, as Markdown."""
    one, other = a.groups(), b.groups()
    found = differences(one, other)
    parts = [f"A is {a.folder}: {_about(a)}\nB is {b.folder}: {_about(b)}"]
    for name, theirs, ours in (("A", one, other), ("B", other, one)):
        lonely = [group for group in theirs if group not in ours]
        if lonely:
            parts.append(f"Only in {name}: {'; '.join(lonely)}.")
    if not found:
        return "\n\n".join([*parts, "There is nothing that both have measured."])
    rows = [[d.group, d.column.head, short(float(d.a.mean())), short(float(d.b.mean())), _interval(d.ratio()), d.judgement()]
            for d in found]
    parts.append(markdown(("case", "what", "A", "B", "B / A (95 %)", ""), rows))
    parts.append(_overall(found))
    return "\n\n".join(part for part in parts if part)


def _overall(found: Sequence[Difference]) -> str:
    """Per column over all groups: ratio, interquartile means of B's scores over A's, probability that a run of B beats one of A."""
    lines = []
    for name in dict.fromkeys(d.column.name for d in found):
        same = [d for d in found if d.column.name == name and d.a.min() > 0 and d.b.min() > 0]
        if len(same) < 2:
            continue
        ratio = bootstrap(lambda a, b: geometric_mean(np.array([y.mean() / x.mean() for x, y in zip(a, b, strict=True)])),
                          [d.a for d in same], [d.b for d in same])
        scores = [d.b / d.a.mean() for d in same]
        middle = bootstrap(lambda tasks: interquartile_mean(np.concatenate(tasks)), scores)
        wins = float(np.mean([probability_of_improvement(d.b[:, None], d.a[:, None]) for d in same]))
        lines.append([same[0].column.head, str(len(same)), _interval(ratio), _interval(middle), f"{wins:.2f}",
                      "differs" if ratio.excludes(1.0) else "noise"])
    if not lines:
        return ""
    head = ("over all cases", "cases", "geometric mean of B / A", "interquartile mean of B over A's mean", "P(B > A)", "")
    return markdown(head, lines)


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.2f} ({interval.low:.2f} - {interval.high:.2f})"


def _about(ledger: Ledger) -> str:
    sessions = ledger.sessions()
    if not sessions:
        return "it does not say when and where"
    first = sessions[0]
    return f"{first['date']}, commit {first['commit'][:10]}, {first['machine']['cores']} cores of {first['machine']['cpu']}"
