"""The learner on a GPU: the bare loop, and the same learner inside a whole program that is fed by replayed slots.

    python -m shoal.bench.learner_limit --torso nature --batch 8192 [--compile] [--no-bf16] [--no-pinned] [--seconds 10]

The bare loop makes updates on one batch that lies on the GPU already: nothing is copied, nothing is read back. In the program,
producers in processes of their own send slots of 84 x 84 x 4 frames without writing them anew; the learner takes them as it
always does: through shared memory, over the bus, update, weights published. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from shoal import algorithms
from shoal.algorithms import vtrace
from shoal.algorithms.hardware import GpuConfig, Hardware
from shoal.architectures.parts import EnvSource, Parts
from shoal.architectures.roles import Learner
from shoal.core import Me, Progress, Reader, Sink
from shoal.envs import EnvSpec
from shoal.nets import NetConfig
from shoal.runtime import Program, run

__all__ = ["main"]

UNROLL, SEATS, PRODUCERS = 31, 32, 4  # a slot has 32 rows of 32 frames
WARM_UPDATES = 5  # the first one may compile


class Replayer:
    """Sends slots with what was written into them the first time."""

    def __init__(self, me: Me, unrolls: Sink, weights: Reader, layout: Any) -> None:
        self.unrolls, self.rng, self.seen = unrolls, me.rng(), set()

    async def step(self) -> None:
        slot = await self.unrolls.slot()
        fill(slot.data, self.rng, self.seen)
        slot.send()


def fill(data: Any, rng: np.random.Generator, seen: set[int]) -> None:
    """Random frames, actions and rewards; once for each piece of memory."""
    data["weights_version"].fill(1 << 30)
    if (key := data["observation"].ctypes.data) in seen:
        return
    seen.add(key)
    data["observation"][...] = rng.integers(256, size=data["observation"].shape, dtype=np.uint8)
    data["action"][...] = rng.integers(6, size=data["action"].shape)
    data["reward"][...] = rng.normal(size=data["reward"].shape)
    data["discount"].fill(1)
    data["valid"].fill(True)
    data["extras"]["log_prob"].fill(-np.log(6))
    data["final_index"].fill(-1)


def bare(algorithm: Any, hardware: Hardware, slots: int, seconds: float) -> float:
    """Frames/s of updates on a batch that never moves."""
    tree, rng = algorithm.record.layout.joined(slots).empty(), np.random.default_rng(0)
    fill(tree, rng, set())
    learn = algorithm.learn(0)
    learn.to(hardware)
    sums = learn.sums(tree)
    minibatch = next(iter(learn.minibatches(tree, sums, Progress(), rng)))
    wait = torch.cuda.synchronize if hardware.on_gpu else lambda: None

    def update() -> None:
        gradient, _ = learn.gradients(minibatch, "all")
        learn.apply(gradient, "all")

    for _ in range(3):
        update()
    wait()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(4):
            update()
        wait()
        done += 4
    return done * slots * SEATS * UNROLL / (time.perf_counter() - began)


def bus(nbytes: int = 1 << 28) -> float:
    """Bytes/s from locked memory to the GPU."""
    here, there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    return 8 * nbytes / (time.perf_counter() - began)


class Watch:
    """A session that reads the learner's counters between two moments."""

    def __init__(self, warm: float, seconds: float) -> None:
        self.warm, self.seconds, self.marks = warm, seconds, []

    def begin(self, control: Any) -> None: ...

    def tick(self, control: Any) -> None:
        consumed, updates = control.total("samples_consumed"), control.total("learner_steps")
        now = time.perf_counter()
        if updates > WARM_UPDATES and (not self.marks or (len(self.marks) == 1 and now - self.marks[0][0] > self.warm)):
            self.marks.append((now, consumed))
            self.before = control.snapshot()["learner-0"]
        if len(self.marks) == 2 and now - self.marks[1][0] > self.seconds:
            self.marks.append((now, consumed))
            self.page = {name: value - self.before[name] for name, value in control.snapshot()["learner-0"].items()}
            control.stop("seconds")

    def saved(self, folder: Path, ok: bool) -> None: ...
    def newest(self) -> None: ...
    def end(self, control: Any, reason: str, error: str | None) -> None: ...

    @property
    def rate(self) -> float:
        (_, _), (t0, n0), (t1, n1) = self.marks
        return (n1 - n0) / (t1 - t0)


def whole(algorithm: Any, hardware: Hardware, slots: int, seconds: float) -> tuple[float, dict[str, float]]:
    """Frames/s of the learner in a program, and where its time went."""
    program, layout = Program("learner_limit"), algorithm.record.layout
    unrolls = program.stream("unrolls", layout, depth=max(3, -(-3 * slots // PRODUCERS)))
    weights = program.broadcast("weights", algorithm.published_layout())
    parts = Parts(algorithm, EnvSource("none"), SEATS, hardware=hardware)
    program.add("producer", Replayer, unrolls=unrolls.sink, weights=weights.reader, layout=layout, replicas=PRODUCERS)
    program.add("learner", Learner, parts=parts, unrolls=unrolls.source, weights=weights.publisher, batch_slots=slots)
    watch: Any = Watch(1.0, seconds)
    with tempfile.TemporaryDirectory() as folder:
        run(program, watch, "local", Path(folder))
    phases = {name.partition("/")[2]: round(value, 2) for name, value in watch.page.items()
              if name.startswith(("phase_seconds/", "wait_seconds/")) and value > 0.005}
    return watch.rate, phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torso", default="nature", choices=("nature", "impala"))
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-bf16", action="store_true")
    parser.add_argument("--no-pinned", action="store_true")
    parser.add_argument("--bare-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    hardware = Hardware(options.device, GpuConfig(bf16=not options.no_bf16, compile=options.compile, pinned=not options.no_pinned))
    frames = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    spec = EnvSpec("frames", frames, gym.spaces.Discrete(6), 27_000, 4, 1, False, "none", "", 6)
    algorithm = algorithms.make(vtrace.Config(unroll=UNROLL), spec, NetConfig(torso=options.torso), SEATS)
    slots = max(1, options.batch // ((UNROLL + 1) * SEATS))
    line = {"torso": options.torso, "frames_per_batch": slots * SEATS * (UNROLL + 1), "bf16": hardware.gpu.bf16,
            "compile": hardware.gpu.compile, "pinned": hardware.gpu.pinned,
            "bare_frames_per_second": round(bare(algorithm, hardware, slots, options.seconds))}
    if hardware.on_gpu:
        line["bus_bytes_per_second"] = round(bus())
    if not options.bare_only:
        rate, phases = whole(algorithm, hardware, slots, options.seconds)
        share = rate / line["bare_frames_per_second"]
        line |= {"program_frames_per_second": round(rate), "share": round(share, 3), "seconds": phases}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
