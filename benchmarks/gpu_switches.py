"""Each switch of `--gpu`, on and off, in turns: what it is worth on this GPU.

    python -m benchmarks.gpu_switches [--torsos nature,impala] [--only compile,graphs] [--seconds 0.4] [--turns 3] [--out FILE]

Two of everything are made, one with the switch and one without, all other switches at their defaults; they take turns of --seconds.
A learner is fed with batches that lie in host memory, as a program's are: they go over the bus, an update is made, its weights are
copied to the host. An inference server answers requests from host memory, at the size of half of Pong's environments and at a small
one. The ratio is the median of the turns' ratios: above 1 the switch pays. Weights on the device: one handing over of weights and
the forward pass after it, on the device or through the host as the broadcast does. torch.compile comes last: what is not begun
before --most-seconds is reported as not measured. Prints a Markdown table, and one JSON object to --out.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.switch_tables import switch_row, switch_rows
from benchmarks.synthetic import FRAMES, Requests, algorithm_of, fill, waiting_for
from benchmarks.work_rate import work_rate
from shoal.acting import Progress
from shoal.bench import machine
from shoal.device.placement import GpuConfig, Hardware

__all__ = ["main"]

UNROLL, SEATS, SLOTS = 20, 16, 8  # a batch of the Pong benchmark
ROWS = (256, 32)
LEARNER = ("bf16", "channels_last", "graphs", "pinned", "fused")
SERVER = ("bf16", "channels_last", "graphs")
LINES = [*((switch, "learner", 0) for switch in LEARNER), *((switch, "inference", rows) for switch in SERVER for rows in ROWS),
         ("together", "weights", ROWS[0]), ("compile", "learner", 0)]


def algorithm_for(torso: str) -> Any:
    return algorithm_of(torso, UNROLL, SEATS, FRAMES)


def hardware_of(switch: str, on: bool, device: str) -> Hardware:
    return Hardware(device, replace(GpuConfig(), **{switch: on}))


@functools.cache
def staged(torso: str, locked: bool) -> list[Any]:
    """Three staging buffers; memory that was locked once stays it, so who does not lock has others."""
    trees, rng = [], np.random.default_rng(0)
    for _ in range(3):
        trees.append(algorithm_for(torso).record.layout.joined(SLOTS).empty())
        fill(trees[-1], rng, set())
    return trees


class Learning:
    """Updates, fed from three staging buffers in host memory; one update is always under way while the next is prepared."""

    def __init__(self, torso: str, hardware: Hardware, rows: int) -> None:
        algorithm, self._rng = algorithm_for(torso), np.random.default_rng(0)
        self._trees = staged(torso, hardware.gpu.pinned)
        self.unit, self._made, self._running = SLOTS * SEATS * UNROLL, 0, None  # type: tuple[int, int, Any]
        self._learn = algorithm.learn(0)
        self._learn.to(hardware)
        self._on_gpu = hardware.on_gpu
        if hardware.on_gpu and hardware.gpu.graphs:
            self._learn.capture()

    def once(self) -> int:
        tree = self._trees[self._made % 3]
        self._made += 1
        minibatch = next(iter(self._learn.minibatches(tree, self._learn.sums(tree), Progress(), self._rng)))
        self._learn.apply(self._learn.gradients(minibatch, "all")[0], "all")
        if self._on_gpu:
            before, self._running = self._running, self._learn.snapshot(Progress())
            if before is not None:
                before()
        return self.unit


class Serving(Requests):
    """Requests that are answered, beside a learner with the same weights."""

    def __init__(self, torso: str, hardware: Hardware, rows: int) -> None:
        algorithm = algorithm_for(torso)
        super().__init__(algorithm, hardware, rows)
        self.learn = algorithm.learn(0)
        if hardware.on_gpu:
            self.learn.to(hardware)


class Renewing(Serving):
    """New weights before every answer: handed over on the device, or through host memory."""

    def __init__(self, torso: str, hardware: Hardware, rows: int) -> None:
        super().__init__(torso, hardware, rows)
        self._near, self._wire, self._into = hardware.gpu.together, None, None  # type: tuple[bool, Any, Any]
        layout = algorithm_for(torso).published_layout()
        if not self._near:
            self._wire, self._into = layout.empty(), layout.empty()
        self._layout = layout

    def once(self) -> int:
        if self._near:
            device_weights = self.learn.device_weights(Progress())
            with self.inference.on_stream():
                device_weights.load(self.policy)
        else:
            self._layout.copy(self._wire, self.learn.published(Progress()))  # what a publisher does ...
            self._layout.copy(self._into, self._wire)                       # ... and a reader
            with self.inference.on_stream():
                self.policy.load(self._into)
        return super().once()


KINDS = {"learner": Learning, "inference": Serving, "weights": Renewing}


def compared(torso: str, switch: str, kind: str, rows: int, turns: int, seconds: float, device: str) -> dict[str, Any]:
    began = time.perf_counter()
    wait = waiting_for(Hardware(device))
    pair = {on: KINDS[kind](torso, hardware_of(switch, on, device), rows) for on in (True, False)}
    for work in pair.values():
        for _ in range(6):  # kernels are chosen, graphs captured
            work.once()
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(turns):
        for on, work in pair.items():
            found[on].append(work_rate(work.once, seconds, wait))
    what = f"{kind}, {rows} rows" if rows else kind
    return switch_row(torso, switch, what, found[True], found[False], time.perf_counter() - began)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torsos", default="nature,impala")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--most-seconds", type=float, default=110.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    began, rows = time.perf_counter(), []  # type: float, list[dict[str, Any]]
    only = set(options.only.split(",")) if options.only else {switch for switch, _, _ in LINES}
    # By line and not by network, so that what takes long is left out last.
    for switch, kind, size in (line for line in LINES if line[0] in only):
        for torso in options.torsos.split(","):
            if time.perf_counter() - began > options.most_seconds:
                rows.append({"torso": torso, "switch": switch, "what": kind, "missing": "not measured: the time was over"})
                continue
            rows.append(compared(torso, switch, kind, size, options.turns, options.seconds, options.device))
            sys.stderr.write(json.dumps(rows[-1]) + "\n")
            if options.device == "cuda":
                torch.cuda.empty_cache()
    sys.stdout.write(switch_rows(rows) + "\n")
    if options.out is not None:
        took = round(time.perf_counter() - began)
        command = shlex.join(["python", "-m", "benchmarks.gpu_switches", *(sys.argv[1:] if words is None else words)])
        results = {**machine.describe(), "command": command, "seconds": took, "rows": rows}
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
