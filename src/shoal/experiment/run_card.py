"""The card of a run in a notebook: what it was, what came out, and its learning curve, as a little HTML without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from shoal.telemetry.curves import Curve, read_curve

__all__ = ["run_card"]

WIDTH, HEIGHT, MARGIN = 280, 90, 6
STYLE = "border:1px solid #ccc;border-radius:6px;padding:8px 12px;display:inline-block;font:13px sans-serif;line-height:1.5"


def run_card(title: str, directory: Path, summary: Mapping[str, Any]) -> str:
    rows = [("run", str(directory)), ("env steps", _number(summary.get("env_steps"))),
            ("return", _returns(summary)), ("time", _seconds(summary.get("seconds"))), ("ended by", summary.get("stopped_by"))]
    cells = "".join(f"<tr><td style='color:#777;padding:0 10px 0 0'>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
                    for name, value in rows if value)
    metrics = directory / "metrics.jsonl"
    curve = read_curve(metrics, "eval_return")
    if len(curve.x) < 2:
        curve = read_curve(metrics, "train_return")
    return (f"<div style='{STYLE}'><b>{escape(title)}</b>"
            f"<div style='display:flex;gap:16px'><table style='border:0'>{cells}</table>{_picture(curve)}</div></div>")


def _returns(summary: Mapping[str, Any]) -> str:
    value, episodes = summary.get("eval_return"), summary.get("eval_episodes")
    if value is None:
        return ""
    return f"{value:,.2f} over {episodes:,} episodes" if episodes else f"{value:,.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} s"


def _picture(curve: Curve) -> str:
    """A line from the first point to the last, with the lowest and the highest value beside it."""
    if len(curve.x) < 2:
        return ""
    low, high = float(curve.y.min()), float(curve.y.max())
    x = MARGIN + (curve.x - curve.x[0]) / max(float(curve.x[-1] - curve.x[0]), 1e-9) * (WIDTH - 2 * MARGIN)
    y = HEIGHT - MARGIN - (curve.y - low) / max(high - low, 1e-9) * (HEIGHT - 2 * MARGIN)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in np.stack([x, y], 1))
    text = "font-size:10px;fill:#777"
    return (f"<svg width='{WIDTH + 60}' height='{HEIGHT}' role='img' aria-label='learning curve'>"
            f"<polyline points='{points}' fill='none' stroke='#1f77b4' stroke-width='1.5'/>"
            f"<text x='{WIDTH}' y='12' style='{text}'>{high:,.4g}</text>"
            f"<text x='{WIDTH}' y='{HEIGHT - MARGIN}' style='{text}'>{low:,.4g}</text></svg>")
