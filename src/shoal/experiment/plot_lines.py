"""Which runs are one line of `shoal plot`, and what a line is called.

Runs are seeds of one line if they differ in their seed and, besides it, only in values of ANY: these change neither what is learned
nor how it is measured. A difference in anything else (preset, environment, algorithm, network, runtime, ...) makes lines of their
own, named by what differs. The runs of a folder of --seeds are always one line. Where a seed occurs twice with the same values, the
runs are no seeds of each other: every run (and every folder of --seeds) is a line of its own, named by its folder.

With --actors auto a layout is measured before every run, and it may come out differently; only the number of environments counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.experiment.rundir import SEEDS, RunDir
from shoal.telemetry.outputs import read_lines

__all__ = ["PlotLine", "plot_lines"]

ANY = {"shoal", "preset", "env", "resumed", "seed", "run_dir", "console", "log", "checkpoint", "tensorboard", "policy", "faults",
       "ray", "autoscale", "max_env_steps", "max_learner_steps", "max_seconds", "until_return", "until", "eval.enabled",
       "eval.episodes", "eval.every_env_steps", "eval.every_learner_steps", "eval.last_env_steps"}
"""Values in which seeds of one line may differ. The preset and the environment tell families of lines apart."""
LAYOUT = {"learner_threads", "architecture.envs_per_actor", "architecture.one_place", "architecture.batch_slots"}
"""What --actors auto chooses, beside the number of actors and, with a process per core that does everything, of learners."""
TOLD_FIRST = ("runtime", "algorithm", "net", "replay")
MOST_TOLD = 3  # values in the name of a line, unless it takes more to tell two lines apart


@dataclass(frozen=True)
class PlotLine:
    """Runs that are drawn as one line."""

    name: str
    runs: tuple[RunDir, ...]


@dataclass(frozen=True)
class _Unit:
    """A run, or those of a folder of --seeds."""

    folder: Path
    runs: list[RunDir]
    family: tuple[str, str]
    """The preset (or the pair) and the environment."""
    values: dict[str, str]
    """All that counts, as JSON."""

    @classmethod
    def of(cls, folder: Path, runs: list[RunDir]) -> _Unit:
        config = runs[0].config()
        pair = " x ".join(str(config.get(section, {}).get("name")) for section in ("algorithm", "architecture"))
        family = str(config.get("preset") or pair), str(config.get("env", {}).get("name"))
        return cls(folder, runs, family, {name: json.dumps(value) for name, value in _values(runs[0], config).items()})


def plot_lines(runs: Sequence[RunDir], each: bool = False) -> list[PlotLine]:
    """The lines of a picture, in the order in which their first runs are given; `each`: every run for itself."""
    runs = list({run.path.resolve(): run for run in runs}.values())
    if each:
        return [PlotLine(str(run.path), (run,)) for run in runs]
    folders: dict[Path, list[RunDir]] = {}
    for run in runs:
        together = (run.path.parent / SEEDS).is_file()
        folders.setdefault(run.path.parent if together else run.path, []).append(run)
    units = [_Unit.of(folder, inside) for folder, inside in folders.items()]
    several = len({unit.family[1] for unit in units}) > 1
    lines: list[PlotLine] = []
    for family in dict.fromkeys(unit.family for unit in units):
        title = ", ".join(family) if several else family[0]
        lines += _lines_of(title, [unit for unit in units if unit.family == family])
    place = {run.path: number for number, run in enumerate(runs)}
    return sorted(lines, key=lambda line: min(place[run.path] for run in line.runs))


def _lines_of(title: str, units: Sequence[_Unit]) -> list[PlotLine]:
    """The lines of one preset and environment. A value that some of them do not have (they are of another version) does not
    count."""
    names = [name for name in _ordered(units[0].values) if all(name in unit.values for unit in units)]
    differing = [name for name in names if len({unit.values[name] for unit in units}) > 1]
    groups: dict[tuple[str, ...], list[_Unit]] = {}
    for unit in units:
        groups.setdefault(tuple(unit.values[name] for name in differing), []).append(unit)
    lines, told = [], _told(differing, list(groups))
    for key, group in groups.items():
        values = dict(zip(differing, key, strict=True))
        name = title + "".join(f", {name}={_told_value(values[name])}" for name in told) + ", ..." * (len(told) < len(differing))
        runs = [run for unit in group for run in unit.runs]
        if len({run.config().get("seed") for run in runs}) == len(runs):
            lines.append(PlotLine(name, tuple(runs)))
        else:
            unique = len({unit.folder.name for unit in group}) == len(group)
            lines += [PlotLine(f"{name}, {unit.folder.name if unique else unit.folder}", tuple(unit.runs)) for unit in group]
    return lines


def _told(differing: list[str], keys: Sequence[tuple[str, ...]]) -> list[str]:
    """Of the values that differ those that are told: few, but enough to tell all lines apart."""
    for count in range(min(MOST_TOLD, len(differing)), len(differing)):
        if len({key[:count] for key in keys}) == len(keys):
            return differing[:count]
    return differing


def _told_value(value: str) -> str:
    """As it is given on the command line."""
    return "None" if value == "null" else value.strip('"')


def _ordered(names: Mapping[str, str]) -> list[str]:
    """What tells most to people comes first, the layout last."""
    rank = {section: number for number, section in enumerate(TOLD_FIRST)}
    return sorted(names, key=lambda name: len(rank) + 1 if name in LAYOUT else rank.get(name.partition(".")[0], len(rank)))


def _values(run: RunDir, config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run that count, such as algorithm.lr."""
    found: dict[str, Any] = {}
    for section, values in config.items():
        inside = {f"{section}.{name}": value for name, value in values.items()} if isinstance(values, dict) else {section: values}
        found |= {name: value for name, value in inside.items() if not {section, name} & ANY}
    actors, envs, learners = (found.get(name, 1) for name in ("actors", "architecture.envs_per_actor", "learners"))
    found["environments"] = actors * envs if isinstance(actors, int) and isinstance(envs, int) else None
    if _laid_out(run):
        alike = found.get("architecture.one_place") and actors == learners  # a process per core that does everything
        found |= {"actors": "auto", "learners": 1 if alike else learners, **{name: "auto" for name in LAYOUT if name in found}}
    return found


def _laid_out(run: RunDir) -> bool:
    """Whether --actors auto has chosen the run's layout."""
    return any(row.get("event") == "layout" for row in read_lines(run.metrics_file))
