"""What `shoal.bench.gpu_switches` has measured, as docs/performance.md shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.bench.tables import markdown, short

__all__ = ["switch_rows", "switch_tables"]

HEAD = ("network", "switch", "what", "on, frames/s", "off, frames/s", "on / off (each turn)")


def switch_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    return markdown(HEAD, [_cells(row) for row in rows])


def switch_tables(results: Mapping[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    about = (f"{results['date']}, {', '.join(machine['gpus'])} with {machine['cores']} cores, torch {versions['torch']}; "
             f"{results['seconds']:g} s in all.")
    return f"{about}\n\n{switch_rows(results['rows'])}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    name = [row["torso"], f"`{row['switch']}`", row["what"]]
    if "ratio" not in row:
        return [*name, "-", "-", row["missing"]]
    each = ", ".join(f"{on / off:.2f}" for on, off in zip(row["turns"]["on"], row["turns"]["off"], strict=True))
    return [*name, short(row["on"]), short(row["off"]), f"{row['ratio']:.2f} ({each})"]
