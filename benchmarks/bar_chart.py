"""Horizontal bars with whiskers, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.telemetry.svg import COLOURS, RIGHT, WIDTH, Axis, picture, rule, text, tick_text

__all__ = ["Bar", "bars"]

ROW = 26
NAMES = 230


@dataclass(frozen=True)
class Bar:
    """A value with its range, and a mark for what could be."""

    name: str
    value: float
    low: float
    high: float
    mark: float | None = None


def bars(title: str, chart: Sequence[Bar], mark_name: str) -> str:
    """Horizontal bars; whiskers are the range over the runs, a red rule is the mark."""
    top = max([bar.high for bar in chart] + [bar.mark for bar in chart if bar.mark is not None], default=0.0)
    if not top:
        return ""
    axis = Axis(0.0, top * 1.02, NAMES, NAMES + WIDTH - RIGHT - 60)
    height = ROW * len(chart) + 34
    parts = [rule(axis(tick), 4, axis(tick), height - 28) + text(axis(tick), height - 14, tick_text(tick))
             for tick in axis.ticks]
    for number, bar in enumerate(chart):
        y = 6 + ROW * number
        parts.append(text(NAMES - 8, y + 14, bar.name, "end"))
        parts.append(f'<rect x="{NAMES}" y="{y}" width="{axis(bar.value) - NAMES:.1f}" height="{ROW - 8}" fill="{COLOURS[0]}"/>')
        parts.append(rule(axis(bar.low), y + 9, axis(bar.high), y + 9, "var(--ink)"))
        if bar.mark is not None:
            parts.append(rule(axis(bar.mark), y - 2, axis(bar.mark), y + ROW - 6, "var(--bad)", 'stroke-width="2"'))
    if any(bar.mark is not None for bar in chart):
        parts.append(text(NAMES + WIDTH - RIGHT - 60, height - 1, f"red: {mark_name}", "end", "var(--bad)"))
    return picture(NAMES + WIDTH, height + 4, parts, title)
