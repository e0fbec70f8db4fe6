"""python -m evidence [--only WORD] [--list] [--again] [--jobs N]"""

from __future__ import annotations

import argparse
import os
import sys

from evidence import (
    actor_critics,
    atari,
    autoscale,
    bench,
    callbacks,
    central,
    chaos,
    chaos_presets,
    cluster,
    curl,
    demos,
    dqn_speed,
    earlier_runs,
    evolution,
    faults,
    fuzz,
    games,
    gorila,
    hosts,
    layouts,
    league,
    learning,
    many_seeds,
    mechanisms,
    off_policy,
    off_policy_mechanisms,
    offline,
    offline_speed,
    ope,
    outside,
    population,
    qtopt,
    replay,
    replay_kills,
    sac_speed,
    scaling,
    sleepers,
    staleness,
    values,
)
from evidence.lines import JOBS, Line

LINES: list[Line] = [*learning.LINES, *many_seeds.LINES, *mechanisms.LINES, *actor_critics.LINES, *layouts.LINES,
                     *staleness.LINES, *sleepers.LINES, *central.LINES, *faults.LINES, *chaos.LINES, *replay.LINES,
                     *replay_kills.LINES, *chaos_presets.LINES, *fuzz.LINES, *hosts.LINES, *values.LINES, *off_policy.LINES,
                     *off_policy_mechanisms.LINES, *offline.LINES, *ope.LINES, *offline_speed.LINES,
                     *sac_speed.LINES, *dqn_speed.LINES, *demos.LINES, *qtopt.LINES, *curl.LINES,
                     *gorila.LINES, *evolution.LINES, *population.LINES, *league.LINES, *games.LINES, *bench.LINES,
                     *callbacks.LINES,
                     *earlier_runs.LINES, *outside.LINES, *atari.LINES, *autoscale.LINES, *scaling.LINES, *cluster.LINES]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence", description="Run the lines; write docs/results/*.json")
    parser.add_argument("--only", default="", help="run lines whose name contains this word")
    parser.add_argument("--list", action="store_true", help="print the lines and stop")
    parser.add_argument("--again", action="store_true", help="run also lines that have a result for this commit")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, in lines that do not depend on time")
    options = parser.parse_args()
    os.environ[JOBS] = str(max(1, options.jobs))
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
