"""`shoal league RUN`: payoff table, lineage and exploitability of a league, as of its newest checkpoint, in words and as a page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ConfigError
from shoal.experiment.league_page import league_page
from shoal.experiment.league_record import LeagueRecord, PoolNash
from shoal.experiment.references import modules_of
from shoal.experiment.rundir import RunDir

__all__ = ["league_command"]

SHOWN = 12       # snapshots in the table, the newest ones
MOMENTS = 10     # of exploitability
PAGE = "league.html"


def league_command(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise ConfigError("shoal league RUN: give one run directory; `shoal runs` lists them")
    rundir = RunDir.open(Path(arguments[0]))
    record = LeagueRecord(rundir)
    nash = _pool_nash(rundir, record)
    for line in league_lines(record, nash):
        sys.stdout.write(f"{line}\n")
    page = rundir.path / PAGE
    page.write_text(league_page(record, nash, SHOWN))
    sys.stdout.write(f"\nplots: {page}\n")
    return 0


def _pool_nash(rundir: RunDir, record: LeagueRecord) -> PoolNash | None:
    """Where the run names no module of its user's: this command imports none."""
    if modules_of(rundir.config()):
        return None
    from shoal.experiment.run import load

    return record.pool_nash(load(rundir.path))


def league_lines(record: LeagueRecord, nash: PoolNash | None = None) -> Iterator[str]:
    """What there is to say of a league."""
    names = record.snapshots
    yield f"{len(record.players)} players, {len(names)} snapshots, {record.table.reports:,} games"
    yield from _players(record)
    yield from _table(record, [*record.players, *names[-SHOWN:]])
    yield from _lineage(record)
    yield from _exploitability(record)
    if nash is not None:
        first = sorted(nash.weights.items(), key=lambda pair: -pair[1])[:3]
        yield (f"\nexploitability of the Nash mixture over {len(nash.weights)} snapshots: {nash.exploitability:.3f} "
               f"({', '.join(f'{name} {weight:.0%}' for name, weight in first)}, ...)")


def _players(record: LeagueRecord) -> Iterator[str]:
    players = record.players
    yield f"\n{'player':<22}{'env steps':>12}{'snapshots':>11}{'resets':>8}{'Elo':>8}"
    for (name, (steps, _, snapshots)), elo in zip(players.items(), record.table.elo(list(players)), strict=True):
        now = "" if name in record.playing else "   has ended" if steps else "   has not begun"
        yield f"{name:<22}{steps:>12,}{len(snapshots):>11}{record.resets[name]:>8}{elo:>8.0f}{now}"


def _table(record: LeagueRecord, names: list[str]) -> Iterator[str]:
    table = record.table
    yield "\nhow often the row beats the column (a draw counts half; . where they have not met)"
    yield f"{'':<28}" + "".join(f"{f'[{column}]':>6}" for column in range(len(names)))
    for row, name in enumerate(names):
        rates = (f"{table.rate(name, other):>6.2f}" if table.games(name, other) else f"{'.':>6}" for other in names)
        yield f"{f'[{row}] {name}':<28}" + "".join(rates)


def _lineage(record: LeagueRecord) -> Iterator[str]:
    yield f"\n{'snapshot':<28}{'env steps':>12}   after"
    for name in record.snapshots:
        origin = record.origin(name)
        yield f"{name:<28}{origin[0]:>12,}   {origin[1]}" if origin is not None else f"{name:<28}{'?':>12}   it is damaged"


def _exploitability(record: LeagueRecord) -> Iterator[str]:
    """Of the first main agent, over time."""
    moments = record.exploitability
    if not moments:
        return
    yield "\nexploitability of the current main agent"
    step = max(1, len(moments) // MOMENTS)
    for env_steps, value in moments[::-step][::-1]:
        yield f"{env_steps:>14,} env steps {value:>8.3f}"
