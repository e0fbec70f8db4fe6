"""`shoal watch FOLDER` of several seeds: how far each of them is, while they train and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from shoal.experiment.checkpoints import read_json
from shoal.experiment.lock import holder
from shoal.experiment.resuming import FINISHED
from shoal.experiment.rundir import SEEDS, RunDir, numbers, run_row, seed_runs
from shoal.experiment.seeds import sentence, summary_of
from shoal.telemetry.console import counted

__all__ = ["watch_seeds"]

LOOK_SECONDS = 0.5
COLUMNS = {"state": "", "env_steps": "env steps", "env_steps_per_second": "env steps/s", "train_return": "return",
           "eval_return": "evaluation"}
"""Of a row of `shoal runs`, and what each is called here."""

Rows = dict[str, dict[str, str]]  # by seed, by column


def watch_seeds(folder: Path, live: bool, every_seconds: float, out: IO[str]) -> None:
    """A line for each seed: drawn again and again in place (`live`), or written whenever it has changed, at most every so often."""
    about = read_json(folder / SEEDS)
    pair = f"{about.get('algorithm')} x {about.get('architecture')}"
    title = f"{about.get('preset') or pair} on {about.get('env')}, {counted(len(_seeds(folder)), 'seed')}"
    (_watch_live if live else _watch_plain)(folder, title, every_seconds, out)
    summaries = [run.summary() for run in seed_runs(folder)]
    done = sum(summary.get("stopped_by") in FINISHED for summary in summaries)
    if any("eval_return" in numbers(summary) for summary in summaries):
        out.write(f"{sentence(summary_of(summaries))}\n")
    missing = len(_seeds(folder)) - done
    out.write(f"{folder}: {done} of {done + missing} seeds have reached their goal"
              + (f"; `shoal resume {folder}` continues with the others" if missing else "") + "\n")


def _watch_plain(folder: Path, title: str, every_seconds: float, out: IO[str]) -> None:
    out.write(f"{title}\n")
    before: Rows = {}

    def show(rows: Rows) -> None:
        for seed, row in rows.items():
            if before.get(seed) != row:
                words = (f"{COLUMNS[name]} {value}".strip() for name, value in row.items() if value)
                out.write(f"  seed {seed}  {'  '.join(words)}\n")
        out.flush()
        before.update(rows)

    _follow(folder, show, every_seconds)


def _watch_live(folder: Path, title: str, every_seconds: float, out: IO[str]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    with Live(console=Console(file=out), auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as screen:
        def show(rows: Rows) -> None:
            table = Table("seed", "state", *list(COLUMNS.values())[1:], title=title, title_justify="left")
            for seed, row in rows.items():
                table.add_row(seed, *row.values())
            screen.update(table, refresh=True)

        _follow(folder, show, LOOK_SECONDS)


def _follow(folder: Path, show: Callable[[Rows], None], every_seconds: float) -> None:
    """Show what is known now; while somebody trains there, again every so often."""
    due = 0.0
    while True:
        going = holder(folder) is not None  # asked first: what is written before the end is shown
        if not going or time.monotonic() >= due:
            due = time.monotonic() + every_seconds
            show({str(seed): _row(folder / f"seed-{seed}", going) for seed in _seeds(folder)})
        if not going:
            return
        time.sleep(LOOK_SECONDS)


def _seeds(folder: Path) -> list[int]:
    """All that are to be trained, or those that have begun, where seeds.json does not say."""
    given = read_json(folder / SEEDS).get("seeds")
    if isinstance(given, list) and given and all(isinstance(seed, int) for seed in given):
        return given
    return [int(run.path.name.removeprefix("seed-")) for run in seed_runs(folder)]


def _row(path: Path, going: bool) -> dict[str, str]:
    run = RunDir(path)
    if not run.config_file.is_file():
        return {**dict.fromkeys(COLUMNS, ""), "state": "waits" if going else "has not begun"}
    row = run_row(run)
    state = row["state"] if row["state"] in ("running", "killed") else f"ended by {row['state']}"
    return {name: state if name == "state" else _number(row.get(name)) for name in COLUMNS}


def _number(value: Any) -> str:
    return "" if not isinstance(value, int | float) else f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
