"""Puts the quick throughput suite's table into docs/benchmark.md, between its markers: `python -m benchmarks.quick_table`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.results import RESULTS, ROOT, insert
from shoal.bench.result_columns import results_table, where_line
from shoal.bench.results_folder import ResultsFolder

__all__ = ["write"]

PAGE, FOLDER, MARKER = ROOT / "docs" / "benchmark.md", RESULTS / "throughput-quick", "throughput"
SHOWN = ("env_steps_per_second", "limit.env_steps_per_second", "efficiency", "learner_idle", "policy_lag_mean",
         "bytes_per_env_step", "cpu_seconds_per_million", "peak_memory_mb", "startup_seconds")


def write(page: Path = PAGE, folder: Path = FOLDER) -> None:
    text = "Not measured yet: run `make bench-quick`."
    if (folder / "results.jsonl").exists():
        results = ResultsFolder(folder)
        text = f"{where_line(results.sessions(), results.rows())}\n\n{results_table(results.groups(), SHOWN)}"
    page.write_text(insert(page.read_text(encoding="utf-8"), MARKER, text), encoding="utf-8")


if __name__ == "__main__":
    write()
    sys.stdout.write(f"wrote {PAGE}\n")
