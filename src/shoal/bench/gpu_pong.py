"""Pong on a machine with a GPU: whole programs against the environment alone, measured in turns in one run.

    python -m shoal.bench.gpu_pong [--rounds 2] [--only seed,impala]

e is the fastest of a few layouts of ALE alone (one process of all threads, or a process of one thread per core), i the
policy on all cores. seed infers and learns on the GPU, so its yardstick is e; impala's actors infer on the CPU cores that also
step the environments, so its yardstick is 1 / (1/e + 1/i). Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from typing import Any

from shoal.bench import machine
from shoal.bench.cases import NATURE, PONG, Case
from shoal.bench.limits import Cell, Layout, Probes
from shoal.bench.measure import run_shoal

__all__ = ["main"]

CORES = len(os.sched_getaffinity(0))
ENVS = (Cell("env", 128, Layout(1, CORES), "raw:ale"), Cell("env", 256, Layout(1, CORES), "raw:ale"),
        Cell("env", 16, Layout(CORES, 1), "raw:ale"))
ACTS = (Cell("act", 16, Layout(CORES, 1)), Cell("act", 64, Layout(CORES, 1)))
WIDE = {"device": "cuda", "actors": CORES, "architecture.envs_per_actor": 16}
SEED = {**WIDE, "architecture.groups": 2, "architecture.batch_slots": 8, "architecture.queue_slots": 32}
CASES = (
    Case("seed", PONG, "seed", {**NATURE, **SEED}),
    Case("seed resnet", PONG, "seed", {**SEED, "net.torso": "impala"}),
    Case("impala", PONG, "impala", {**NATURE, **WIDE, "architecture.batch_slots": 8}),
)


def measured(probes: Probes, workload: str, cells: tuple[Cell, ...], seconds: float) -> list[Cell]:
    return [replace(cell, frames_per_second=probes.rate(workload, cell, seconds)) for cell in cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or case.name in options.only.split(",")]
    rounds: list[dict[str, Any]] = []
    with Probes() as probes:
        workload = json.dumps({**CASES[2].arguments(), "device": "cpu"})
        for _ in range(options.rounds):
            envs = measured(probes, workload, ENVS, options.seconds)
            acts = measured(probes, workload, ACTS, options.seconds)
            e, i = (max(cell.frames_per_second for cell in cells) for cells in (envs, acts))
            limits = {"seed": e, "impala": 1 / (1 / e + 1 / i)}
            row: dict[str, Any] = {"e": round(e), "i": round(i), "cells": [asdict(cell) for cell in (*envs, *acts)]}
            for case in cases:
                outcome = run_shoal(case, options.scale)
                limit = limits[case.name.split()[0]]
                share = outcome.env_steps_per_second / limit
                row[case.name] = {"limit": round(limit), "share": round(share, 3), **outcome.record()}
                sys.stderr.write(f"e {e:,.0f} i {i:,.0f}   {case.name}: {outcome.env_steps_per_second:,.0f} env steps/s, "
                                 f"{share:.0%} of {limit:,.0f} {outcome.error or ''}\n")
            rounds.append(row)
            sys.stderr.write(json.dumps(row) + "\n")
    sys.stdout.write(json.dumps({**machine.describe(), "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
