"""Pong on a machine with a GPU: whole programs against the environment alone, in turns of a few seconds.

    python -m benchmarks.gpu_pong [--turns 3] [--only seed,impala] [--set gpu.compile=true]
    python -m benchmarks.gpu_pong --switch core_each --only seed --out FILE

The cores of a machine that is shared with others may be a third faster a minute later. So a program is started once and then takes
turns with its limit: its processes are stopped (SIGSTOP) while ALE and the policy are measured alone on the same cores, and go on
afterwards. A share divides two rates of one turn; the median over the turns is reported. e is ALE alone, a process of one thread
per core, which was always the fastest layout; i is the policy on all cores.

    seed            infers and learns on the GPU, so its limit is e
    seed resnet     min(e, 1 / (1/i + 1/l)): i is the server's forward pass alone on the GPU, l the learner's update there, in the
                    program's batches and measured in the same turn
    impala          its actors infer on the cores that also step the environments: 1 / (1/e + 1/i)
    impala gpu      its actors infer on the GPU: e

A program is measured once its learner has made its first updates, in which kernels are chosen and graphs captured. With --switch a
program is compared with the same program without that switch of --gpu: two are started, and each is stopped while the other runs.
With --out a file keeps the rows that it has of other cases.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks.composed_limit.limits import Cell, CoreLayout, Probes, composed
from benchmarks.composed_limit.scenes import PONG, Workload
from benchmarks.results import with_earlier_rows
from benchmarks.switch_tables import switch_row
from shoal.bench import machine
from shoal.bench.rates import snapshots
from shoal.runtime.fork_server import PR_SET_PDEATHSIG, prctl

__all__ = ["main"]

CORES = len(os.sched_getaffinity(0))
ENV = Cell("env", 16, CoreLayout(CORES, 1), "raw:ale")
ACT = Cell("act", 64, CoreLayout(CORES, 1))
NATURE = {"net.torso": "nature"}
WIDE = {"device": "cuda", "values": "paper", "actors": CORES, "architecture.envs_per_actor": 16}  # not the values of size large
SEED = {**WIDE, "actors": max(1, CORES - 1), "architecture.groups": 2, "architecture.batch_slots": 8,
        "architecture.queue_slots": 32}  # a core is left for the server
IMPALA = {**NATURE, **WIDE, "architecture.batch_slots": 8}
CASES = (
    Workload("seed", PONG, "seed", {**NATURE, **SEED}),
    Workload("seed resnet", PONG, "seed", {**SEED, "net.torso": "impala"}),
    Workload("seed apart", PONG, "seed", {**NATURE, **SEED, "gpu.together": False}),
    Workload("seed together", PONG, "seed", {**NATURE, **SEED, "gpu.together": True}),
    Workload("seed resnet apart", PONG, "seed", {**SEED, "net.torso": "impala", "gpu.together": False}),
    Workload("seed resnet together", PONG, "seed", {**SEED, "net.torso": "impala", "gpu.together": True}),
    Workload("impala", PONG, "impala", IMPALA),
    Workload("impala gpu", PONG, "impala", {**IMPALA, "gpu.actors": True}),
)
ROWS = 256             # in a forward pass of i; half of all environments wait while the other half steps
WARM_SECONDS = 3.0
WARM_UPDATES = 20      # of a learner: by then its kernels are chosen and its graphs captured
USUAL = ["seed", "seed resnet", "impala", "impala gpu"]
BEGIN_SECONDS = 150.0  # for these
SETTLE_SECONDS = 0.7   # after it has been stopped
LONGEST_SECONDS = 600.0


class Held:
    """A program that runs in the background and can be stopped for a while."""

    def __init__(self, case: Workload, folder: str) -> None:
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

    def __init__(self, case: Workload) -> None:
        from benchmarks.learner_limit import BareLoop
        from shoal import algorithms, envs
        from shoal.algorithms import vtrace
        from shoal.device.placement import GpuConfig, Hardware
        from shoal.nets import NetConfig

        settings = {name.partition(".")[2]: value for name, value in case.overrides.items() if name.startswith("gpu.")}
        self._hardware = Hardware("cuda", GpuConfig(**settings))
        self._algorithm = algorithms.make(vtrace.Config(), envs.describe(PONG.env), NetConfig(torso="impala"), 16)
        self._bare = BareLoop(self._algorithm, self._hardware, case.overrides["architecture.batch_slots"])

    def rates(self, seconds: float) -> dict[str, float]:
        from benchmarks.learner_limit import inference

        return {"i": inference(self._algorithm, self._hardware, seconds, ROWS), "l": self._bare.rates(seconds)["bare"]}


def turn(case: Workload, held: Held, probes: Probes, gpu: Gpu | None, workload: Workload, seconds: float) -> dict[str, float]:
    """The limit and the program, one just after the other."""
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


def measured(case: Workload, probes: Probes, workload: Workload, turns: int, seconds: float) -> dict[str, Any]:
    gpu = Gpu(case) if case.overrides["net.torso"] == "impala" else None
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        held = Held(case, folder)
        try:
            held.begin(WARM_SECONDS)
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


def phases(roles: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Per role: shares of wall time by phase, with the waits."""
    shown = {}
    for role, times in roles.items():
        waits = {f"wait {wire}": share for wire, share in times.get("waits", {}).items()}
        shown[role] = {name: round(share, 3) for name, share in {**times.get("phases", {}), **waits}.items() if share > 0.005}
    return shown


def switched(case: Workload, switch: str, turns: int, seconds: float) -> dict[str, Any]:
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
                programs[on].begin(WARM_SECONDS)
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
    command = shlex.join(["python", "-m", "benchmarks.gpu_pong", *(sys.argv[1:] if words is None else words)])
    results = {**machine.describe(), "command": command}
    if options.switch:
        found = (switched(case, options.switch, options.turns, options.seconds) for case in cases)
        results["rows"] = [{**_told(row), "command": command} for row in found]
    else:
        results["cases"] = _against_limits(cases, options.turns, options.seconds)
    if options.out is not None:
        before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        results = with_earlier_rows(results, before, "rows") if options.switch else results
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(results, indent=1) + "\n")


def _switches() -> list[str]:
    from shoal.device.placement import GpuConfig

    return [field.name for field in fields(GpuConfig)]


def _against_limits(cases: Sequence[Workload], turns: int, seconds: float) -> list[dict[str, Any]]:
    impala = next(case for case in CASES if case.name == "impala")
    workload = replace(impala, overrides={**impala.overrides, "device": "cpu"})
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
