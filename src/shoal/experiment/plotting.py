"""`shoal plot RUN ...`: learning curves in one picture, with mean and band over the seeds of each preset. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.errors import ConfigError
from shoal.experiment.parse import parse_options, split_positionals
from shoal.experiment.rundir import RunDir, runs_at
from shoal.options import Options
from shoal.telemetry.curves import Curve, band_of, read_curve

__all__ = ["lines_of", "plot_command"]

USAGE = "shoal plot RUN ... --out FILE"
OVER = {"steps": ("env_steps", "env steps"), "seconds": ("seconds", "seconds of training"), "updates": ("learner_steps", "updates")}
LEARNING = ("algorithm", "architecture", "net", "replay", "envs", "league", "actors", "learners", "values", "policies", "init_from",
            "demos", "offline", "anneal_env_steps")
"""Parts of a run's configuration by which what it learns may differ."""
MOST_TOLD = 3  # values in the name of a line


@dataclass(frozen=True)
class Plot(Options):
    """Draw curves of runs."""

    out: str = "curves.png"
    """The picture: .png, .svg or .pdf."""
    metric: str | None = None
    """What to draw: a name of docs/metrics.md, such as train_return or losses/entropy; eval_return by default."""
    over: Literal["steps", "seconds", "updates"] = "steps"
    """What runs from left to right: env steps, wall-clock seconds, or updates."""
    band: Literal["range", "std", "interval"] = "range"
    """What lies around the mean of several seeds: from the lowest to the highest, the standard deviation, or the 95 % interval of
    the mean."""
    each: bool = False
    """Draw every run for itself, also those that differ by their seed only."""
    title: str | None = None
    """Above the picture; the environment by default."""


@dataclass(frozen=True)
class Line:
    """One line of the picture: the curves of runs that differ by their seed only."""

    name: str
    curves: tuple[Curve, ...]
    seeds: bool
    """Whether each curve has a seed of its own."""


def plot_command(arguments: list[str]) -> int:
    if any(word in ("-h", "--help") for word in arguments):
        parse_options(Plot, Plot(), ["--help"], USAGE)
    words, rest = split_positionals(arguments, len(arguments))
    options = parse_options(Plot, Plot(), rest, USAGE)
    if not words:
        raise ConfigError(f"{USAGE}: give one or more run directories; `shoal runs` lists them")
    if Path(options.out).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--out is {options.out}; it must end in .png, .svg or .pdf")
    runs = [run for word in words for run in runs_at(Path(word))]
    metric = options.metric or _metric_of(runs)
    lines = lines_of(runs, metric, OVER[options.over][0], options.each)
    draw(lines, metric, options, {run.config().get("env", {}).get("name", "") for run in runs})
    count = sum(len(line.curves) for line in lines)
    sys.stdout.write(f"wrote {options.out}: {metric} of {count} run{'s' * (count != 1)} in {len(lines)} "
                     f"line{'s' * (len(lines) != 1)}\n")
    return 0


def _metric_of(runs: Sequence[RunDir]) -> str:
    """eval_return, or train_return where a run was never evaluated."""
    evaluated = all(len(read_curve(run.metrics_file, "eval_return").x) for run in runs)
    return "eval_return" if evaluated else "train_return"


def lines_of(runs: Sequence[RunDir], metric: str, over: str, each: bool) -> list[Line]:
    """One line for the runs that differ by their seed only, or for each run."""
    groups: dict[tuple[str, str], list[RunDir]] = {}
    several = len({run.config().get("env", {}).get("name") for run in runs}) > 1
    for run in runs:
        config = run.config()
        pair = " x ".join(str(config.get(section, {}).get("name")) for section in ("algorithm", "architecture"))
        name = str(config.get("preset") or pair) + (f", {config.get('env', {}).get('name')}" if several else "")
        key = (str(run.path), "") if each else (name, json.dumps(_learning_values(config), sort_keys=True))
        groups.setdefault(key, []).append(run)
    return [Line(name + _differing(values, [other for alike, other in groups if alike == name]),
                 tuple(_curve(run, metric, over) for run in group), len({run.config().get("seed") for run in group}) == len(group))
            for (name, values), group in groups.items()]


def _learning_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values by which what is learned may differ, such as algorithm.lr."""
    found: dict[str, Any] = {}
    for section in LEARNING:
        values = config.get(section)
        found |= {f"{section}.{name}": value for name, value in values.items()} if isinstance(values, dict) else {section: values}
    return found


def _differing(values: str, alike: Sequence[str]) -> str:
    """What tells a line from those of the same preset, in words for the legend."""
    if len(alike) < 2:
        return ""
    mine, others = json.loads(values), [json.loads(other) for other in alike]
    told = [name for name in mine if len({json.dumps(other.get(name)) for other in others}) > 1]
    return "".join(f", {name}={json.dumps(mine[name])}" for name in told[:MOST_TOLD]) + (", ..." if len(told) > MOST_TOLD else "")


def _curve(run: RunDir, metric: str, over: str) -> Curve:
    curve = read_curve(run.metrics_file, metric, over)
    if not len(curve.x):
        raise ConfigError(f"{run.path} has no {metric} in its metrics.jsonl; give another --metric (docs/metrics.md), or leave "
                          "this run out")
    return curve


def draw(lines: Sequence[Line], metric: str, options: Plot, envs: set[str]) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), dpi=150)
    for number, line in enumerate(lines):
        _draw_line(axes, line, f"C{number % 10}", options.band)
    axes.set_xlabel(OVER[options.over][1])
    axes.set_ylabel(metric.replace("_", " "))
    axes.set_title(options.title if options.title is not None else ", ".join(sorted(filter(None, envs))))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:g}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out)
    pyplot.close(figure)


def _draw_line(axes: Any, line: Line, colour: str, kind: str) -> None:
    """The mean with its band as far as all runs go; each run as a thin line."""
    if len(line.curves) == 1:
        (curve,) = line.curves
        axes.plot(curve.x, curve.y, color=colour, label=line.name)
        return
    band = band_of(line.curves, kind)
    for curve in line.curves:
        axes.plot(curve.x, curve.y, color=colour, alpha=0.3, linewidth=0.7)
    axes.plot(band.x, band.mean, color=colour, label=f"{line.name} ({len(line.curves)} {'seeds' if line.seeds else 'runs'})")
    axes.fill_between(band.x, np.asarray(band.low), np.asarray(band.high), color=colour, alpha=0.2, linewidth=0)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('`shoal plot` draws with matplotlib, which is not installed here; pip install "shoal[plot]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
