"""The report of a suite as one HTML file that works offline: table, bars, scaling and learning curves, profiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from benchmarks.bar_chart import Bar, bars
from benchmarks.composed_limit.limits import composed
from benchmarks.model_curve import predicted
from shoal.bench.result_columns import COLUMNS, failed, missed, rates_of, stored_groups, verdict_of
from shoal.bench.statistics import bootstrap, interquartile_mean
from shoal.bench.text_tables import spread
from shoal.telemetry.html_page import document, figures, grid
from shoal.telemetry.svg import COLOURS, Polyline, lines

__all__ = ["modelled", "page", "performance_profile"]

Rows = Sequence[Mapping[str, Any]]
Groups = Mapping[str, Rows]


def page(title: str, where: str, groups: Groups) -> str:
    """Everything in one string."""
    stored = stored_groups(groups)
    trained = {name: rows for name, rows in groups.items() if name not in stored}
    body = [f"<h1>{escape(title)}</h1><p class=dim>{escape(where)}</p>"]
    if trained:
        body += [_table(trained), _efficiency(trained), figures("Environment steps per second", _speeds(trained)),
                 figures("Scaling", _scaling(trained)), figures("Learning", _learning(trained)), _profile(trained)]
    if stored:
        body.append(_stored(stored))
    body += [_failures(groups), _glossary()]
    return document(f"shoal bench: {title}", "".join(body))


def _table(groups: Groups) -> str:
    shown = [column for column in COLUMNS if any(column.values(rows) for rows in groups.values())]
    goals = any(row.get("until_return") is not None for rows in groups.values() for row in rows)
    body = []
    for name, rows in groups.items():
        good, bad, broken = sum(not row["error"] for row in rows), bool(missed(rows)), bool(failed(rows))
        threshold = [(verdict_of(rows), bad)] if goals else []
        body.append([(name, bad or (broken and not good)), (f"{good} of {len(rows)}", broken), *threshold,
                     *((column.cell(rows), False) for column in shown)])
    return grid(["case", "runs", *(["threshold"] if goals else []), *(column.head for column in shown)], body)


def _stored(groups: Groups) -> str:
    rates = rates_of(groups)
    body = [[(name, bool(failed(groups[name]))), *((spread(values), False) for values in found.values())]
            for name, found in rates.items()]
    return "<h2>Replay buffers, items per second</h2>" + grid(["case", *next(iter(rates.values()))], body)


def _values(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if not row["error"] and row.get(name) is not None]


# ---------------------------------------------------------------------------------------------- speed
def _efficiency(groups: Groups) -> str:
    """One number for the whole suite, with its interval."""
    scores = [np.array(found) for rows in groups.values() if (found := _values(rows, "efficiency"))]
    if not scores:
        return ""
    middle = bootstrap(lambda tasks: interquartile_mean(np.concatenate(tasks, -1)[..., None]), scores)
    return (f"<p>Interquartile mean of the efficiency over all cases and runs: <b>{middle.value:.2f}</b> "
            f"(95 % stratified bootstrap interval {middle.low:.2f} to {middle.high:.2f}).</p>")


def _speeds(groups: Groups) -> dict[str, str]:
    """Bars per environment, the composed limit beside them."""
    charts: dict[str, list[Bar]] = {}
    for name, rows in groups.items():
        found = _values(rows, "env_steps_per_second")
        if found:
            limits = [row["limit"]["env_steps_per_second"] for row in rows if not row["error"] and row.get("limit")]
            mark = statistics.median(limits) if limits else None
            bar = Bar(name.replace(f" {rows[0]['env']}", ""), statistics.median(found), min(found), max(found), mark)
            charts.setdefault(rows[0]["env"], []).append(bar)
    return {env: bars(env, chart, "composed limit") for env, chart in charts.items()}


def modelled(limit: Mapping[str, Any], actors: int) -> float:
    """What the parts alone allow with this many actors of one thread each and one learner.

        min(actors / (1/e + 1/i), l / r, limit)        e, i, l per core
        min(actors x e, limit)                         e per core; i and l are those of a GPU

    Each actor steps and infers in turn on a core of its own, the learner has another; with a GPU an actor only steps, and one
    device infers and learns, however many actors there are. All together cannot beat the composed limit of what there is.
    """
    e, i, l = (limit[part] / limit["cores"] for part in ("e", "i", "l"))  # noqa: E741  the names of limits.py
    if limit.get("gpu"):
        return float(min(actors * e, limit["env_steps_per_second"]))
    return float(min(actors / (1 / e + 1 / i), l / limit["passes"], limit["env_steps_per_second"]))


def _parts(rows: Rows) -> dict[str, Any] | None:
    """The limit of a case from the medians of its parts over all of its runs: what differs from run to run is noise, no curve."""
    limits = [row["limit"] for row in rows if not row["error"] and row.get("limit")]
    if not limits:
        return None
    last = limits[-1]
    parts = {name: statistics.median(limit[name] for limit in limits) for name in ("e", "i", "l", "n", "s") if name in last}
    together = composed(**parts, r=last["passes"], gpu=last.get("gpu", False), q=last.get("items_per_env_step", 1.0))
    return {**last, **parts, "env_steps_per_second": together}


def _unmodelled(by_actors: Mapping[int, Rows]) -> str:
    """Why the model's curve is not there."""
    gone = [str(n) for n in (1, 2) if all(row["error"] for row in by_actors.get(n, ()))]
    why = (f"there is no finished run of {' or '.join(gone)}" if gone else
           "these runs cannot calibrate it: it only knows actors that send unrolls to learners")
    return f"<p class=dim>Without the model's curve: it is calibrated with runs of 1 and 2 actors, and {why}.</p>"


