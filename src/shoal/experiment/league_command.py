"""`shoal league RUN`: payoff table, lineage and exploitability of a league, as of its newest checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.rundir import RunDir
from shoal.league.payoff import PayoffTable
from shoal.league.vault import Vault
from shoal.telemetry.outputs import read_lines

__all__ = ["league_command"]

SHOWN = 12       # snapshots in the table, the newest ones
MOMENTS = 10     # of exploitability


def league_command(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise ConfigError("shoal league RUN: give one run directory; `shoal runs` lists them")
    rundir = RunDir.open(Path(arguments[0]))
    for line in league_lines(rundir):
        sys.stdout.write(f"{line}\n")
    return 0


def league_lines(rundir: RunDir) -> Iterator[str]:
    """What there is to say of a league."""
    state = league_state(rundir)
    league, table = state["league"], PayoffTable.from_state(state["league"]["payoff"])
    names = list(league["parent"])
    yield f"{len(league['players'])} players, {len(names)} snapshots, {table.reports:,} games"
    yield from _players(state, table)
    yield from _table(table, [*league["players"], *names[-SHOWN:]])
    yield from _lineage(rundir, names)
    yield from _exploitability(rundir)


def league_state(rundir: RunDir) -> dict[str, Any]:
    """What the coordinator has saved."""
    newest = rundir.checkpoints().sound(tables=False)
    path = None if newest is None else newest / "coordinator-0.safetensors"
    if path is None or not path.is_file():
        raise ConfigError(f"{rundir.path} is not a league; train one with `shoal train league shoal/RockPaperScissors-v0`")
    state: dict[str, Any] = json.loads(bytes(TensorFiles().load(path)["league"]))
    return state


def _players(state: dict[str, Any], table: PayoffTable) -> Iterator[str]:
    players = state["league"]["players"]
    yield f"\n{'player':<22}{'env steps':>12}{'snapshots':>11}{'resets':>8}{'Elo':>8}"
    for (name, (steps, _, snapshots)), elo in zip(players.items(), table.elo(list(players)), strict=True):
        yield f"{name:<22}{steps:>12,}{len(snapshots):>11}{state['resets'][name]:>8}{elo:>8.0f}"


def _table(table: PayoffTable, names: list[str]) -> Iterator[str]:
    yield "\nhow often the row beats the column (a draw counts half; . where they have not met)"
    yield f"{'':<28}" + "".join(f"{f'[{column}]':>6}" for column in range(len(names)))
    for row, name in enumerate(names):
        rates = (f"{table.rate(name, other):>6.2f}" if table.games(name, other) else f"{'.':>6}" for other in names)
        yield f"{f'[{row}] {name}':<28}" + "".join(rates)


def _lineage(rundir: RunDir, names: list[str]) -> Iterator[str]:
    vault = Vault(rundir.path / "vault")
    yield f"\n{'snapshot':<28}{'env steps':>12}   after"
    for name in names:
        about = vault.about(name)
        yield f"{name:<28}{about['steps']:>12,}   {about['parent'] or 'the beginning'}"


def _exploitability(rundir: RunDir) -> Iterator[str]:
    """Of the first main agent, over time."""
    found: dict[float, tuple[int, float]] = {}
    for shot in read_lines(rundir.metrics_file):
        if shot.get("kind") == "snapshot" and shot.get("exploitability") is not None:
            found.setdefault(float(shot.get("eval_version") or 0), (int(shot["env_steps"]), float(shot["exploitability"])))
    moments = list(found.values())
    if not moments:
        return
    yield "\nexploitability of the current main agent"
    step = max(1, len(moments) // MOMENTS)
    for env_steps, value in moments[::-step][::-1]:
        yield f"{env_steps:>14,} env steps {value:>8.3f}"
