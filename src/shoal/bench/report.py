"""Writes the measured tables into docs/performance.md, between their markers: `python -m shoal.bench.report`.

What has not been measured says so: no number in that section is written by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.bench.feed_tables import feed_tables
from shoal.bench.machine import RESULTS, ROOT
from shoal.bench.peers.on_ray import ray_tables
from shoal.bench.switch_tables import switch_tables
from shoal.bench.tables import bench_tables, means_tables, peer_tables, startup_tables

__all__ = ["SECTIONS", "insert", "write"]

PAGE = ROOT / "docs" / "performance.md"
SECTIONS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str], str]] = {
    "bench": ("bench.json", bench_tables, "make bench"),
    "peers": ("peers.json", peer_tables, "make bench-peers"),
    "ray": ("bench_ray.json", ray_tables, "make bench-ray"),
    "feed": ("feed.json", feed_tables, "make bench-feed"),
    "means": ("means.json", means_tables, "python -m shoal.bench.means"),
    "switches": ("h200_switches.json", switch_tables, "python -m shoal.bench.gpu_switches --out FILE"),
    "program switches": ("h200_program_switches.json", switch_tables,
                         "python -m shoal.bench.gpu_pong --switch NAME --only CASE --out FILE"),
    "startup": ("startup.json", startup_tables, "python -m shoal.bench.startup"),
}
"""Marker -> (results file, how it is shown, the command that measures it)."""


def insert(page: str, marker: str, text: str) -> str:
    """The page with `text` between the marker's two comments."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(end) < page.index(begin):
        raise ValueError(f"the page needs the lines {begin} and {end}, once each and in this order")
    return page[: page.index(begin) + len(begin)] + f"\n{text}\n" + page[page.index(end) :]


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
