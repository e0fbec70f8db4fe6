"""What each means of going faster brings: on and off in turn, five rounds, in one run: `python -m benchmarks.means`.

    whole runs     where a setting exists: real processes, about a second each after their first updates (as `--actors auto` does)
    single parts   where it does not: the piece of work alone, with one thread, once as it is done here and once without

A means that does not pay on these cores is shown like one that does. Written to docs/results/means.json.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.composed_limit.limits import Cell, CoreLayout, Probes
from benchmarks.composed_limit.probe import learning, prepared
from benchmarks.composed_limit.scenes import CARTPOLE, PONG, Workload
from benchmarks.results import load, origins, parser_for, save, say, with_earlier_rows
from benchmarks.work_rate import work_rate
from shoal import runtime
from shoal.bench import machine
from shoal.bench.rates import Spread
from shoal.bench.text_tables import UNMEASURED, markdown, spread
from shoal.coordination.calibration import Stopwatch, calibrate, candidates
from shoal.experiment.preload import PRELOAD
from shoal.experiment.prepare import prepare
from shoal.experiment.run import plan_of
from shoal.ops import optimise
from shoal.runtime import Supervisor
from shoal.runtime.fork_server_client import ForkServerClient

__all__ = ["MEANS", "Means", "main"]

SECONDS = 0.3
PARAMETERS = 1_700_000  # of the Nature CNN
TWO_ACTORS = {"actors": 2, "eval.enabled": False, "console.mode": "none"}
ON_PONG = Workload("Pong", PONG, "impala", {"net.torso": "nature"})
ON_CARTPOLE = Workload("CartPole", CARTPOLE, "impala_throughput")

Rate = Callable[[], float]
Pair = tuple[Rate, Rate]  # without the means, with it


@dataclass
class Bench:
    """What the measurements share: one fork server and one set of probes."""

    fork_server: ForkServerClient
    probes: Probes
    folder: Path
    seconds: float = SECONDS
    note: str = ""

    def rate(self, work: Callable[[], object]) -> Rate:
        """Calls per second of a piece of work."""

        def once() -> int:
            work()
            return 1

        def measure() -> float:
            work()
            return work_rate(once, self.seconds)

        return measure

    def run(self, preset: str, watch: Callable[[], Stopwatch] = Stopwatch, **values: Any) -> Rate:
        """Env steps/s of a whole run."""
        overrides = {**TWO_ACTORS, **{key.replace("__", "."): value for key, value in values.items()}}

        def measure() -> float:
            program, session = prepare(plan_of(preset, "CartPole-v1", None, None, overrides)).program(), watch()
            runtime.run(program, session, "local", self.folder, fork_server=self.fork_server)
            return session.rate

        return measure


@dataclass(frozen=True)
class Means:
    """One way to be faster."""

    name: str
    off: str
    on: str
    unit: str
    pair: Callable[[Bench], Pair]


# ---------------------------------------------------------------------------------------------- single parts
def in_place(bench: Bench) -> Pair:
    """An unroll of Pong from the actor's hands to the staging buffer."""
    layout = prepared(ON_PONG.key()).algorithm.record.layout
    private, slot, stage = layout.empty(), layout.empty(), layout.joined(2).empty()

    def twice() -> None:
        layout.copy(slot, private)
        layout.gather(stage, 0, slot)

    return bench.rate(twice), bench.rate(lambda: layout.gather(stage, 0, slot))


def publishing(bench: Bench) -> Pair:
    """The learner writes its weights and goes on; or it waits until an actor has taken them."""
    weights = np.zeros(PARAMETERS, np.float32)
    shared = np.frombuffer(mmap.mmap(-1, weights.nbytes), np.float32)
    mine, theirs = socket.socketpair()
    if os.fork() == 0:
        os.closerange(3, theirs.fileno())  # nothing else may be held open here, least of all the fork server's socket
        os.closerange(theirs.fileno() + 1, 4096)
        own = np.empty_like(weights)
        while theirs.recv(1):  # ends with the parent's end of the socket
            own[:] = shared
            theirs.send(b".")
        os._exit(0)
    theirs.close()

    def wait() -> None:
        shared[:] = weights
        mine.send(b".")
        mine.recv(1)

    def go_on() -> None:
        shared[:] = weights

    return bench.rate(wait), bench.rate(go_on)


