"""The targets of the replay buffers, judged from the results of a suite: `python -m benchmarks.replay_targets [FOLDER]`.

FOLDER (runs/bench/replay) is what `shoal bench replay` wrote. A target says how many times the rate of a peer shoal must have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.results import say
from shoal.bench.rates import Spread
from shoal.bench.result_columns import rates_of
from shoal.bench.results_folder import ResultsFolder
from shoal.bench.text_tables import markdown
from shoal.telemetry.short_numbers import short

__all__ = ["TARGETS", "main", "target_table"]

SMALL, SMALL_10K, SMALL_1M = (f"small records, capacity {size}" for size in ("100k", "10k", "1M"))
FRAMES = "84x84x4 frames, capacity 10k"
TARGETS = (
    (SMALL, "sample+update", ("shoal inline", "sample+update"), ("cpprb", "sample+update"), 1.0),
    (SMALL_1M, "sample+update", ("shoal inline", "sample+update"), ("cpprb", "sample+update"), 1.0),
    (FRAMES, "sample", ("shoal inline", "sample"), ("cpprb", "sample"), 1.0),
    (FRAMES, "sample against SB3", ("shoal inline", "sample"), ("sb3", "sample"), 1.0),
    (FRAMES, "sample+update", ("shoal inline", "sample+update"), ("cpprb", "sample+update"), 1.0),
    (SMALL, "insert 64 at a time", ("shoal inline", "insert"), ("cpprb", "insert"), 1.0),
    (SMALL, "append_batch", ("shoal inline", "append_batch"), ("cpprb", "insert"), 1.0),
    (SMALL, "ipc writer", ("shoal ipc", "ipc writer x1"), ("reverb", "tcp writer x1"), 5.0),
    (SMALL, "TCP writer", ("shoal tcp", "tcp writer x1"), ("reverb", "tcp writer x1"), 5.0),
    (SMALL, "ipc dataset", ("shoal ipc", "ipc dataset"), ("reverb", "tcp dataset"), 3.0),
    (SMALL, "TCP dataset", ("shoal tcp", "tcp dataset"), ("reverb", "tcp dataset"), 3.0),
    (FRAMES, "ipc writer", ("shoal ipc", "ipc writer x1"), ("reverb", "tcp writer x1"), 2.0),
    (FRAMES, "TCP writer", ("shoal tcp", "tcp writer x1"), ("reverb", "tcp writer x1"), 1.0),
    (FRAMES, "ipc dataset", ("shoal ipc", "ipc dataset"), ("reverb", "tcp dataset"), 2.0),
    (FRAMES, "TCP dataset", ("shoal tcp", "tcp dataset"), ("reverb", "tcp dataset"), 1.0),
)
"""(case, what, ours, theirs, how many times theirs it must be)."""
GROWTH = 1.5
"""How many times as long an operation may take with a hundred times the capacity."""


def target_table(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One line per target: ours, theirs, the ratio of the medians, and whether it is enough."""
    rates = rates_of(groups)

    def median(case: str, who: str, what: str) -> float | None:
        found = Spread.of(rates.get(f"{case}, {who}", {}).get(what, []))
        return found.median if found.count else None

    def line(case: str, what: str, ours: str, against: str, ratio: float | None, needed: str, met: bool) -> list[str]:
        shown = "-" if ratio is None else f"{ratio:.2f}"
        return [case, what, ours, against, shown, needed, "not measured" if ratio is None else "met" if met else "NOT MET"]

    rows = []
    for case, what, ours, theirs, times in TARGETS:
        mine, other = median(case, *ours), median(case, *theirs)
        ratio = mine / other if mine is not None and other is not None else None
        rows.append(line(case, what, short(mine), f"{theirs[0]} {short(other)}", ratio, f">= {times:g}", (ratio or 0.0) >= times))
    for what in ("insert", "sample", "sample+update"):
        few, many = (median(case, "shoal inline", what) for case in (SMALL_10K, SMALL_1M))
        ratio = few / many if few is not None and many is not None else None
        rows.append(line("small records", f"cost of {what}, 1M / 10k", short(many), f"10k: {short(few)}", ratio, f"<= {GROWTH:g}",
                         (ratio or 0.0) <= GROWTH))
    return markdown(("case", "what", "shoal", "against", "ratio", "needed", ""), rows)


def main(folder: str = "runs/bench/replay") -> int:
    table = target_table(ResultsFolder.open(folder).groups())
    say(table)
    return int("NOT MET" in table)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
