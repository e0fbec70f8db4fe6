"""Numbers and tables as text: what `shoal bench` prints and what the pages show are the same lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.bench.rates import Spread
from shoal.telemetry.short_numbers import short

__all__ = ["UNMEASURED", "markdown", "spread"]

UNMEASURED = "The composed limit of these env steps/s was not measured in this run; `shoal bench throughput` measures it."


def spread(values: Sequence[float | None]) -> str:
    """Median (lowest - highest)."""
    found = Spread.of([math.nan if value is None else value for value in values])
    return short(found.median) + (f" ({short(found.low)} - {short(found.high)})" if found.count > 1 else "")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, so that it reads well without a renderer too. A bar in a cell would end it."""
    head, *rows = [[" ".join(cell.split("\n")).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])