def staging(bench: Bench) -> Pair:
    """The next batch is gathered by a thread while the learner learns; or before it learns."""
    learn = learning(ON_PONG.key(), 320)
    layout = prepared(ON_PONG.key()).algorithm.record.layout
    slot, stage = layout.empty(), layout.joined(2).empty()

    def gather() -> None:
        for position in range(2):
            layout.gather(stage, position, slot)

    def after() -> None:
        gather()
        learn()

    def beside() -> None:
        thread = threading.Thread(target=gather)
        thread.start()
        learn()
        thread.join()

    return bench.rate(after), bench.rate(beside)


def nature(memory_format: torch.memory_format) -> torch.nn.Module:
    nn = torch.nn
    net = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
                        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 7))
    return net.to(memory_format=memory_format)


def convolving(frames: int, learn: bool) -> Callable[[Bench], Pair]:
    def pair(bench: Bench) -> Pair:
        def work(memory_format: torch.memory_format) -> Callable[[], object]:
            net = nature(memory_format)
            images = torch.randint(0, 255, (frames, 4, 84, 84), dtype=torch.uint8)

            def act() -> None:
                with torch.inference_mode():
                    net(images.to(torch.float32, memory_format=memory_format).mul_(1 / 255))

            def update() -> None:
                net(images.to(torch.float32, memory_format=memory_format).mul_(1 / 255)).square().mean().backward()

            return update if learn else act

        return bench.rate(work(torch.contiguous_format)), bench.rate(work(torch.channels_last))

    return pair


def optimising(bench: Bench) -> Pair:
    """Adam over the Nature CNN: tensor by tensor (foreach), or one flat vector in one kernel."""
    net = nature(torch.contiguous_format)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    many = torch.optim.Adam(net.parameters(), 1e-4, foreach=True)
    size = sum(parameter.numel() for parameter in net.parameters())
    flat, grad, m, v, count = torch.zeros(size), torch.randn(size), torch.zeros(size), torch.zeros(size), torch.zeros(())
    return bench.rate(many.step), bench.rate(lambda: optimise.adam_(flat, grad, m, v, count, 1e-4))


def inferring(bench: Bench) -> Pair:
    """An MLP acts for 16 environments."""
    nn = torch.nn
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    rows = torch.zeros(16, 4)

    def under(guard: Callable[[], Any]) -> Callable[[], object]:
        def act() -> None:
            with guard():
                net(rows).log_softmax(-1).argmax(-1)

        return act

    return bench.rate(under(torch.no_grad)), bench.rate(under(torch.inference_mode))


def threads(bench: Bench) -> Pair:
    """A process for each core, each acting for 1024 environments: with as many threads as cores, or with one."""
    cores = len(os.sched_getaffinity(0))

    def acting(count: int) -> Rate:
        return lambda: bench.probes.rate(ON_CARTPOLE, Cell("act", 1024, CoreLayout(cores, count)), bench.seconds)

    return acting(cores), acting(1)


