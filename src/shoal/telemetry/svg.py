"""Plots as inline SVG: axes, lines, points. No script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from shoal.telemetry.short_numbers import short

__all__ = ["COLOURS", "RIGHT", "WIDTH", "Axis", "Polyline", "lines", "picture", "rule", "text", "tick_text"]

COLOURS = ("#4269d0", "#efb118", "#3ca951", "#a463f2", "#ff8ab7", "#6cc5b0", "#97bbf5", "#9c6b4e", "#9498a0", "#ff725c")
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 28, 42


@dataclass(frozen=True)
class Polyline:
    """Points joined in order."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = COLOURS[0]
    dashed: bool = False
    dots: bool = False


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


def tick_text(tick: float) -> str:
    return short(tick) if tick else "0"


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "var(--ink)") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, colour: str = "var(--grid)", more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'


def picture(width: float, height: float, parts: Sequence[str], title: str) -> str:
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
        parts = [*parts, rule(LEFT, y := y_axis(y_scale(tick)), WIDTH - RIGHT, y), text(LEFT - 6, y + 4, tick_text(tick), "end")]
    parts += [text(x_axis(scale(tick)), HEIGHT - BOTTOM + 16, tick_text(tick)) for tick in x_ticks or x_axis.ticks]
    parts += [text((LEFT + WIDTH) / 2, HEIGHT - 6, x_name), text(LEFT, 12, y_name, "start")]
    if threshold is not None:
        parts.append(rule(LEFT, y := y_axis(y_scale(threshold)), WIDTH - RIGHT, y, "var(--bad)", 'stroke-dasharray="3 3"'))
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
        parts.append(text(right, 12, name, "end", colour))
        right -= 6.5 * len(name) + 12
    return picture(WIDTH, HEIGHT, parts, title)
