"""Plots as inline SVG: axes, lines, points, bars with whiskers. No script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from shoal.telemetry.short_numbers import short

__all__ = ["COLOURS", "Bar", "Polyline", "bars", "lines"]

COLOURS = ("#4269d0", "#efb118", "#3ca951", "#a463f2", "#ff8ab7", "#6cc5b0", "#97bbf5", "#9c6b4e", "#9498a0", "#ff725c")
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 28, 42
ROW = 26
NAMES = 230


@dataclass(frozen=True)
class Polyline:
    """Points joined in order."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = COLOURS[0]
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Bar:
    """A value with its range, and a mark for what could be."""

    name: str
    value: float
    low: float
    high: float
    mark: float | None = None


@dataclass
class Axis:
    """Values to pixels."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.high <= self.low:
            self.high = self.low + 1.0
        self.ticks = nice_ticks(self.low, self.high)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two values."""
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step)
    return [step * k for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two powers of ten; what lies between them, or the ends, where there are less than two."""
    for factors in ((1,), (1, 2, 5), range(1, 10)):
        found = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for factor in factors]
        inside = [tick for tick in found if low <= math.log10(tick) <= high]
        if len(inside) > 1:
            return inside
    return [10.0**low, 10.0**high]


def _number(tick: float) -> str:
    return short(tick) if tick else "0"


def _text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "var(--ink)") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str = "var(--grid)", more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'


def _svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    return (f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img"><title>{escape(title)}</title>'
            f'{"".join(parts)}</svg>')


def lines(title: str, chart: Sequence[Polyline], x_name: str, y_name: str, threshold: float | None = None,
          x_ticks: Sequence[float] = (), x_log: bool = False, y_log: bool = False) -> str:
    """A line chart; `threshold` is a red rule across it, `x_ticks` are the numbers below it where round ones will not do. `x_log`
    and `y_log`: the axis is logarithmic, and all its values are above 0."""
    chart = [line for line in chart if line.points]  # who has nothing to show is not in the legend either
    scale, y_scale = math.log10 if x_log else float, math.log10 if y_log else float
    xs = [scale(x) for line in chart for x, _ in line.points]
    ys = [y_scale(y) for line in chart for _, y in line.points] + ([] if threshold is None else [y_scale(threshold)])
    if not xs:
        return ""
    x_axis = Axis(min(xs) if x_log else min(0.0, *xs), max(xs), LEFT, WIDTH - RIGHT)
    parts: list[str] = []
    if x_log:
        x_ticks = log_ticks(x_axis.low, x_axis.high)
    low, high = (min(ys), max(ys)) if y_log else (min(0.0, *ys), max(ys) * 1.05 if max(ys) > 0 else 0.0)
    y_axis = Axis(low, high, HEIGHT - BOTTOM, TOP)
    for tick in log_ticks(low, y_axis.high) if y_log else y_axis.ticks:
        parts = [*parts, _rule(LEFT, y := y_axis(y_scale(tick)), WIDTH - RIGHT, y), _text(LEFT - 6, y + 4, _number(tick), "end")]
    parts += [_text(x_axis(scale(tick)), HEIGHT - BOTTOM + 16, _number(tick)) for tick in x_ticks or x_axis.ticks]
    parts += [_text((LEFT + WIDTH) / 2, HEIGHT - 6, x_name), _text(LEFT, 12, y_name, "start")]
    if threshold is not None:
        parts.append(_rule(LEFT, y := y_axis(y_scale(threshold)), WIDTH - RIGHT, y, "var(--bad)", 'stroke-dasharray="3 3"'))
    for line in chart:
        way = " ".join(f"{x_axis(scale(x)):.1f},{y_axis(y_scale(y)):.1f}" for x, y in line.points)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<polyline points="{way}" fill="none" stroke="{line.colour}" stroke-width="1.8"{dash}>'
                     f"<title>{escape(line.name)}</title></polyline>")
        if line.dots:
            parts += [f'<circle cx="{x_axis(scale(x)):.1f}" cy="{y_axis(y_scale(y)):.1f}" r="3" fill="{line.colour}"/>'
                      for x, y in line.points]
    right = float(WIDTH - RIGHT)
    for name, colour in reversed(list(dict.fromkeys((line.name, line.colour) for line in chart))):
        parts.append(_text(right, 12, name, "end", colour))
        right -= 6.5 * len(name) + 12
    return _svg(WIDTH, HEIGHT, parts, title)


def bars(title: str, chart: Sequence[Bar], mark_name: str) -> str:
    """Horizontal bars; whiskers are the range over the runs, a red rule is the mark."""
    top = max([bar.high for bar in chart] + [bar.mark for bar in chart if bar.mark is not None], default=0.0)
    if not top:
        return ""
    axis = Axis(0.0, top * 1.02, NAMES, NAMES + WIDTH - RIGHT - 60)
    height = ROW * len(chart) + 34
    parts = [_rule(axis(tick), 4, axis(tick), height - 28) + _text(axis(tick), height - 14, _number(tick))
             for tick in axis.ticks]
    for number, bar in enumerate(chart):
        y = 6 + ROW * number
        parts.append(_text(NAMES - 8, y + 14, bar.name, "end"))
        parts.append(f'<rect x="{NAMES}" y="{y}" width="{axis(bar.value) - NAMES:.1f}" height="{ROW - 8}" fill="{COLOURS[0]}"/>')
        parts.append(_rule(axis(bar.low), y + 9, axis(bar.high), y + 9, "var(--ink)"))
        if bar.mark is not None:
            parts.append(_rule(axis(bar.mark), y - 2, axis(bar.mark), y + ROW - 6, "var(--bad)", 'stroke-width="2"'))
    if any(bar.mark is not None for bar in chart):
        parts.append(_text(NAMES + WIDTH - RIGHT - 60, height - 1, f"red: {mark_name}", "end", "var(--bad)"))
    return _svg(NAMES + WIDTH, height + 4, parts, title)
