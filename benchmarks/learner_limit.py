"""The learner on a GPU: the bare loop, and the same learner inside a whole program that is fed by replayed slots.

    python -m benchmarks.learner_limit --torso nature --batch 8192 [--compile] [--no-bf16] [--no-pinned] [--no-graphs] [--turns 5]

The bare loop makes updates on one batch that lies on the GPU already: nothing comes over the bus, nothing is read back. It is run
kernel by kernel (bare_eager) and, where the algorithm can be captured, replaying CUDA graphs (bare_graphs), whatever the program
does; `bare`, which the program is held against, is the faster of the two in that turn. In the program, producers in processes of
their own send slots of 84 x 84 x 4 frames without writing them anew; the learner takes them as it always does: through shared
memory, over the bus, update, weights published. They take turns: the program's processes are stopped (SIGSTOP) while the bare
loops run. Inference is the server's, 256 rows at a time from host memory. Prints one JSON line with every turn; the share is the
median of theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.synthetic import Requests, algorithm_of, fill, waiting_for
from benchmarks.work_rate import work_rate
from shoal.acting import Progress
from shoal.coordination.trial_session import TrialSession
from shoal.core import Me, Reader, Sink
from shoal.device.placement import GpuConfig, Hardware
from shoal.roles.batches import Intake
from shoal.roles.learner import Learner
from shoal.roles.parts import EnvSource, Parts
from shoal.runtime import Program, run

__all__ = ["main"]

UNROLL, SEATS, PRODUCERS = 31, 32, 4  # a slot has 32 rows of 32 frames
WARM_UPDATES = 5  # the first one may compile, the fourth captures graphs
SETTLE_SECONDS = 1.0


class Replayer:
    """Sends slots with what was written into them the first time."""

    def __init__(self, me: Me, unrolls: Sink, weights: Reader, layout: Any) -> None:
        self.unrolls, self.rng, self.seen = unrolls, me.rng(), set()

    async def step(self) -> None:
        slot = await self.unrolls.slot()
        fill(slot.data, self.rng, self.seen)
        slot.send()


class UpdateLoop:
    """Updates on a batch that never moves: kernel by kernel, or as graphs."""

    def __init__(self, algorithm: Any, hardware: Hardware, slots: int, graphs: bool) -> None:
        tree, rng = algorithm.record.layout.joined(slots).empty(), np.random.default_rng(0)
        fill(tree, rng, set())
        self._frames = int(np.count_nonzero(tree["valid"]))  # as a learner counts them
        self._learn = algorithm.learn(0)
        self._learn.to(hardware)
        self.captures = bool(getattr(self._learn.objective, "captures", False))
        if graphs:
            self._learn.capture()
        self._minibatch = next(iter(self._learn.minibatches(tree, self._learn.sums(tree), Progress(), rng)))
        self._wait = waiting_for(hardware)
        self._update(WARM_UPDATES)

    def _update(self, times: int) -> int:
        for _ in range(times):
            gradient, _ = self._learn.gradients(self._minibatch, "all")
            self._learn.apply(gradient, "all")
        self._wait()
        return times * self._frames

    def rate(self, seconds: float) -> float:
        """Frames/s."""
        return work_rate(lambda: self._update(4), seconds)


class BareLoop:
    """The best loop without a program around it."""

    def __init__(self, algorithm: Any, hardware: Hardware, slots: int) -> None:
        self._loops = {"bare_eager": UpdateLoop(algorithm, hardware, slots, graphs=False)}
        if self._loops["bare_eager"].captures:
            self._loops["bare_graphs"] = UpdateLoop(algorithm, hardware, slots, graphs=True)

    def rates(self, seconds: float) -> dict[str, float]:
        """Frames/s of each loop, which share the seconds, and `bare`, the faster one's."""
        found = {name: loop.rate(seconds / len(self._loops)) for name, loop in self._loops.items()}
        return {**found, "bare": max(found.values())}


def inference(algorithm: Any, hardware: Hardware, seconds: float, rows: int = 256) -> float:
    """Frames/s that are answered."""
    requests = Requests(algorithm, hardware, rows)
    for _ in range(5):
        requests.once()
    return work_rate(requests.once, seconds)


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


