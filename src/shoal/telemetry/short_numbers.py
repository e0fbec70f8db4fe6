"""Numbers that a person can compare."""

from __future__ import annotations

import math

__all__ = ["short"]


def short(value: float | None) -> str:
    """Three digits that a person can compare: 512 k, 1.21 k, 348."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, unit in ((1e6, " M"), (1e3, " k"), (1.0, "")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.3g}{unit}"
    return f"{value:.2g}"
