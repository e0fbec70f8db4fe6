"""Two folders of results against each other: ratios B / A with intervals, and which differences are noise.

A ratio is that of the means over the runs that did not fail; its interval is a stratified bootstrap over the runs of both
(bench/statistics.py). A difference is noise when the interval holds 1, or when the same runs, dealt to the two sides by lot, differ
as much in more than a tenth of all ways (a permutation test). A bootstrap of a few runs is too sure of itself: alone it tells two
equal programs apart in 20.3 % of all cases with three runs a side and in 12.4 % with five; with the test in 10.1 % and 9.1 %
(tests/bench/false_alarms.py). With fewer than three runs on a side there is neither an interval nor a judgement.

Runs that failed or missed their threshold are not in those means, so the answer says how many runs there are and how many reached
it. Steps and seconds to the threshold are not judged where a run did not reach it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from shoal.bench.result_columns import COLUMNS, ResultColumn, count, missed, rates_of, where_line
from shoal.bench.results_folder import ResultsFolder
from shoal.bench.statistics import (
    Interval,
    bootstrap,
    geometric_mean,
    interquartile_mean,
    permutation_test,
    probability_of_improvement,
)
from shoal.bench.text_tables import markdown
from shoal.telemetry.short_numbers import short

__all__ = ["Difference", "comparison", "differences"]

FEWEST = 3
LEVEL = 0.1
COMPARED = ("env_steps_per_second", "efficiency", "learner_idle", "policy_lag_mean", "data_age_mean", "bytes_per_env_step",
            "cpu_seconds_per_million", "peak_memory_mb", "startup_seconds", "env_steps_to_threshold", "seconds_to_threshold",
            "final_return")
TO_THRESHOLD = ("env_steps_to_threshold", "seconds_to_threshold")
OTHER = " (other settings)"

Rows = Sequence[Mapping[str, Any]]
Groups = Mapping[str, Rows]


class Difference:
    """One column of one group, in A and in B. `survivors` says how many runs reached the threshold, where some did not; `remark`
    follows the judgement."""

    def __init__(self, group: str, column: ResultColumn, a: Sequence[float], b: Sequence[float], survivors: str = "",
                 remark: str = "") -> None:
        self.group, self.column, self.survivors, self.remark = group, column, survivors, remark
        self.a, self.b = np.array(a, float), np.array(b, float)
        self.few = min(len(a), len(b)) < FEWEST
        self.comparable = not survivors and bool(min(self.a.min(), self.b.min()) > 0)  # a return may be negative: no ratio

    @cached_property
    def ratio(self) -> Interval | None:
        """B / A; None where there is none, or where its interval would say nothing."""
        if self.few or not self.comparable:
            return None
        return bootstrap(lambda a, b: b.mean((-2, -1)) / a.mean((-2, -1)), self.a[:, None], self.b[:, None])

    def cell(self) -> str:
        return f"{self.b.mean() / self.a.mean():.2f}" if self.few and self.comparable else _interval(self.ratio)

    def judgement(self) -> str:
        if self.survivors:
            return f"not judged: {self.survivors}"
        if self.few:
            return f"too few runs ({len(self.a)} and {len(self.b)}; {FEWEST} are needed)"
        sure = self.ratio is None or self.ratio.excludes(1.0)
        if sure:
            sure = permutation_test([self.a], [self.b], np.log if self.comparable else np.positive) <= LEVEL
        return _judged(self.column, sure, self.b.mean() > self.a.mean()) + self.remark


def _judged(column: ResultColumn, sure: bool, up: bool) -> str:
    if not sure:
        return "noise"
    if not column.better:
        return "differs"
    return "better" if up == (column.better > 0) else "WORSE"


def differences(a: Groups, b: Groups) -> list[Difference]:
    """Everything that both measured."""
    found = []
    for group in (name for name in a if name in b):
        sides = a[group], b[group]
        remark = OTHER if unlike(*sides) else ""
        gone = _reached(*sides) if any(missed(rows) for rows in sides) else None
        for column in (one for one in COLUMNS if one.name in COMPARED):
            left, right = (column.values(rows) for rows in sides)
            if left and right:
                survivors = f"reached {gone[0]} and {gone[1]}" if gone and column.name in TO_THRESHOLD else ""
                found.append(Difference(group, column, left, right, survivors, remark))
        rates = [rates_of({group: rows})[group] for rows in sides]
        for name in rates[0]:
            if name in rates[1]:
                column = ResultColumn(name, f"{name} items/s", "", better=1)
                found.append(Difference(group, column, rates[0][name], rates[1][name], remark=remark))
    return found


# ---------------------------------------------------------------------------------------------- what the means do not show
def _reached(*sides: Rows) -> list[str]:
    """How many of how many reached their threshold."""
    wanted = [[row for row in rows if not row.get("skipped")] for rows in sides]
    return [f"{len(rows) - len(missed(rows))} of {len(rows)}" for rows in wanted]


def _threshold(group: str, a: Rows, b: Rows) -> list[str]:
    """A line of the table: a run that failed has not reached it either."""
    shares = [1 - len(missed(rows)) / max(sum(not row.get("skipped") for row in rows), 1) for rows in (a, b)]
    goals = [f"{rows[0]['until_return']:g}" for rows in (a, b)]
    if any(all(row.get("skipped") for row in rows) for rows in (a, b)):
        judged = "not run"
    else:
        judged = "same" if shares[0] == shares[1] else "better" if shares[1] > shares[0] else "WORSE"
        judged += OTHER if unlike(a, b) else ""
    return [group, f"reached {' and '.join(dict.fromkeys(goals))}", *_reached(a, b), "-", judged]


def _broken(group: str, a: Rows, b: Rows) -> str:
    """Which runs failed, and why."""
    parts = []
    for name, rows in (("A", a), ("B", b)):
        errors = dict.fromkeys(str(row["error"]) for row in rows if row["error"])
        if errors:
            good = sum(not row["error"] for row in rows)
            parts.append(f"{good} of {count(len(rows), 'run')} in {name} ({'; '.join(errors)})")
    return f"- {group}: {', '.join(parts)}" if parts else ""


def unlike(a: Rows, b: Rows) -> str:
    """Where the settings of a case differ, as far as rows say: older rows have only a hash of them, in their key."""
    given = [[row["settings"] for row in rows if row.get("settings") is not None] for rows in (a, b)]
    if len(given[0]) < len(a) or len(given[1]) < len(b):
        hashes = [{row["key"].rpartition("#")[2] for row in rows if "#" in row["key"]} for rows in (a, b)]
        return "not the same; an older results.jsonl does not say where" if all(hashes) and hashes[0] != hashes[1] else ""
    left, right = ({tuple(sorted((name, str(value)) for name, value in one.items())) for one in side} for side in given)
    if left == right:
        return ""
    first, second = given[0][-1], given[1][-1]
    found = [f"{name} {first.get(name, 'not given')} and {second.get(name, 'not given')}"
             for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
    return ", ".join(found) or "not the same for all seeds"


# ---------------------------------------------------------------------------------------------- the answer
def comparison(a: ResultsFolder, b: ResultsFolder) -> str:
    """The whole answer, as Markdown."""
    one, other = a.groups(), b.groups()
    both = [group for group in one if group in other]
    found = differences(one, other)
    goals = [group for group in both if all(side[group][0].get("until_return") is not None for side in (one, other))]
    rows = []
    for group in both:
        rows += [_threshold(group, one[group], other[group])] if group in goals else []
        rows += [[group, d.column.head, short(float(d.a.mean())), short(float(d.b.mean())), d.cell(), d.judgement()]
                 for d in found if d.group == group]
    parts = _preface(a, b)
    if not rows:
        return "\n\n".join([*parts, "A and B have no case in common."])
    parts.append(markdown(("case", "what", "A", "B", "B / A (95 %)", ""), rows))
    if goals:
        sums = _reached(*([row for group in goals for row in side[group]] for side in (one, other)))
        parts.append(f"Thresholds reached in these cases: {sums[0]} in A, {sums[1]} in B.")
    parts.append(_overall(found))
    return "\n\n".join(part for part in parts if part)


def _preface(a: ResultsFolder, b: ResultsFolder) -> list[str]:
    """What A and B are, and where they differ."""
    one, other = a.groups(), b.groups()
    parts = [_about(name, results) for name, results in (("A", a), ("B", b))]
    suites = [_suite(results) for results in (a, b)]
    if all(suites) and suites[0] != suites[1]:
        parts.append(f"These are different suites: A is {suites[0]}, B is {suites[1]}.")
    for name, theirs, ours in (("A", one, other), ("B", other, one)):
        lonely = [group for group in theirs if group not in ours]
        if lonely:
            parts.append(f"Only in {name}: {'; '.join(lonely)}.")
    pairs = {group: (rows, other[group]) for group, rows in one.items() if group in other}
    changed = [f"- {group}: {words}" for group, pair in pairs.items() if (words := unlike(*pair))]
    if changed:
        parts.append("These settings differ between A and B, so a difference may come from them:\n\n" + "\n".join(changed))
    broken = [words for group, pair in pairs.items() if (words := _broken(group, *pair))]
    if broken:
        parts.append("Failed runs, which are missing below:\n\n" + "\n".join(broken))
    return parts


def _overall(found: Sequence[Difference]) -> str:
    """A line for each column that two cases have."""
    columns = [[d for d in found if d.column.name == name and d.comparable] for name in dict.fromkeys(d.column.name for d in found)]
    lines = [together(measured) for measured in columns if len(measured) > 1]
    head = ("over all cases", "cases", "geometric mean of B / A", "interquartile mean of B over A's mean", "P(B beats A)", "")
    return markdown(head, lines) if lines else ""


def together(measured: Sequence[Difference]) -> list[str]:
    """One column over several cases: ratio, interquartile means of B's scores over A's, probability that a run of B beats one of A.
    Cases with too few runs count only where all but one have too few, and then nothing is judged."""
    enough = [d for d in measured if not d.few]
    used = enough if len(enough) > 1 else measured
    a, b = [d.a for d in used], [d.b for d in used]
    if used is enough:
        ratio, middle = bootstrap(_ratios, a, b), bootstrap(_middle, a, b)
        cells = [_interval(ratio), _interval(middle)]
        sure = ratio.excludes(1.0) and permutation_test(a, b, np.log) <= LEVEL
        judged = _judged(used[0].column, sure, ratio.value > 1)
    else:
        cells, judged = [f"{_ratios(a, b):.2f}", f"{_middle(a, b):.2f}"], f"too few runs ({FEWEST} are needed)"
    cases = str(len(used)) + (f" of {len(measured)}" if len(used) < len(measured) else "")
    return [used[0].column.head, cases, *cells, _improvement(used), judged]


def _improvement(used: Sequence[Difference]) -> str:
    """How likely a run of B beats one of A, in the direction that is better; nothing where neither is."""
    better = used[0].column.better
    if not better:
        return "-"
    return f"{np.mean([probability_of_improvement(better * d.b[:, None], better * d.a[:, None]) for d in used]):.2f}"


def _ratios(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> np.ndarray:
    return geometric_mean(np.stack([theirs.mean(-1) / ours.mean(-1) for ours, theirs in zip(a, b, strict=True)], -1))


def _middle(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> np.ndarray:
    """A's means are drawn again too: they are no better known than B's."""
    scores = [theirs / ours.mean(-1, keepdims=True) for ours, theirs in zip(a, b, strict=True)]
    return interquartile_mean(np.concatenate(scores, -1)[..., None])


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.2f} ({interval.low:.2f} - {interval.high:.2f})"


def _about(name: str, results: ResultsFolder) -> str:
    where, torn = where_line(results.sessions(), results.rows()), results.unreadable_lines()
    words = f"{name} is {results.folder}:{chr(10) if where.startswith('- ') else ' '}{where}"
    return words + (f"\n{count(torn, 'line')} of {results.path} cannot be read and does not count." if torn else "")


def _suite(results: ResultsFolder) -> str:
    sessions = results.sessions()
    return "" if not sessions else sessions[-1]["title"] + (f" ({variant})" if (variant := sessions[-1].get("variant")) else "")
