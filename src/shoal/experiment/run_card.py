"""The card of a run in a notebook: what it was, what came out, and its learning curve. It is one drawing in a little HTML, without
scripts, so it looks the same in every notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from shoal.telemetry.curves import Curve, read_curve

__all__ = ["run_card"]

LEFT, TOP, LINE = 16, 28, 20        # where text begins, the title's base line, from line to line
NAMES, CURVE = 80, 330              # where values and the curve begin
WIDTH, PLOT, HIGH = 640, 220, 90    # of the card; of the curve
GREY, BLUE = "#777", "#1f77b4"


def run_card(title: str, directory: Path, summary: Mapping[str, Any]) -> str:
    found = [("env steps", _number(summary.get("env_steps"))), ("return", _returns(summary)),
             ("time", _seconds(summary.get("seconds"))), ("ended by", str(summary.get("stopped_by") or ""))]
    rows = [(name, value) for name, value in found if value]
    last = TOP + LINE * (len(rows) + 1)
    text = [_text(LEFT, TOP, title, "font-weight:bold")]
    for number, (name, value) in enumerate(rows):
        base = TOP + LINE * (number + 1)
        text += [_text(LEFT, base, name, f"fill:{GREY}"), _text(LEFT + NAMES, base, value)]
    text.append(_text(LEFT, last, str(directory), f"fill:{GREY};font-size:11px"))
    drawn = "".join([*text, _picture(_curve(directory / "metrics.jsonl"))])
    height = last + LEFT
    border = f"<rect x='0.5' y='0.5' width='{WIDTH - 1}' height='{height - 1}' rx='6' fill='#fff' stroke='#ccc'/>"
    return (f"<div><svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
            f"style='font:13px DejaVu Sans,sans-serif;fill:#222'>{border}{drawn}</svg></div>")


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' style='{style}'>{escape(words)}</text>"


def _returns(summary: Mapping[str, Any]) -> str:
    value, episodes = summary.get("eval_return"), summary.get("eval_episodes")
    if value is None:
        return ""
    return f"{value:,.2f} over {episodes:,} episodes" if episodes else f"{value:,.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} s"


def _curve(path: Path) -> Curve:
    evaluated = read_curve(path, "eval_return")
    return evaluated if len(evaluated.x) > 1 else read_curve(path, "train_return")


def _picture(curve: Curve) -> str:
    """A line from the first point to the last, with the lowest and the highest value beside it, and env steps below."""
    if len(curve.x) < 2:
        return ""
    low, high = float(curve.y.min()), float(curve.y.max())
    bottom = TOP + HIGH
    x = CURVE + (curve.x - curve.x[0]) / max(float(curve.x[-1] - curve.x[0]), 1e-9) * PLOT
    y = bottom - (curve.y - low) / max(high - low, 1e-9) * (HIGH - LINE)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in np.stack([x, y], 1))
    small = f"fill:{GREY};font-size:10px"
    return (f"<line x1='{CURVE}' y1='{bottom + 4}' x2='{CURVE + PLOT}' y2='{bottom + 4}' stroke='#ddd'/>"
            f"<polyline points='{points}' fill='none' stroke='{BLUE}' stroke-width='1.5'/>"
            + _text(CURVE + PLOT + 6, TOP + LINE + 4, f"{high:,.4g}", small) + _text(CURVE + PLOT + 6, bottom, f"{low:,.4g}", small)
            + _text(CURVE + PLOT - 70, bottom + 18, f"{curve.x[-1]:,.0f} env steps", small))