def _scaling(groups: Groups) -> dict[str, str]:
    """Env steps/s over the number of actors, with the model's curve, and with what the parts alone allow."""
    cases: dict[str, dict[int, Rows]] = {}
    for rows in groups.values():
        count = rows[0].get("asked_actors")
        if isinstance(count, int):
            cases.setdefault(rows[0]["case"], {})[count] = rows
    plots = {}
    for name, by_actors in cases.items():
        if len(by_actors) < 2:
            continue
        measured = [(float(n), statistics.median(found)) for n, rows in sorted(by_actors.items())
                    if (found := _values(rows, "env_steps_per_second"))]
        parts = _parts([row for rows in by_actors.values() for row in rows])
        alone = [(float(n), modelled(parts, n)) for n in sorted(by_actors)] if parts else []
        model = predicted(by_actors)
        chart = [Polyline("measured", measured, COLOURS[0], dots=True), Polyline("parts alone", alone, COLOURS[1], dashed=True),
                 Polyline("model", model, COLOURS[2], dashed=True)]
        plot = lines(name, chart, "actors", "env steps/s", x_ticks=sorted(by_actors))
        plots[name] = plot + ("" if model or not plot else _unmodelled(by_actors))
    return plots


# ---------------------------------------------------------------------------------------------- learning
def _learning(groups: Groups) -> dict[str, str]:
    """Evaluations of every seed; the threshold in red."""
    plots = {}
    for name, rows in groups.items():
        chart = [Polyline(f"seed {row['seed']}", [(x, y) for x, _, y in row["curve"]], COLOURS[k % len(COLOURS)], dots=True)
                 for k, row in enumerate(rows) if not row["error"] and row.get("curve")]
        if chart and rows[0].get("until_return") is not None:
            plots[name] = lines(name, chart, "env steps", "evaluation", rows[0]["until_return"])
    return plots


def _profile(groups: Groups) -> str:
    """The share of all runs, over cases and seeds, that have reached their threshold after a number of env steps. Cases differ
    a thousandfold in what they need, so the axis is logarithmic."""
    rows = [row for found in groups.values() for row in found if row.get("until_return") is not None and not row.get("skipped")]
    steps = np.array([(row.get("env_steps_to_threshold") if not row["error"] else None) or math.inf for row in rows])
    reached = steps[np.isfinite(steps)]
    if not len(reached):
        return ""
    taus = np.geomspace(float(reached.min()), 1.05 * float(reached.max()), 120)
    share = performance_profile(-steps, -taus)
    plot = lines("profile", [Polyline("all cases and seeds", list(zip(taus.tolist(), share.tolist(), strict=True)))],
                 "env steps, logarithmic", "share of runs that have reached their threshold", x_log=True)
    return figures("Performance profile", {f"{len(reached)} of {len(rows)} runs reach it": plot})


def performance_profile(scores: np.ndarray, taus: Sequence[float] | np.ndarray) -> np.ndarray:
    """[len(taus)]: the share of all runs with a score above each tau."""
    flat = np.asarray(scores, np.float64).reshape(-1)
    return np.asarray((flat[None, :] > np.asarray(taus, np.float64)[:, None]).mean(1))


def _failures(groups: Groups) -> str:
    broken = [row for rows in groups.values() for row in rows if row["error"]]
    items = "".join(f"<li><span{'' if row.get('skipped') else ' class=bad'}>{escape(row['group'])}, seed {row['seed']}</span>: "
                    f"{escape(str(row['error']))}</li>" for row in broken)
    return f"<h2>Not run, or failed</h2><ul>{items}</ul>" if broken else ""


def _glossary() -> str:
    items = "".join(f"<li><b>{escape(column.head)}</b>: {escape(column.text)}</li>" for column in COLUMNS)
    return f"<h2>Columns</h2><p class=dim>Median (lowest - highest) over the runs of a case.</p><ul>{items}</ul>"