class Watch(TrialSession):
    """A session that lets the program and the bare loop take turns."""

    def __init__(self, bare: BareLoop, turns: int, seconds: float) -> None:
        self.bare, self.turns, self.seconds = bare, turns, seconds
        self.rows: list[dict[str, float]] = []
        self.page: dict[str, float] = {}
        self._warm = self._mark = 0.0

    def tick(self, control: Any) -> None:
        consumed, now = control.total("samples_consumed"), time.perf_counter()
        if control.total("learner_steps") <= WARM_UPDATES:
            self._warm = now + SETTLE_SECONDS
        elif not self._mark and now > self._warm:
            self._mark, self._consumed, self._before = now, consumed, control.snapshot()["learner-0"]
        elif self._mark and now - self._mark > self.seconds:
            self._note(control, (consumed - self._consumed) / (now - self._mark))
            if len(self.rows) == self.turns:
                control.stop("seconds")

    def _note(self, control: Any, program: float) -> None:
        """The end of the program's turn; now the bare loop's."""
        for name, value in control.snapshot()["learner-0"].items():
            self.page[name] = self.page.get(name, 0.0) + value - self._before[name]
        send(signal.SIGSTOP)
        try:
            rates = self.bare.rates(self.seconds)
        finally:
            send(signal.SIGCONT)
        self.rows.append({"program": round(program), **{name: round(rate) for name, rate in rates.items()},
                          "share": round(program / rates["bare"], 3)})
        self._mark, self._warm = 0.0, time.perf_counter() + SETTLE_SECONDS


def send(word: signal.Signals) -> None:
    """A signal to all processes that this one has started."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.send_signal(word)


def whole(algorithm: Any, hardware: Hardware, slots: int, watch: Any) -> dict[str, float]:
    """Run a program with the learner in it until the turns are over; where its time went."""
    program, layout = Program("learner_limit", metrics=algorithm.metrics), algorithm.record.layout
    unrolls = program.stream("unrolls", layout, depth=max(3, -(-3 * slots // PRODUCERS)))
    weights = program.broadcast("weights", algorithm.published_layout())
    parts = Parts(algorithm, EnvSource("none"), SEATS, hardware=hardware)
    program.add("producer", Replayer, unrolls=unrolls.sink, weights=weights.reader, layout=layout, replicas=PRODUCERS)
    program.add("learner", Learner, parts=parts, batches=unrolls.source, weights=weights.publisher, intake=Intake(slots))
    with tempfile.TemporaryDirectory() as folder:
        run(program, watch, "local", Path(folder))
    return {name.partition("/")[2]: round(value, 2) for name, value in watch.page.items()
            if name.startswith(("phase_seconds/", "wait_seconds/")) and value > 0.005}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torso", default="nature", choices=("nature", "impala"))
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-bf16", action="store_true")
    parser.add_argument("--no-pinned", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--bare-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is stopped must go on, or it could not end
    hardware = Hardware(options.device, GpuConfig(bf16=not options.no_bf16, compile=options.compile, pinned=not options.no_pinned,
                                                  graphs=not options.no_graphs))
    algorithm = algorithm_of(options.torso, UNROLL, SEATS)
    slots = max(1, options.batch // ((UNROLL + 1) * SEATS))
    bare = BareLoop(algorithm, hardware, slots)
    line: dict[str, Any] = {"torso": options.torso, "frames_per_batch": slots * SEATS * (UNROLL + 1), "bf16": hardware.gpu.bf16,
                            "compile": hardware.gpu.compile, "pinned": hardware.gpu.pinned, "graphs": hardware.gpu.graphs,
                            **{f"{name}_frames_per_second": round(rate) for name, rate in bare.rates(options.seconds).items()}}
    if hardware.on_gpu:
        line |= {"bus_bytes_per_second": round(bus()),
                 "inference_frames_per_second": round(inference(algorithm, hardware, options.seconds))}
    if not options.bare_only:
        watch: Any = Watch(bare, options.turns, options.seconds)
        spent = whole(algorithm, hardware, slots, watch)
        line |= {"turns": watch.rows, "share": statistics.median(row["share"] for row in watch.rows), "seconds": spent}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
