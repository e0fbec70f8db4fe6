"""python -m tests.evidence [--only WORD] [--list] [--again]"""

from __future__ import annotations

import argparse
import sys

from tests.evidence import actor_critics, bench, central, chaos, faults, learning, mechanisms, replay, sleepers, staleness, values
from tests.evidence.lines import Line

LINES: list[Line] = [*learning.LINES, *mechanisms.LINES, *actor_critics.LINES,
                     *staleness.LINES, *sleepers.LINES, *central.LINES, *faults.LINES, *chaos.LINES, *replay.LINES, *values.LINES,
                     *bench.LINES]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence", description="Run the lines; write docs/results/*.json")
    parser.add_argument("--only", default="", help="run lines whose name contains this word")
    parser.add_argument("--list", action="store_true", help="print the lines and stop")
    parser.add_argument("--again", action="store_true", help="run also lines that have a result for this commit")
    options = parser.parse_args()
    chosen = [line for line in LINES if options.only in line.name]
    missed = []
    for number, line in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {line.name}: {line.statement}", flush=True)
        if options.list or (line.fresh() and not options.again):
            continue
        if not line.record():
            missed.append(line.name)
    if options.list:
        return 0
    if not chosen:
        print(f"no line is called like {options.only!r}; --list shows them")
        return 2
    print(f"{len(missed)} of {len(chosen)} lines not met{': ' + ', '.join(missed) if missed else ''}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
