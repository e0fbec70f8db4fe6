"""The columns of the unified benchmark and how a group of runs fills them: median (lowest - highest) over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.bench.tables import layouts, markdown, short, spread

__all__ = ["COLUMNS", "Column", "failed", "missed", "results_table", "where_line"]

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Column:
    name: str
    head: str
    text: str
    percent: bool = False
    better: int = 0
    """1: more is better, -1: less is, 0: neither."""

    def values(self, rows: Rows) -> list[float]:
        return [value for row in rows if (value := self._value(row)) is not None]

    def _value(self, row: Any) -> Any:
        for key in self.name.split("."):
            row = (row or {}).get(key)
        return row

    def cell(self, rows: Rows) -> str:
        found = self.values(rows)
        if not found:
            return "-"
        if self.percent:
            middle = f"{100 * statistics.median(found):.0f} %"
            return middle + (f" ({100 * min(found):.0f} - {100 * max(found):.0f})" if len(found) > 1 else "")
        return spread(found)


COLUMNS = (
    Column("env_steps_per_second", "env steps/s", "agent decisions per second after the warm-up", better=1),
    Column("limit.env_steps_per_second", "limit", "the composed limit of the same workload on the same cores, of the same minute"),
    Column("efficiency", "efficiency", "env steps/s over the composed limit of the same cores, both from the same minute", True, 1),
    Column("learner_idle", "learner idle", "share of wall time in which the learner did not compute", True, -1),
    Column("policy_lag_mean", "lag mean", "versions between generation and consumption", better=-1),
    Column("policy_lag_p95", "lag p95", "the same, 95th percentile", better=-1),
    Column("data_age_mean", "age mean s", "seconds from generation to consumption", better=-1),
    Column("data_age_p95", "age p95 s", "the same, 95th percentile", better=-1),
    Column("samples_per_insert", "samples/insert", "how often a decision is used"),
    Column("bytes_per_env_step", "bytes/step", "bytes through the wires per decision", better=-1),
    Column("cpu_seconds_per_million", "CPU s/M", "processor seconds per million decisions", better=-1),
    Column("peak_memory_mb", "peak MB", "largest memory of all processes together", better=-1),
    Column("peak_memory_mb_per_million", "peak MB/M", "the same per million decisions", better=-1),
    Column("startup_seconds", "start-up s", "from the command to the first environment step", better=-1),
    Column("env_steps_to_threshold", "steps to threshold", "decisions until the return was reached", better=-1),
    Column("seconds_to_threshold", "s to threshold", "seconds until the return was reached", better=-1),
    Column("final_return", "final return", "mean return of the last evaluation, or of the last training episodes", better=1),
    Column("restarts", "restarts", "roles restarted after a death"),
)


def failed(rows: Rows) -> list[Mapping[str, Any]]:
    """The runs that broke; one that was left out, for want of a GPU, did not."""
    return [row for row in rows if row["error"] and not row.get("skipped")]


def missed(rows: Rows) -> list[Mapping[str, Any]]:
    """The runs that had a threshold and did not reach it."""
    wanted = [row for row in rows if row.get("until_return") is not None and not row.get("skipped")]
    return [row for row in wanted if row["error"] or row.get("seconds_to_threshold") is None]


def verdict_of(rows: Rows) -> str:
    """reached, or how many were missed; in red where it can be shown."""
    if rows[0].get("until_return") is None:
        return ""
    if all(row.get("skipped") for row in rows):
        return "not run"
    if all(row["error"] for row in rows):
        return "🔴 failed"
    gone, goal = missed(rows), rows[0]["until_return"]
    return f"🔴 missed {goal:g}: {len(gone)} of {len(rows)}" if gone else f"reached {goal:g}: {len(rows)} of {len(rows)}"


def results_table(groups: Mapping[str, Rows], names: Sequence[str] = ()) -> str:
    """Markdown: one line per group, the columns that somebody fills (or only `names`), then what failed."""
    trained = {name: rows for name, rows in groups.items() if not any("rates" in row for row in rows)}
    stored = {name: rows for name, rows in groups.items() if name not in trained}
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
        operations = list(dict.fromkeys(name for rows in stored.values() for row in rows for name in row.get("rates") or {}))
        body = [[name, *(_rate(rows, operation) for operation in operations)] for name, rows in stored.items()]
        parts.append(markdown(["items/s", *operations], body))
    broken = [f"- {row['group']}, seed {row['seed']}: {row['error']}" for rows in groups.values() for row in rows if row["error"]]
    if broken:
        parts.append("Not run, or failed:\n\n" + "\n".join(broken))
    return "\n\n".join(parts)


def _remarks(groups: Mapping[str, Rows]) -> list[str]:
    """Whose env steps/s have no limit beside them, and what `--actors auto` chose."""
    fast = {name: [row for row in rows if row.get("env_steps_per_second")] for name, rows in groups.items()}
    bare = [name for name, rows in fast.items() if any(not row.get("limit") for row in rows)]
    where = f" beside: {', '.join(bare)}" if any(row.get("limit") for rows in fast.values() for row in rows) else ""
    told = [f"The composed limit was not measured in this run{where}."] if bare else []
    words = {name: layouts([{"error": row["error"], "details": row} for row in rows]) for name, rows in groups.items()}
    chosen = [f"- {name}: {found}" for name, found in words.items() if found]
    return told + (["`--actors auto` chose:\n\n" + "\n".join(chosen)] if chosen else [])


def _rate(rows: Rows, operation: str) -> str:
    found = [row["rates"][operation] for row in rows if operation in (row.get("rates") or {})]
    return spread(found) if found else "-"


def where_line(sessions: Sequence[Mapping[str, Any]], rows: Rows) -> str:
    """Date, commit, machine, versions; the load that was there before each run."""
    first = sessions[0]
    machine = first["machine"]
    loads = [row["load"] for row in rows if row.get("load") is not None]
    load = f", load before the runs {short(min(loads))} to {short(max(loads))}" if loads else ""
    commits = sorted({one["commit"][:10] + (" with uncommitted changes" if one["uncommitted_changes"] else "") for one in sessions})
    again = f", {len(sessions)} sittings" if len(sessions) > 1 else ""
    many = max(one.get("jobs", 1) for one in sessions)
    again += f", {many} runs at once" if many > 1 else ""
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version != "not installed")
    cores = ", ".join([f"{machine['cores']} cores of {machine['cpu']}", *machine.get("gpus", [])])
    return f"{first['date']}{again}, commit {' and '.join(commits)}, {cores}{load}; {versions}."
