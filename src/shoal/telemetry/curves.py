"""Curves of runs, read from metrics.jsonl: what `shoal plot`, `shoal watch` and the card of a run in a notebook draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.telemetry.outputs import read_lines

__all__ = ["Band", "Curve", "band_of", "joined", "read_curve", "sparkline"]

BLOCKS = "▁▂▃▄▅▆▇█"
POINTS = 200  # of a mean over several runs
NEAR = 0.25   # of the usual distance between two evaluations


@dataclass(frozen=True)
class Curve:
    """A metric over env steps or seconds."""

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None = None
    """Of evaluations: the episodes that each rests on."""


@dataclass(frozen=True)
class Band:
    """The mean of several curves, and what lies around it."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def read_curve(path: Path, metric: str, over: str = "env_steps") -> Curve:
    """From a metrics.jsonl. A metric inside another is named by its path: losses/entropy. An evaluation counts once, where it was
    first seen."""
    points, seen, evaluated = [], None, metric.startswith("eval_")
    for row in read_lines(path):
        value = _inside(row, metric)
        if row.get("kind") != "snapshot" or not _is_number(value) or not _is_number(row.get(over)):
            continue
        if evaluated:
            if row.get("eval_version") == seen:
                continue
            seen = row.get("eval_version")
        episodes: Any = row.get("eval_episodes")
        points.append((row[over], value, max(episodes, 1) if _is_number(episodes) else 1))
    x, y, weight = np.array(sorted(points, key=lambda point: point[0]), np.float64).reshape(-1, 3).T
    return Curve(x, y, weight if evaluated else None)


def joined(curve: Curve) -> Curve:
    """With evaluations at nearly the same step as one, their mean by episodes: what ends a run and what begins its resumed part
    would draw a vertical line. Nearly: at the same step, or less than a quarter of the usual (median) distance apart."""
    if curve.weight is None or len(curve.x) < 2:
        return curve
    gaps = np.diff(curve.x)
    cuts = np.flatnonzero((gaps > 0) & (gaps >= NEAR * np.median(gaps))) + 1
    parts = np.split(np.arange(len(curve.x)), cuts)
    x, y = (np.array([np.average(values[part], weights=curve.weight[part]) for part in parts]) for values in (curve.x, curve.y))
    return Curve(x, y, np.array([curve.weight[part].sum() for part in parts]))


def _inside(row: Mapping[str, Any], metric: str) -> Any:
    value: Any = row
    for part in metric.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def band_of(curves: Sequence[Curve], kind: str) -> Band:
    """The mean at points that all curves reach, with the standard deviation (std), the 95 % interval of the mean (interval) or the
    lowest and the highest curve (range) around it."""
    begin, end = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.linspace(begin, max(begin, end), POINTS)
    rows = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    mean = rows.mean(0)
    if kind == "range" or len(curves) == 1:
        return Band(x, mean, rows.min(0), rows.max(0))
    wide = rows.std(0, ddof=1)
    if kind == "interval":
        wide = wide * student_t(len(curves) - 1) / np.sqrt(len(curves))
    return Band(x, mean, mean - wide, mean + wide)


def student_t(degrees: int) -> float:
    """The 97.5th percentile of Student's t distribution: how many standard errors a 95 % interval reaches to either side."""
    known = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
             2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
    return known[degrees - 1] if degrees <= len(known) else 1.96 + 2.4 / degrees  # within 0.002 beyond 30


def sparkline(values: np.ndarray, width: int) -> str:
    """A curve in one line of text: the mean of each stretch, from the lowest value to the highest."""
    if not len(values):
        return ""
    parts = [part.mean() for part in np.array_split(values, min(width, len(values)))]
    low, high = min(parts), max(parts)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((part - low) * scale)] for part in parts)