# ---------------------------------------------------------------------------------------------- whole runs
def layout(bench: Bench) -> Pair:
    """What `--actors auto` finds, against two actors with half of the environments each."""
    rows = 1024

    def draw(candidate: Any) -> Any:
        return prepare(plan_of("impala_throughput", "CartPole-v1", None, None, values(candidate))).program()

    def values(candidate: Any) -> dict[str, Any]:
        return {"eval.enabled": False, "actors": candidate.actors, "learner_threads": candidate.learner_threads,
                "architecture.envs_per_actor": candidate.envs_per_actor, "architecture.one_place": candidate.one_place,
                "architecture.batch_slots": candidate.actors // candidate.learners, "learners": candidate.learners}

    best = calibrate(candidates(rows, len(os.sched_getaffinity(0))), draw, say, fork_server=bench.fork_server)[0].layout
    bench.note = f"calibration chose {best}"
    plain = {"architecture__envs_per_actor": rows // 2, "architecture__batch_slots": 2}
    return bench.run("impala_throughput", **plain), bench.run("impala_throughput", **values(best))


class PinnedPlaces(Stopwatch):
    """Gives every place a core of its own, in turn, as soon as it has a process."""

    def tick(self, control: Supervisor) -> None:
        cores = sorted(os.sched_getaffinity(0))
        for number, child in enumerate(control.children.values()):  # type: ignore[attr-defined]  it is the local runtime's
            if child.pid is not None and self._mark is None:
                for task in Path(f"/proc/{child.pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), {cores[number % len(cores)]})
        super().tick(control)


MEANS = (
    Means("slots written in place", "a private buffer, copied to the slot", "the slot is the buffer; gathered once", "unrolls/s",
          in_place),
    Means("publishing without stopping", "wait until an actor has taken the weights", "write and go on", "publications/s",
          publishing),
    Means("staging thread (not used on a CPU)", "gather, then learn", "gather the next batch while learning", "updates/s", staging),
    Means("channels-last, acting", "contiguous, 32 frames", "channels-last", "batches/s", convolving(32, False)),
    Means("channels-last, learning", "contiguous, 160 frames", "channels-last", "updates/s", convolving(160, True)),
    Means("fused optimiser", "torch.optim.Adam, foreach", "one kernel over one flat vector", "steps/s", optimising),
    Means("torch.inference_mode", "torch.no_grad", "torch.inference_mode", "batches/s", inferring),
    Means("one thread per actor", "a thread per core in each process", "one thread in each process", "frames/s", threads),
    Means("first-ready batching", "all actors wait for each update", "the learner takes what is ready", "env steps/s",
          lambda bench: (bench.run("impala", architecture__lockstep=True), bench.run("impala"))),
    Means("double-buffered environments", "1 group of 16 environments per actor", "2 groups of 8", "env steps/s",
          lambda bench: (bench.run("appo", architecture__groups=1, architecture__envs_per_actor=16, architecture__batch_slots=2),
                         bench.run("appo", architecture__groups=2, architecture__envs_per_actor=8, architecture__batch_slots=4))),
    Means("--actors auto", "2 actors of 512 environments", "what calibration finds", "env steps/s", layout),
    Means("CPU pinning", "the kernel decides", "each process on one core", "env steps/s",
          lambda bench: (bench.run("impala"), bench.run("impala", PinnedPlaces))),
)


def means_tables(results: Mapping[str, Any]) -> str:
    """Each means with its ratio; below 1 it costs more than it brings here."""
    rows = []
    for row in results["means"]:
        ratios = Spread.of([on / off for off, on in zip(row["off"], row["on"], strict=True) if off and on])
        shown = f"{ratios.median:.2f} ({ratios.low:.2f} - {ratios.high:.2f})" if ratios.count else "-"
        rows.append([row["name"], row["without"], row["with"] + (f": {row['note']}" if row["note"] else ""), row["unit"],
                     spread(row["off"]), spread(row["on"]), shown])
    head = ("means", "without", "with", "unit", "without it", "with it", "ratio")
    unmeasured = UNMEASURED if any(row["unit"] == "env steps/s" for row in results["means"]) else ""
    return "\n\n".join(part for part in (origins(results, results["means"]), markdown(head, rows), unmeasured) if part)


@contextmanager
def benches(seconds: float) -> Iterator[Bench]:
    torch.set_num_threads(1)
    with ForkServerClient(PRELOAD) as fork_server, Probes() as probes, tempfile.TemporaryDirectory(prefix="shoal-means-") as folder:
        yield Bench(fork_server, probes, Path(folder), seconds)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_for("means", __doc__, "means.json", only="means", rounds=5)
    parser.add_argument("--list", action="store_true", help="print their names and stop")
    given = parser.parse_args(words)
    chosen = [means for means in MEANS if given.only.lower() in means.name.lower()]
    if given.list:
        say("\n".join(f"{means.name}: {means.off} / {means.on}" for means in chosen))
        return 0
    began, results = time.monotonic(), machine.describe()
    results["means"] = []
    with benches(SECONDS) as bench:
        for means in chosen:
            bench.note = ""
            off, on = means.pair(bench)
            rates = [(off(), on()) for _ in range(given.rounds)]
            results["means"].append({"name": means.name, "without": means.off, "with": means.on, "unit": means.unit,
                                     "note": bench.note, "load": round(os.getloadavg()[0], 2),
                                     "off": [pair[0] for pair in rates], "on": [pair[1] for pair in rates]})
            say(f"{means.name}: " + ", ".join(f"{b / a:.2f}" for a, b in rates if a))
    results["seconds"] = round(time.monotonic() - began, 1)
    say("\n" + means_tables(results) + f"\n\nmeasured in {results['seconds']:.0f} s")
    if not given.no_save:
        results = with_earlier_rows(results, load("means.json"), "means")
        say(f"wrote {save('means.json', results)}; `python -m benchmarks.performance_page` puts it into docs/performance.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
