"""Learning from recordings on a GPU: whole runs of td3_bc and iql against their bare update loops, in turns.

    python -m benchmarks.gpu_offline DATA --out FILE.json [--turns 3] [--seconds 10] [--device cuda]

DATA is a recording of Hopper-v5 (`benchmarks.offline_table record` makes one). Networks of 256-256, batches of 256, no evaluation.
The bare loop makes whole updates on one batch that lies on the device already; the faster of one and several in one CUDA graph
counts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_sac import BareUpdates
from evidence.offline_speed import BATCH, algorithm_of, ours
from shoal.bench import machine
from shoal.device.placement import GpuConfig, Hardware
from shoal.roles.replay_config import LAUNCH_UPDATES

__all__ = ["main"]

PRESETS = ("td3_bc", "iql")


def bare(preset: str, hardware: Hardware, seconds: float) -> float:
    ways = (LAUNCH_UPDATES, 1) if hardware.on_gpu else (0,)
    return max(BareUpdates(algorithm_of(preset), hardware, BATCH, hardware.on_gpu, whole).rate(seconds) for whole in ways)


def turn(preset: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    run = ours(preset, str(options.data), seed, device=options.device, seconds=options.seconds)
    found = {"shoal": run["rate"], "learner_idle": run["idle"],
             "bare": bare(preset, Hardware(options.device, GpuConfig()), options.seconds / 4)}
    sys.stderr.write(f"{preset} {json.dumps(found)}\n")
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    results: dict[str, Any] = {**machine.describe(), "command": shlex.join(["python", "-m", "benchmarks.gpu_offline",
                                                                            *(sys.argv[1:] if words is None else words)])}
    for preset in PRESETS:
        turns = [turn(preset, options, seed) for seed in range(1, options.turns + 1)]
        middle = {name: statistics.median(found[name] for found in turns) for name in turns[0]}
        results[preset] = {"medians": middle, "share_of_bare": round(middle["shoal"] / middle["bare"], 3), "turns": turns}
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
