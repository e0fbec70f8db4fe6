"""The page of a league: payoffs as coloured cells, snapshots of each player along its env steps, exploitability over time."""

from __future__ import annotations

from html import escape

from shoal.experiment.league_record import LeagueRecord, PoolNash
from shoal.telemetry.html_page import document
from shoal.telemetry.svg import COLOURS, Polyline, lines

__all__ = ["league_page"]


def league_page(record: LeagueRecord, nash: PoolNash | None, shown: int) -> str:
    """One HTML file that works offline; the payoff table has the players and the newest `shown` snapshots."""
    name = record.rundir.path.name
    body = [f"<h1>{escape(name)}</h1><p class=dim>{len(record.players)} players, {len(record.snapshots)} snapshots, "
            f"{record.table.reports:,} games</p>", _exploitability(record, nash), _lineage(record),
            _payoffs(record, [*record.players, *record.snapshots[-shown:]])]
    return document(f"shoal league: {name}", "".join(body))


def _exploitability(record: LeagueRecord, nash: PoolNash | None) -> str:
    if not record.exploitability:
        return ""
    points = [(float(steps), value) for steps, value in record.exploitability]
    chart = [Polyline("current main agent", points)]
    if nash is not None:
        level = [(0.0, nash.exploitability), (points[-1][0], nash.exploitability)]
        chart.append(Polyline("Nash mixture over the snapshots, now", level, COLOURS[1], dashed=True))
    return f"<h2>Exploitability</h2>{lines('Exploitability', chart, 'env steps of the league', 'exploitability')}"


def _lineage(record: LeagueRecord) -> str:
    """A row for each player; a dot is a snapshot, a line joins one to the snapshot that it went on from."""
    chart = []
    for row, (name, (steps, _, snapshots)) in enumerate(record.players.items(), 1):
        saved = [(float(origin[0]), float(row)) for snapshot in snapshots if (origin := record.origin(snapshot)) is not None]
        colour = COLOURS[row % len(COLOURS)]
        chart += [Polyline(name, [(0.0, float(row)), (float(steps), float(row))], colour), Polyline(name, saved, colour, dots=True)]
    return f"<h2>Lineage</h2>{lines('Lineage', chart, 'env steps of the player', 'player; a dot is a snapshot')}"


def _payoffs(record: LeagueRecord, names: list[str]) -> str:
    """How often the row beats the column: blue where it wins more often than not, red where it loses."""
    table = record.table
    head = "".join(f"<th>[{column}]</th>" for column in range(len(names)))
    rows = []
    for row, name in enumerate(names):
        cells = [_cell(table.rate(name, other)) if table.games(name, other) else "<td></td>" for other in names]
        rows.append(f"<tr><td>[{row}] {escape(name)}</td>{''.join(cells)}</tr>")
    return ("<h2>How often the row beats the column</h2><p class=dim>A draw counts half; older games count less.</p>"
            f"<div class=wide><table><tr><th></th>{head}</tr>{''.join(rows)}</table></div>")


def _cell(rate: float) -> str:
    colour = "66,105,208" if rate >= 0.5 else "255,114,92"
    return f'<td style="background:rgba({colour},{abs(rate - 0.5) * 1.6:.2f})">{rate:.2f}</td>'
