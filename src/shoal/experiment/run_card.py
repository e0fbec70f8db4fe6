"""Cards in notebooks, of a run, of several seeds and of a policy: what came out, with learning curves. A card is one drawing in a
little HTML, without scripts, so it looks the same in every notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from shoal.telemetry.console import counted
from shoal.telemetry.curves import Curve, joined, read_curve

__all__ = ["card", "run_card", "seeds_card"]

LEFT, TOP, LINE = 16, 28, 20        # where text begins, the title's base line, from line to line
NAMES, CURVE = 80, 330              # where values and the curve begin
WIDTH, PLOT, HIGH = 640, 220, 90    # of the card; of the curve
GREY, BLUE = "#777", "#1f77b4"


def run_card(title: str, directory: Path, summary: Mapping[str, Any]) -> str:
    rows = [("env steps", _number(summary.get("env_steps"))), ("return", _returns(summary)),
            ("time", _seconds(summary.get("seconds"))), ("ended by", str(summary.get("stopped_by") or ""))]
    return card(title, rows, str(directory), [_curve(directory / "metrics.jsonl")])


def seeds_card(title: str, directory: Path, summary: Mapping[str, Any], runs: Sequence[Path]) -> str:
    """Of several seeds: the mean of what came out, its interval, and the curves of all."""
    rows = [(name, _mean(summary.get(metric))) for name, metric in (("return", "eval_return"), ("env steps", "env_steps"),
                                                                   ("time (s)", "seconds"))]
    return card(title, rows, str(directory), [_curve(run / "metrics.jsonl") for run in runs])


def card(title: str, rows: Sequence[tuple[str, str]], note: str, curves: Sequence[Curve] = ()) -> str:
    """A title, lines of a name and a value, and a note below; empty values are left out."""
    rows = [(name, value) for name, value in rows if value]
    last = TOP + LINE * (len(rows) + 1)
    text = [_text(LEFT, TOP, title, "font-weight:bold")]
    for number, (name, value) in enumerate(rows):
        base = TOP + LINE * (number + 1)
        text += [_text(LEFT, base, name, f"fill:{GREY}"), _text(LEFT + NAMES, base, value)]
    text.append(_text(LEFT, last, note, f"fill:{GREY};font-size:11px"))
    drawn = [curve for curve in curves if len(curve.x) > 1]
    text.append(_picture(drawn) if drawn else "")
    height = max(last, TOP + HIGH + LINE if drawn else 0) + LEFT
    border = f"<rect x='0.5' y='0.5' width='{WIDTH - 1}' height='{height - 1}' rx='6' fill='#fff' stroke='#ccc'/>"
    return (f"<div><svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
            f"style='font:13px DejaVu Sans,sans-serif;fill:#222'>{border}{''.join(text)}</svg></div>")


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' style='{style}'>{escape(words)}</text>"


def _returns(summary: Mapping[str, Any]) -> str:
    value, episodes = summary.get("eval_return"), summary.get("eval_episodes")
    if value is None:
        return ""
    return f"{value:,.2f} over {counted(episodes, 'episode')}" if episodes else f"{value:,.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} s"


def _curve(path: Path) -> Curve:
    evaluated = joined(read_curve(path, "eval_return"))
    return evaluated if len(evaluated.x) > 1 else read_curve(path, "train_return")


def _mean(found: Mapping[str, Any] | None) -> str:
    """A mean over seeds with its interval, where there is one."""
    if not found:
        return ""
    return f"{found['mean']:,.6g}" + ("" if found["low"] is None else f" ({found['low']:,.6g} to {found['high']:,.6g})")


def _picture(curves: Sequence[Curve]) -> str:
    """A line for each curve, with the lowest and the highest value beside them, and env steps below."""
    x, y = (np.concatenate(values) for values in ([curve.x for curve in curves], [curve.y for curve in curves]))
    low, high, begin, end = float(y.min()), float(y.max()), float(x.min()), float(x.max())
    bottom = TOP + HIGH

    def line(curve: Curve) -> str:
        across = CURVE + (curve.x - begin) / max(end - begin, 1e-9) * PLOT
        up = bottom - (curve.y - low) / max(high - low, 1e-9) * (HIGH - LINE)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in np.stack([across, up], 1))
        return f"<polyline points='{points}' fill='none' stroke='{BLUE}' stroke-width='1.5'/>"

    small = f"fill:{GREY};font-size:10px"
    return (f"<line x1='{CURVE}' y1='{bottom + 4}' x2='{CURVE + PLOT}' y2='{bottom + 4}' stroke='#ddd'/>"
            + "".join(map(line, curves))
            + _text(CURVE + PLOT + 6, TOP + LINE + 4, f"{high:,.4g}", small) + _text(CURVE + PLOT + 6, bottom, f"{low:,.4g}", small)
            + _text(CURVE + PLOT - 70, bottom + 18, f"{end:,.0f} env steps", small))
