"""The columns of `shoal bench` and how a group of runs fills them: median (lowest - highest) over its seeds. Failed runs do not
count."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.bench.text_tables import markdown, spread
from shoal.telemetry.short_numbers import short

__all__ = ["COLUMNS", "ResultColumn", "count", "crowded", "failed", "left_line", "missed", "rates_of", "results_table",
           "stored_groups", "where_line"]

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ResultColumn:
    name: str
    head: str
    text: str
    percent: bool = False
    better: int = 0
    """1: more is better, -1: less is, 0: neither."""

    def values(self, rows: Rows) -> list[float]:
        """Of the runs that did not fail."""
        return [value for row in rows if not row["error"] and (value := self._value(row)) is not None]

    def _value(self, row: Any) -> float | None:
        for key in self.name.split("."):
            row = row.get(key) if isinstance(row, Mapping) else None
        return row if isinstance(row, int | float) else None

    def cell(self, rows: Rows) -> str:
        found = self.values(rows)
        if not found:
            return "-"
        if self.percent:
            middle = f"{100 * statistics.median(found):.0f} %"
            return middle + (f" ({100 * min(found):.0f} - {100 * max(found):.0f})" if len(found) > 1 else "")
        return spread(found)


COLUMNS = (
    ResultColumn("env_steps_per_second", "env steps/s", "agent decisions per second after the warm-up", better=1),
    ResultColumn("limit.env_steps_per_second", "limit",
                 "the composed limit of the same workload on the same cores, of the same minute"),
    ResultColumn("efficiency", "efficiency",
                 "env steps/s over the composed limit of the same cores, both from the same minute", True, 1),
    ResultColumn("learner_idle", "learner idle", "share of wall time in which the learner did not compute", True, -1),
    ResultColumn("policy_lag_mean", "lag mean", "versions between generation and consumption", better=-1),
    ResultColumn("policy_lag_p95", "lag p95", "the same, 95th percentile", better=-1),
    ResultColumn("data_age_mean", "age mean s", "seconds from generation to consumption", better=-1),
    ResultColumn("data_age_p95", "age p95 s", "the same, 95th percentile", better=-1),
    ResultColumn("samples_per_insert", "samples/insert", "how often a decision is used"),
    ResultColumn("bytes_per_env_step", "bytes/step", "bytes through the wires per decision", better=-1),
    ResultColumn("cpu_seconds_per_million", "CPU s/M", "processor seconds per million decisions", better=-1),
    ResultColumn("peak_memory_mb", "peak MB", "largest memory of all processes together", better=-1),
    ResultColumn("peak_memory_mb_per_million", "peak MB/M", "the same per million decisions", better=-1),
    ResultColumn("startup_seconds", "start-up s", "from the command to the first environment step", better=-1),
    ResultColumn("env_steps_to_threshold", "steps to threshold", "decisions until the return was reached", better=-1),
    ResultColumn("seconds_to_threshold", "s to threshold", "seconds until the return was reached", better=-1),
    ResultColumn("final_return", "final return", "mean return of the last evaluation, or of the last training episodes", better=1),
    ResultColumn("restarts", "restarts", "roles restarted after a death"),
)


def failed(rows: Rows) -> list[Mapping[str, Any]]:
    """The runs that broke. A run that was skipped because there is no GPU, or because a peer cannot be installed, did not break."""
    return [row for row in rows if row["error"] and not row.get("skipped")]


def missed(rows: Rows) -> list[Mapping[str, Any]]:
    """The runs that had a threshold and did not reach it."""
    wanted = [row for row in rows if row.get("until_return") is not None and not row.get("skipped")]
    return [row for row in wanted if row["error"] or row.get("seconds_to_threshold") is None]


def verdict_of(rows: Rows) -> str:
    """Whether the threshold was reached, or how many runs missed it."""
    if rows[0].get("until_return") is None:
        return ""
    if all(row.get("skipped") for row in rows):
        return "not run"
    if all(row["error"] for row in rows):  # those of them that were run
        return "🔴 failed"
    gone, goal = missed(rows), rows[0]["until_return"]
    judged = sum(not row.get("skipped") for row in rows)
    return f"🔴 missed {goal:g}: {len(gone)} of {judged}" if gone else f"reached {goal:g}: {judged} of {judged}"


def stored_groups(groups: Mapping[str, Rows]) -> dict[str, Rows]:
    """The groups of replay buffers: they have rates instead of columns; a failed one has neither, and no preset or peer."""
    return {name: rows for name, rows in groups.items()
            if any("rates" in row or (row.get("preset", "") is None and row.get("peer", "") is None) for row in rows)}


def rates_of(groups: Mapping[str, Rows]) -> dict[str, dict[str, list[float]]]:
    """Group -> operation -> items/s of its runs. Every group has every operation that any of them has."""
    good = {name: [row.get("rates") or {} for row in rows if not row["error"]] for name, rows in groups.items()}
    operations = dict.fromkeys(operation for found in good.values() for rates in found for operation in rates)
    return {name: {operation: [rates[operation] for rates in found if operation in rates] for operation in operations}
            for name, found in good.items()}


def results_table(groups: Mapping[str, Rows], names: Sequence[str] = ()) -> str:
    """Markdown: one line per group, the columns that any group fills (or only `names`), then what failed."""
    stored = stored_groups(groups)
    trained = {name: rows for name, rows in groups.items() if name not in stored}
    parts = []
    if trained:
        wanted = [column for column in COLUMNS if not names or column.name in names]
        shown = [column for column in wanted if any(column.values(rows) for rows in trained.values())]
        goals = any(row.get("until_return") is not None for rows in trained.values() for row in rows)
        head = ["case", "runs", *(["threshold"] if goals else []), *(column.head for column in shown)]
        body = [[name, str(sum(not row["error"] for row in rows)), *([verdict_of(rows)] if goals else []),
                 *(column.cell(rows) for column in shown)] for name, rows in trained.items()]
        parts.append(markdown(head, body))
        parts += _remarks(trained)
    if stored:
        rates = rates_of(stored)
        parts.append(markdown(["items/s", *next(iter(rates.values()))],
                              [[name, *map(spread, found.values())] for name, found in rates.items()]))
    broken = [f"- {row['group']}, seed {row['seed']}: {row['error']}" for rows in groups.values() for row in rows if row["error"]]
    if broken:
        parts.append("Not run, or failed:\n\n" + "\n".join(broken))
    return "\n\n".join(parts)


def _remarks(groups: Mapping[str, Rows]) -> list[str]:
    """Which env steps/s have no limit beside them, and what `--actors auto` chose."""
    fast = {name: [row for row in rows if not row["error"] and row.get("env_steps_per_second")] for name, rows in groups.items()}
    bare = [name for name, rows in fast.items() if any(not row.get("limit") for row in rows)]
    where = f" beside: {', '.join(bare)}" if any(row.get("limit") for rows in fast.values() for row in rows) else ""
    told = [f"The composed limit was not measured in this run{where}."] if bare else []
    chosen = [f"- {name}: {words}" for name, rows in groups.items() if (words := chosen_layouts(rows))]
    return told + (["`--actors auto` chose:\n\n" + "\n".join(chosen)] if chosen else [])


def chosen_layouts(rows: Rows) -> str:
    """What `--actors auto` chose in each run; empty where it was not used."""
    chosen = [(row.get("layout") or {}).get("chosen") for row in rows if not row["error"]]
    return "; ".join(f"{words} ({chosen.count(words)} of {len(chosen)} runs)" for words in dict.fromkeys(chosen) if words)


def where_line(sessions: Sequence[Mapping[str, Any]], rows: Rows) -> str:
    """Date, commit, machine, versions, and the load before each run. Rows of several commits or machines, as after an
    interruption, have a line for each, with the groups that come from there."""
    origins: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        origins.setdefault(_origin(sessions, row), []).append(row)
    if len(origins) < 2:
        return next((_about(sessions, *both) for both in origins.items()), "Nothing was measured yet.")
    return "\n".join(f"- {count(len(found), 'run')} ({'; '.join(dict.fromkeys(row['group'] for row in found))}): "
                     f"{_about(sessions, origin, found)}" for origin, found in origins.items())


def left_line(left_out: Mapping[str, int]) -> str:
    """What was measured and is no longer shown."""
    names = ", ".join(f"{name} ({count(runs, 'run')})" for name, runs in left_out.items())
    return f"\n\nNo longer in the suite, and left out here: {names}." if names else ""


def took(sessions: Sequence[Mapping[str, Any]]) -> str:
    """How long the sessions ran, limits included; nothing where none of them came to its end."""
    known = [one["seconds"] for one in sessions if one.get("seconds") is not None]
    lost = len(sessions) - len(known)
    more = f" and an unknown time in {count(lost, 'session')} without an end" if lost else ""
    return f", took {sum(known):,.0f} s{more}" if known else ""


def crowded(machine: Mapping[str, Any]) -> bool:
    """Whether the load was above the number of cores when a session began."""
    return bool(machine.get("load") and machine.get("cores") and machine["load"][0] > machine["cores"])


def count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _origin(sessions: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> tuple[str, ...]:
    """Commit, machine and versions: what a number depends on. Empty where the session's line is lost."""
    if row.get("session_index") is None:
        return ()
    session = sessions[row["session_index"]]
    machine = session["machine"]
    changed = " with uncommitted changes" if session.get("uncommitted_changes") else ""
    cores = ", ".join([f"{machine.get('cores', '?')} cores of {machine.get('cpu', 'an unknown CPU')}", *machine.get("gpus", [])])
    versions = ", ".join(f"{name} {version}" for name, version in session["versions"].items() if version != "not installed")
    return f"commit {session['commit'][:10]}{changed}", cores, versions


def _about(sessions: Sequence[Mapping[str, Any]], origin: tuple[str, ...], rows: Rows) -> str:
    """Rows of one origin."""
    loads = [row["load"] for row in rows if row.get("load") is not None]
    load = f", load before the runs {short(min(loads))} to {short(max(loads))}" if loads else ""
    if not origin:
        return f"The date and the machine are unknown: the session's line is lost{load}."
    mine = [sessions[number] for number in sorted({row["session_index"] for row in rows})]
    many = max(one.get("jobs", 1) for one in mine)
    once = f", {many} runs at once" if many > 1 else ""
    busy = [one["machine"]["load"][0] for one in mine if crowded(one["machine"])]
    beside = f", BESIDE OTHER WORK: it began at a load of {short(max(busy))}" if busy else ""
    commit, cores, versions = origin
    return f"{' and '.join(one['date'] for one in mine)}{took(mine)}{once}, {commit}, {cores}{load}{beside}; {versions}."
