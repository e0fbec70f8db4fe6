"""`shoal watch RUN`: what a run shows on its own console, from another terminal, while it goes on or after it has ended.

It only reads the run directory, so it may run on any machine that sees the folder. A run writes a line a second in its first
minutes, and one a minute when it has run for hours.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from shoal.errors import ConfigError
from shoal.experiment.lock import holder
from shoal.experiment.parse import parse_command
from shoal.experiment.rundir import SEEDS, RunDir, find_runs, numbers
from shoal.options import Options, number
from shoal.telemetry.console import console, counted
from shoal.telemetry.curves import read_curve, sparkline
from shoal.telemetry.outputs import follow_lines

__all__ = ["watch_command"]

LOOK_SECONDS = 0.5
GOALS = ("until_return", "max_env_steps", "max_learner_steps", "max_seconds", "until")
CURVE_WIDTH = 60
SHOWN = {**dict.fromkeys(("train_return", "eval_return", "best_return", "lowest_return", "learner_idle", "env_steps_per_second",
                          "learner_steps_per_second"), math.nan),
         **dict.fromkeys(("env_steps", "learner_steps", "seconds", "epochs"), 0)}
"""Numbers of a snapshot that a console shows, and what each is where it is not known."""
SPREADS = ("policy_lag", "data_age_seconds")
CLUSTER = ("nodes", "object_store_mb", "carried_mb_per_second", "calls_per_second")


@dataclass(frozen=True)
class Watch(Options):
    """Follow a run, or the seeds of a folder of --seeds, from another terminal."""

    mode: Literal["auto", "live", "plain"] = "auto"
    """A live table, or plain lines; auto is live on a terminal."""
    every_seconds: float = number(5.0, at_least=0.1)
    """Time between two plain lines."""


def watch_command(arguments: list[str]) -> int:
    usage = "shoal watch [RUN]"
    words, options = parse_command(Watch, arguments, 1, usage)
    if len(words) > 1:
        raise ConfigError(f"{usage}: give one run directory, not {' '.join(words)}")
    runs = find_runs()
    if not words and not runs:
        raise ConfigError(f"{usage}: there are no runs under runs/; give the directory of one")
    if words and (Path(words[0]) / SEEDS).is_file():
        from shoal.experiment.watching_seeds import watch_seeds

        live = options.mode == "live" or (options.mode == "auto" and sys.stdout.isatty())
        watch_seeds(Path(words[0]), live, options.every_seconds, sys.stdout)
    else:
        watch(RunDir.open(Path(words[0])) if words else runs[-1], options, sys.stdout)
    return 0


def watch(run: RunDir, options: Watch, out: IO[str]) -> None:
    """Show what is in the folder; while the run goes on, everything that is added."""
    config = run.config()
    goals = {**{name: numbers(config).get(name) for name in GOALS}, "until": config.get("until")}
    seen = console(options.mode, out, _title(config), goals, options.every_seconds)
    assert seen is not None
    try:
        newest: Mapping[str, Any] | None = None
        for row in _rows(run):
            if row is None:  # all that there is by now
                if newest is not None:
                    seen.write({**_whole(newest), "last": holder(run.path) is None})
                newest = None
            elif row.get("kind") == "snapshot":
                newest = row
            elif row.get("kind") == "event":
                seen.event({**row, "kind": row.get("event", "note")})
    finally:
        seen.close()
    _ended(run, out)


def _rows(run: RunDir) -> Iterator[Mapping[str, Any] | None]:
    """The lines of metrics.jsonl as they come, and None whenever there are no more; ends with the run."""
    lines = follow_lines(run.metrics_file)
    while True:
        going = holder(run.path) is not None  # asked first: what is written before the end is read
        yield from iter(lambda: next(lines), None)
        yield None
        if not going:
            return
        time.sleep(LOOK_SECONDS)


def _title(config: Mapping[str, Any]) -> str:
    pair = " x ".join(str(config.get(section, {}).get("name")) for section in ("algorithm", "architecture"))
    return (f"{config.get('preset') or pair} on {config.get('env', {}).get('name')} · {config.get('runtime')} · "
            f"{counted(config.get('actors'), 'actor')} · seed {config.get('seed')}")


def _whole(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a console shows of a snapshot. JSON's null, and anything else that is not what a run writes, is not known."""
    def inside(name: str) -> dict[str, float]:
        value = row.get(name)
        return numbers(value) if isinstance(value, Mapping) else {}

    known = numbers(row)
    shown = {name: known.get(name, unknown) for name, unknown in SHOWN.items()}
    shown |= {name: {**dict.fromkeys(("mean", "p95", "max"), math.nan), **inside(name)} for name in SPREADS}
    shown |= {name: known[name] for name in CLUSTER if set(CLUSTER) <= set(known)}
    return {**shown, "losses": inside("losses"), "verdict": str(row.get("verdict") or ""),
            "evaluating": str(row.get("evaluating") or ""), "training": row.get("training") is not False}


def _ended(run: RunDir, out: IO[str]) -> None:
    """The curve so far, and how it ended."""
    summary = run.summary()
    known = numbers(summary)
    curve = read_curve(run.metrics_file, "eval_return")
    curve = curve if len(curve.y) > 1 else read_curve(run.metrics_file, "train_return")
    if len(curve.y) > 1:
        drawn = sparkline(curve.y, CURVE_WIDTH)
        out.write(f"return  {drawn}  {curve.y[0]:,.4g} to {curve.y[-1]:,.4g}, best {curve.y.max():,.4g}\n")
    out.write(f"{run.path}: {_how(run, run.state(summary))}"
              + (f", {known['env_steps']:,} env steps" if known.get("env_steps") else "")
              + (f", evaluated {known['eval_return']:,.2f}" if "eval_return" in known else "")
              + (f" over {counted(known['eval_episodes'], 'episode')}" if known.get("eval_episodes") else "") + "\n")


def _how(run: RunDir, state: str) -> str:
    if state == "killed" and run.checkpoints().newest() is None:
        return "it was killed before its first checkpoint, so it cannot be resumed; start it again with `shoal train`"
    return {"killed": "it was killed; `shoal resume` continues it", "running": "it is running"}.get(state, f"ended by {state}")
