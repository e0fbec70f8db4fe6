"""Writes the measured tables into docs/performance.md, between their markers: `python -m benchmarks.performance_page`.

What has not been measured says so: no number in that section is written by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.feed_tables import feed_tables
from benchmarks.means import means_tables
from benchmarks.results import RESULTS, ROOT, insert
from benchmarks.startup import startup_tables
from benchmarks.switch_tables import switch_tables

__all__ = ["SECTIONS", "write"]

PAGE = ROOT / "docs" / "performance.md"
SECTIONS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str], str]] = {
    "feed": ("feed.json", feed_tables, "python -m benchmarks.feed"),
    "means": ("means.json", means_tables, "python -m benchmarks.means"),
    "switches": ("h200_switches.json", switch_tables, "python -m benchmarks.gpu_switches --out FILE"),
    "program switches": ("h200_program_switches.json", switch_tables,
                         "python -m benchmarks.gpu_pong --switch NAME --only CASE --out FILE"),
    "startup": ("startup.json", startup_tables, "python -m benchmarks.startup"),
}
"""Marker -> (results file, how it is shown, the command that measures it)."""


def write(page: Path = PAGE, results: Path = RESULTS) -> None:
    text = page.read_text(encoding="utf-8")
    for marker, (name, show, command) in SECTIONS.items():
        path = results / name
        shown = f"Not measured yet: run `{command}`."
        if path.exists():
            shown = show(json.loads(path.read_text(encoding="utf-8")))
        text = insert(text, marker, shown)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
    sys.stdout.write(f"wrote {PAGE}\n")
