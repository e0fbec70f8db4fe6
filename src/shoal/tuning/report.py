"""What a study has found, for people: a table of its members, and report.html, which works offline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from shoal.coordination.population.priors import Range
from shoal.experiment.checkpoints import write_text
from shoal.telemetry.html_page import document, figures, grid
from shoal.telemetry.svg import COLOURS, Polyline, lines
from shoal.tuning.study import Member, Study

__all__ = ["table", "write_report"]

LEGEND = 10  # names beyond this would not fit


def rows_of(study: Study) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table: members, best first."""
    members = sorted(study.members(), key=lambda one: -math.inf if one.fitness is None else one.fitness, reverse=True)
    lineage, names = study.lineage(), list(study.settings.vary)
    copies = [row["member"] for row in lineage if row["event"] == "copy"]
    rows = [[str(one.number), f"{one.env_steps:,}", _told(one),
             *(f"{value:.4g}" if isinstance(value := one.values[name], float) else str(value) for name in names),
             str(copies.count(one.number)), str(one.ancestor)] for one in members]
    return ["member", "env steps", "fitness", *names, "copied", "ancestor"], rows


def _told(member: Member) -> str:
    """Its fitness in words."""
    if member.failed:
        return "failed"
    return "-" if member.fitness is None else f"{member.fitness:.2f}"


def outcome(members: Sequence[Member]) -> str:
    """One line below the table."""
    known = [one.fitness for one in members if one.fitness is not None]
    mean = f", mean fitness {sum(known) / len(known):.2f}" if known else ""
    return f"{len({one.ancestor for one in members})} of {len(members)} ancestors are left{mean}"


def table(study: Study) -> str:
    head, rows = rows_of(study)
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    shown = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join([*shown, outcome(study.members())]) + "\n"


def write_report(study: Study) -> None:
    """STUDY/report.html: fitness, schedules, ancestry, values against fitness."""
    settings, (head, rows) = study.settings, rows_of(study)
    what = f"{settings.preset} on {settings.env}, {settings.search} search, {settings.population} members"
    where = ", ".join(f"{name} in {prior}" for name, prior in settings.vary.items())
    body = [f"<h1>{escape(what)}</h1><p class=dim>{escape(where)}</p>",
            grid(head, [[(cell, False) for cell in row] for row in rows]),
            f"<p>{escape(outcome(study.members()))}</p>", figures("Fitness", {"of every member": _fitness(study)}),
            figures("Schedules", {name: _schedules(study, name) for name in settings.vary}),
            figures("Ancestry", {"members whose parameters still descend from different ones": _ancestors(study)}),
            figures("Values against fitness", {name: _against(study, name) for name in settings.vary})]
    write_text(study.path / "report.html", document(f"shoal tune: {what}", "".join(body)))


# ---------------------------------------------------------------------------------------------- plots
def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _name(study: Study, number: int) -> str:
    return str(number) if study.settings.population <= LEGEND else ""


def _slices(study: Study) -> list[dict[str, Any]]:
    return [row for row in study.lineage() if row["event"] == "slice"]


def _fitness(study: Study) -> str:
    """A line for each member; where it copied another one, the line goes on with the copy."""
    chart = [Polyline(_name(study, number), [(row["env_steps"], row["fitness"]) for row in _slices(study)
                                             if row["member"] == number and row["fitness"] is not None], _colour(number), dots=True)
             for number in range(study.settings.population)]
    return lines("fitness", chart, "env steps", "fitness", study.settings.until_return)


def _numbers(study: Study, name: str) -> tuple[dict[str, float] | None, bool]:
    """For values that are no numbers, where each stands on an axis; and whether the axis is logarithmic."""
    prior = study.settings.priors[name]
    if isinstance(prior, Range):
        return None, prior.log
    return {str(value): float(place) for place, value in enumerate(prior.grid(1))}, False


def _schedules(study: Study, name: str) -> str:
    """The values that each member's parameters were trained with, from the first step on."""
    places, log = _numbers(study, name)
    chart = [Polyline(_name(study, number), [(row["env_steps"], _place(row["values"][name], places))
                                             for row in study.schedule(number)], _colour(number), dots=True)
             for number in range(study.settings.population)]
    return lines(name, chart, "env steps", _axis(name, places), y_log=log)


def _against(study: Study, name: str) -> str:
    """A point for each slice."""
    places, log = _numbers(study, name)
    chart = [Polyline("", [(_place(row["values"][name], places), row["fitness"])], _colour(row["member"]), dots=True)
             for row in _slices(study) if row["fitness"] is not None]
    return lines(name, chart, _axis(name, places), "fitness", x_log=log)


def _place(value: Any, places: dict[str, float] | None) -> float:
    return float(value) if places is None else places[str(value)]


def _axis(name: str, places: dict[str, float] | None) -> str:
    return name if places is None else f"{name}: {', '.join(f'{place:.0f} = {value}' for value, place in places.items())}"


def _ancestors(study: Study) -> str:
    """How many members are still ancestors of somebody, copy by copy."""
    ancestor = {number: number for number in range(study.settings.population)}
    points = [(0.0, float(len(ancestor)))]
    for row in study.lineage():
        if row["event"] == "copy":
            ancestor[row["member"]] = ancestor[row["parent"]]
            points.append((float(row["env_steps"]), float(len(set(ancestor.values())))))
    return lines("ancestors", [Polyline("", sorted(points, key=lambda point: (point[0], -point[1])), dots=True)], "env steps",
                 "ancestors left") if len(points) > 1 else ""
