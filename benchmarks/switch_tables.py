"""What each switch of `--gpu` is worth: rows with the rates of every turn, on and off, and how docs/performance.md shows them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.bench.text_tables import markdown
from shoal.telemetry.short_numbers import short

__all__ = ["switch_row", "switch_rows", "switch_tables"]

HEAD = ("network", "switch", "what", "on, frames/s", "off, frames/s", "on / off (each turn)")


def switch_row(torso: str, switch: str, what: str, on: Sequence[float], off: Sequence[float], seconds: float) -> dict[str, Any]:
    """What was measured in turns. The ratio is the median of the turns': who drifts from turn to turn drifts on both sides."""
    turns = {"on": [round(x) for x in on], "off": [round(x) for x in off]}
    middle = {side: round(statistics.median(rates)) for side, rates in turns.items()}
    return {"torso": torso, "switch": switch, "what": what, **middle, "ratio": round(statistics.median(_ratios(turns)), 3),
            "turns": turns, "took_seconds": round(seconds, 1)}


def switch_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    return markdown(HEAD, [_cells(row) for row in rows])


def switch_tables(results: Mapping[str, Any]) -> str:
    """Of pieces of work (benchmarks.gpu_switches) or of whole programs (gpu_pong --switch). A row that was measured on another day
    has its own date."""
    machine, torch = results["machine"], results["versions"]["torch"]
    dates = " and ".join(dict.fromkeys(row.get("date", results["date"]) for row in results["rows"]))
    about = f"{dates}, {', '.join(machine['gpus'])} with {machine['cores']} cores, torch {torch}."
    return f"{about}\n\n{switch_rows(results['rows'])}"


def _ratios(turns: Mapping[str, Sequence[float]]) -> list[float]:
    return [on / off for on, off in zip(turns["on"], turns["off"], strict=True)]


def _cells(row: Mapping[str, Any]) -> list[str]:
    name = [row["torso"], f"`{row['switch']}`", row["what"] + (f", {row['case']}" if "case" in row else "")]
    if "missing" in row:
        return [*name, "-", "-", row["missing"]]
    found = _ratios(row["turns"])
    return [*name, short(row["on"]), short(row["off"]), f"{statistics.median(found):.2f} ({', '.join(f'{x:.2f}' for x in found)})"]
