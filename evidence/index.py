"""Writes docs/results/README.md, which says what every file of docs/results shows: `python -m evidence.index`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evidence.lines import RESULTS

__all__ = ["PAGE", "page"]

PAGE = RESULTS / "README.md"
MEASUREMENTS = {
    "throughput-quick": ("`make bench-quick`", "benchmark.md"),
    "throughput-suite": ("`shoal bench throughput`", "benchmark.md"),
    "as-shipped-suite": ("`shoal bench evidence/as_shipped.toml`", "performance.md"),
    "learning-suite": ("`shoal bench learning`", "benchmark.md"),
    "scaling-suite": ("`shoal bench scaling`", "benchmark.md"),
    "faults-suite": ("`shoal bench faults`", "benchmark.md"),
    "bench.json": ("efficiency of four cases; now cases of `shoal bench throughput`", "performance.md"),
    "peers.json": ("shoal beside peers; now `shoal bench throughput` and `python -m benchmarks.race`", "performance.md"),
    "bench_ray.json": ("the Ray runtime; now `shoal bench ray`", "performance.md"),
    "bench_replay.json": ("replay buffers; now `shoal bench replay`", "replay.md"),
    "means.json": ("`python -m benchmarks.means`", "performance.md"),
    "feed.json": ("`python -m benchmarks.feed`", "performance.md"),
    "startup.json": ("`python -m benchmarks.startup`", "performance.md"),
    "small_updates.json": ("sac and dqn beside SB3; page faults of the throughput presets; by hand", "performance.md"),
    "dqn_update_time.json": ("processor time of dqn's updates beside SB3's, by hand", "performance.md"),
    "table_memory.json": ("`python -m benchmarks.table_memory`", "presets/apex.md"),
    "against-a24688d.json": ("`python -m benchmarks.against`", "performance.md"),
    "same-bits.json": ("`python -m evidence.same_bits`", "performance.md"),
    "speed-presets.json": ("`python -m evidence.speed --write`", "presets/README.md"),
}
"""File or folder -> the command that measures it, and the page that shows it; those of the H200 are in gpu.md."""


def page() -> str:
    """The whole page."""
    lines, others = [], []
    for path in sorted(RESULTS.iterdir()):
        found = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
        if isinstance(found, dict) and "statement" in found:
            statement, met = found["statement"].replace("|", "\\|"), "met" if found["met"] else "**not met**"
            lines.append(f"| [{path.stem}]({path.name}) | {statement} | {met} | {found['commit']} |")
        elif path != PAGE:
            others.append(_other(path))
    return "\n".join([
        "# Measured results", "", "Written by `python -m evidence.index`. Every run is in the files, the bad ones too.", "",
        "## Lines of `make evidence`", "", "| line | statement | | commit |", "|---|---|---|---|", *lines, "",
        "## Measurements", "", "| file | measured by | shown in |", "|---|---|---|", *others, ""])


def _other(path: Path) -> str:
    if path.name.startswith("h200"):
        how, shown = "on an H200", "gpu.md"
    elif path.suffix == ".svg":
        how, shown = "`python -m benchmarks.scaling_page`", "scaling.md"
    else:
        how, shown = MEASUREMENTS[path.name]
    target = f"{path.name}/results.md" if path.is_dir() else path.name
    return f"| [{path.name}]({target}) | {how} | [{shown}](../{shown}) |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
