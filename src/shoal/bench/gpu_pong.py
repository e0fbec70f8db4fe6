"""Pong on a machine with a GPU: whole programs against the environment alone, in turns of a few seconds.

    python -m shoal.bench.gpu_pong [--turns 3] [--only seed,impala] [--set gpu.compile=true]
    python -m shoal.bench.gpu_pong --switch core_each --only seed --out FILE

A machine whose cores are shared with others may be a third faster a minute later. So a program is started once and then takes
turns with its yardsticks: its processes are stopped (SIGSTOP) while ALE and the policy are measured alone on the same cores, and
go on afterwards; a share divides two rates of one turn, and the median over the turns is reported. e is ALE alone, a process of
one thread per core, which of the layouts tried was always the fastest; i is the policy on all cores. seed infers and learns on
the GPU, so its yardstick is e; with the ResNet it is the smaller of e and 1 / (1/i + 1/l), where i is what the server's forward
pass makes alone on the GPU and l what the learner's update makes there, in the program's batches and measured in the same turn.
impala's actors infer on the cores that also step the environments, so its yardstick is 1 / (1/e + 1/i); where they infer on the GPU
it is e again. A program is measured once its learner has made its first updates, in which kernels are chosen and graphs captured.

With --switch the yardstick of a program is the same program without that switch of --gpu: two are started, and each is stopped
while the other runs. The ratio of their env steps/s is taken turn by turn; the median is reported. Prints one JSON object; with
--out it goes to a file too, beside the rows of other switches and cases that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shoal.bench import machine
from shoal.bench.cases import NATURE, PONG, Case
from shoal.bench.limits import Cell, Layout, Probes, composed
from shoal.bench.measure import phases, snapshots
from shoal.bench.switch_tables import switch_row
from shoal.runtime.forkserver import PR_SET_PDEATHSIG, prctl

__all__ = ["main"]

CORES = len(os.sched_getaffinity(0))
ENV = Cell("env", 16, Layout(CORES, 1), "raw:ale")
ACT = Cell("act", 64, Layout(CORES, 1))
WIDE = {"device": "cuda", "actors": CORES, "architecture.envs_per_actor": 16}
SEED = {**WIDE, "actors": max(1, CORES - 1), "architecture.groups": 2, "architecture.batch_slots": 8,
        "architecture.queue_slots": 32}  # a core is left for the server
IMPALA = {**NATURE, **WIDE, "architecture.batch_slots": 8}
CASES = (
    Case("seed", PONG, "seed", {**NATURE, **SEED}),
    Case("seed resnet", PONG, "seed", {**SEED, "net.torso": "impala"}),
    Case("seed apart", PONG, "seed", {**NATURE, **SEED, "gpu.together": False}),
    Case("seed together", PONG, "seed", {**NATURE, **SEED, "gpu.together": True}),
    Case("seed resnet apart", PONG, "seed", {**SEED, "net.torso": "impala", "gpu.together": False}),
    Case("seed resnet together", PONG, "seed", {**SEED, "net.torso": "impala", "gpu.together": True}),
    Case("impala", PONG, "impala", IMPALA),
    Case("impala gpu", PONG, "impala", {**IMPALA, "gpu.actors": True}),
)
ROWS = 256             # in a forward pass of i; half of all environments wait while the other half steps
WARM_UPDATES = 20      # of a learner: by then its kernels are chosen and its graphs captured
USUAL = ["seed", "seed resnet", "impala", "impala gpu"]
BEGIN_SECONDS = 150.0  # for these
SETTLE_SECONDS = 0.7   # after it has been stopped
LONGEST_SECONDS = 600.0


class Held:
    """A program that runs in the background and can be stopped for a while."""

    def __init__(self, case: Case, folder: str) -> None:
        self._run = Path(folder) / "run"
        patient = {"faults.hang_seconds": LONGEST_SECONDS}  # who was stopped does not hang
        arguments = case.arguments(max_seconds=LONGEST_SECONDS, run_dir=str(self._run), **patient)
        self._said: str | None = None
        self._process = subprocess.Popen([sys.executable, "-m", "shoal.bench.training", json.dumps(arguments)],
                                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                         preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL))  # it never outlives us

    def snapshots(self) -> list[dict[str, Any]]:
        return snapshots(self._run / "metrics.jsonl")

    def begin(self, warm_seconds: float) -> None:
        """Until the learner is warm and all actors have been at work for a while: they begin some seconds apart."""
        deadline = time.monotonic() + BEGIN_SECONDS
        while not any(shot["learner_steps"] >= WARM_UPDATES for shot in self.snapshots()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {WARM_UPDATES} updates: {self.end()[-500:]}")
            time.sleep(0.2)
        time.sleep(warm_seconds)

    def rate(self, seconds: float) -> float:
        """Env steps/s from now on."""
        time.sleep(SETTLE_SECONDS)
        began = time.time()
        time.sleep(seconds + 1.0)  # it is looked at once a second
        shots = [shot for shot in self.snapshots() if shot["time"] >= began]
        if len(shots) < 2:
            raise RuntimeError(f"the program wrote {len(shots)} snapshots in {seconds + 1} s; give more --seconds")
        return float((shots[-1]["env_steps"] - shots[0]["env_steps"]) / (shots[-1]["time"] - shots[0]["time"]))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    def stop(self) -> None:
        self._tell(signal.SIGSTOP)

    def go_on(self) -> None:
        self._tell(signal.SIGCONT)

    def _tell(self, word: signal.Signals) -> None:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            for process in (top, *top.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(word)

    def end(self) -> str:
        """End it, and with it all that it started; what it said."""
        if self._said is None:
            self.go_on()  # who is stopped does not hear that it is to end
            self._process.kill()
            self._said = self._process.communicate()[1]
        return self._said


class Gpu:
    """The server's forward pass and the learner's update of a case, each alone on the GPU."""

    def __init__(self, case: Case) -> None:
        from shoal import algorithms, envs
        from shoal.algorithms import vtrace
        from shoal.algorithms.hardware import GpuConfig, Hardware
        from shoal.bench.learner_limit import Bare
        from shoal.nets import NetConfig

        settings = {name.partition(".")[2]: value for name, value in case.overrides.items() if name.startswith("gpu.")}
        self._hardware = Hardware("cuda", GpuConfig(**settings))
        self._algorithm = algorithms.make(vtrace.Config(), envs.describe(PONG.env), NetConfig(torso="impala"), 16)
        self._bare = Bare(self._algorithm, self._hardware, case.overrides["architecture.batch_slots"])

    def rates(self, seconds: float) -> dict[str, float]:
        from shoal.bench.learner_limit import inference

        return {"i": inference(self._algorithm, self._hardware, seconds, ROWS), "l": self._bare.rates(seconds)["bare"]}


def turn(case: Case, held: Held, probes: Probes, gpu: Gpu | None, workload: str, seconds: float) -> dict[str, float]:
    """The yardstick and the program, one just after the other."""
    with held.stopped():
        row = {"e": probes.rate(workload, ENV, seconds / 2)}
        if case.name == "impala":
            row["i"] = probes.rate(workload, ACT, seconds / 2)
        elif gpu is not None:
            row |= gpu.rates(seconds / 4)
    row["env_steps_per_second"] = held.rate(seconds)
    row["limit"] = composed(row["e"], row.get("i", math.inf), row.get("l", math.inf), gpu=gpu is not None)
    row["share"] = row["env_steps_per_second"] / row["limit"]
    return {name: round(value, 3 if name == "share" else None) for name, value in row.items()}


def measured(case: Case, probes: Probes, workload: str, turns: int, seconds: float) -> dict[str, Any]:
    gpu = Gpu(case) if case.overrides["net.torso"] == "impala" else None
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        held = Held(case, folder)
        try:
            held.begin(PONG.warm_seconds)
            first = held.snapshots()[-1]
            rows = [turn(case, held, probes, gpu, workload, seconds) for _ in range(turns)]
        except RuntimeError as error:
            return {"case": case.name, "error": str(error)}
        finally:
            held.end()
        last = held.snapshots()[-1]
    kept = {name: last.get(name) for name in ("learner_idle", "policy_lag", "data_age_seconds", "inference_batch", "verdict")}
    return {"case": case.name, "share": statistics.median(row["share"] for row in rows), "turns": rows, **kept,
            "phases": phases(last.get("roles") or {}), "begin_seconds": first["seconds"]}


def switched(case: Case, switch: str, turns: int, seconds: float) -> dict[str, Any]:
    """Two programs of a case, with a switch of --gpu and without it, of which one stands still while the other runs."""
    began, found = time.perf_counter(), {True: [], False: []}  # type: float, dict[bool, list[float]]
    torso, programs = case.overrides["net.torso"], {}  # type: str, dict[bool, Held]
    mark = {"name": f"{switch}, {case.name}", "case": case.name}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-"))
        try:
            for on in found:
                side = replace(case, overrides={**case.overrides, f"gpu.{switch}": on})
                programs[on] = Held(side, f"{folder}/{'on' if on else 'off'}")
                stack.callback(programs[on].end)
                programs[on].begin(case.scene.warm_seconds)
                programs[on].stop()
            for _ in range(turns):
                for on, held in programs.items():
                    held.go_on()
                    found[on].append(held.rate(seconds))
                    held.stop()
        except RuntimeError as error:
            return {**mark, "torso": torso, "switch": switch, "what": "program", "missing": f"failed: {error}"}
    return {**mark, **switch_row(torso, switch, "program", found[True], found[False], time.perf_counter() - began)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="", metavar="CASES",
                        help=f"which, with commas: {', '.join(case.name for case in CASES)}; without it {', '.join(USUAL)}")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="further settings of all cases")
    parser.add_argument("--switch", default="", metavar="NAME", help="of --gpu: each program with it and without it, in turns")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    chosen = options.only.split(",") if options.only else USUAL
    unknown = [name for name in chosen if name not in {case.name for case in CASES}]
    if unknown:
        parser.error(f"--only has {unknown[0]!r}; there are {', '.join(case.name for case in CASES)}")
    known = _switches() if options.switch else []
    if options.switch and options.switch not in known:
        parser.error(f"--switch has {options.switch!r}; there are {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is stopped must go on, or it could not end
    more = {name: json.loads(value) for name, _, value in (word.partition("=") for word in options.set)}
    cases = [replace(case, overrides={**case.overrides, **more}) for case in CASES if case.name in chosen]
    command = shlex.join(["python", "-m", "shoal.bench.gpu_pong", *(sys.argv[1:] if words is None else words)])
    results = {**machine.describe(), "command": command}
    if options.switch:
        found = (switched(case, options.switch, options.turns, options.seconds) for case in cases)
        results["rows"] = [{**_told(row), "command": command} for row in found]
    else:
        results["cases"] = _against_limits(cases, options.turns, options.seconds)
    if options.out is not None:
        before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        results = machine.with_earlier_rows(results, before, "rows") if options.switch else results
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(results, indent=1) + "\n")


def _switches() -> list[str]:
    from shoal.algorithms.hardware import GpuConfig

    return [field.name for field in fields(GpuConfig)]


def _against_limits(cases: Sequence[Case], turns: int, seconds: float) -> list[dict[str, Any]]:
    workload = json.dumps({**next(case for case in CASES if case.name == "impala").arguments(), "device": "cpu"})
    with Probes() as probes:
        for cell in (ENV, ACT):
            probes.rate(workload, cell, 0.5)  # they make their environments
        return [_told(measured(case, probes, workload, turns, seconds)) for case in cases]


def _told(found: dict[str, Any]) -> dict[str, Any]:
    """What is found is shown at once."""
    sys.stderr.write(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main()
