"""`shoal plot RUN ...`: learning curves in one picture, with mean and band over seeds (plot_lines.py). Needs matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.errors import ConfigError
from shoal.experiment.parse import parse_options, split_positionals
from shoal.experiment.plot_lines import PlotLine, plot_lines
from shoal.experiment.rundir import runs_at
from shoal.options import Options
from shoal.telemetry.console import counted
from shoal.telemetry.curves import Curve, band_of, joined, read_curve

__all__ = ["plot_command"]

USAGE = "shoal plot RUN ... --out FILE"
OVER = {"steps": ("env_steps", "env steps"), "seconds": ("seconds", "seconds of training"), "updates": ("learner_steps", "updates")}


@dataclass(frozen=True)
class Plot(Options):
    """Draw curves of runs.

    - Runs that differ only in their seed are one line: their mean, with a band.
    - Budgets and goals, the pace of evaluations, logging, --policy, --faults, --ray do not count.
    - Nor does the layout that --actors auto has found.
    - Any other difference (preset, environment, algorithm, runtime, ...) makes a line of its own.
    - A folder of --seeds is always one line.
    - Where a seed occurs twice with the same values, every folder is a line of its own.
    """

    out: str = "curves.png"
    """The picture: .png, .svg or .pdf."""
    metric: str | None = None
    """What to draw: a name of docs/metrics.md, such as train_return or losses/entropy; eval_return by default."""
    over: Literal["steps", "seconds", "updates"] = "steps"
    """What runs from left to right: env steps, wall-clock seconds, or updates."""
    band: Literal["range", "std", "interval"] = "range"
    """Around the mean of several seeds: from the lowest to the highest, the standard deviation, or the mean's 95 % interval."""
    each: bool = False
    """Draw every run for itself, named by its folder."""
    title: str | None = None
    """Above the picture; the environment by default."""


@dataclass(frozen=True)
class Line:
    """One line of the picture."""

    name: str
    curves: tuple[Curve, ...]
    left_out: tuple[Path, ...] = ()
    """Runs that have no value yet."""

    @property
    def begin(self) -> float:
        """From where on all of its runs have a value."""
        return float(max(curve.x[0] for curve in self.curves))

    @property
    def end(self) -> float:
        return float(min(curve.x[-1] for curve in self.curves))

    @property
    def has_mean(self) -> bool:
        return len(self.curves) > 1 and self.begin <= self.end


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
    together = plot_lines(runs, options.each)
    metric = options.metric or _metric_of(together)
    lines = [_line(line, metric, OVER[options.over][0]) for line in together]
    draw(lines, metric, options, {run.config().get("env", {}).get("name", "") for run in runs})
    count = sum(len(line.curves) for line in lines)
    sys.stdout.write(f"wrote {options.out}: {metric} of {counted(count, 'run')} in {counted(len(lines), 'line')}\n")
    for line in lines:
        what = "" if len(line.curves) == 1 else f": mean of {len(line.curves)} seeds" if line.has_mean else \
            f": {len(line.curves)} seeds without a mean, because they have no {OVER[options.over][1]} in common"
        sys.stdout.write(f"  {line.name}{what}\n")
        sys.stdout.writelines(f"  without {path}, which has no {metric} yet\n" for path in line.left_out)
    return 0


def _metric_of(lines: Sequence[PlotLine]) -> str:
    """eval_return, or train_return where no run of a line was evaluated."""
    evaluated = all(any(len(read_curve(run.metrics_file, "eval_return").x) for run in line.runs) for line in lines)
    return "eval_return" if evaluated else "train_return"


def _line(line: PlotLine, metric: str, over: str) -> Line:
    """Without seeds that have no value yet: they have just begun, or have failed early."""
    curves = {run.path: read_curve(run.metrics_file, metric, over) for run in line.runs}
    known = tuple(joined(curve) for curve in curves.values() if len(curve.x))
    if not known:
        raise ConfigError(f"{line.runs[0].path} has no {metric} in its metrics.jsonl; give another --metric (docs/metrics.md), or "
                          "leave this run out")
    return Line(line.name, known, tuple(path for path, curve in curves.items() if not len(curve.x)))


def draw(lines: Sequence[Line], metric: str, options: Plot, envs: set[str]) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), dpi=150)
    for number, line in enumerate(lines):
        _draw_line(axes, line, f"C{number % 10}", options.band)
    axes.set_xlabel(OVER[options.over][1])
    axes.set_ylabel(metric.replace("_", " "))
    axes.set_title(options.title if options.title is not None else ", ".join(sorted(filter(None, envs))))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=any(len(curve.x) == 1 for line in lines for curve in line.curves))  # its dots are no evaluations
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out)
    pyplot.close(figure)


def _draw_line(axes: Any, line: Line, colour: str, kind: str) -> None:
    """The mean with its band as far as all runs go, or at the one point that all have; each run as a thin line."""
    if len(line.curves) == 1:
        (curve,) = line.curves
        axes.plot(curve.x, curve.y, _style(curve), color=colour, label=line.name)
        return
    name = f"{line.name} ({len(line.curves)} seeds)"
    alpha, width = (0.3, 0.7) if line.has_mean else (0.7, 1.0)
    for number, curve in enumerate(line.curves):
        label = name if not number and not line.has_mean else None
        axes.plot(curve.x, curve.y, _style(curve), color=colour, alpha=alpha, linewidth=width, label=label)
    if not line.has_mean:
        return
    band = band_of(line.curves, kind)
    if line.begin == line.end:
        around = band.mean[:1] - band.low[:1], band.high[:1] - band.mean[:1]
        axes.errorbar(band.x[:1], band.mean[:1], around, fmt="o", color=colour, label=name)
        return
    axes.plot(band.x, band.mean, color=colour, label=name)
    axes.fill_between(band.x, np.asarray(band.low), np.asarray(band.high), color=colour, alpha=0.2, linewidth=0)


def _style(curve: Curve) -> str:
    """A line; a dot for a single point, which has no length."""
    return "-" if len(curve.x) > 1 else "."


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('`shoal plot` draws with matplotlib, which is not installed here; pip install "shoal[plot]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
