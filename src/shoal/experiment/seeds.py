"""Several runs that differ by their seed: `shoal train PRESET ENV --seeds 5`, `shoal.train(..., seeds=5)`.

    runs/<time>-ppo-CartPole-v1-0-4/    seeds.json: what came out, with means and intervals
        seed-0/ seed-1/ ...             run directories like any other
        seed-0.log ...                  what the runs said, where they went on side by side

`shoal plot` draws the mean of such a folder with a band.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from shoal.errors import ConfigError, RoleFailed
from shoal.experiment.checkpoints import write_json
from shoal.experiment.config import Plan
from shoal.experiment.loaded_run import Run
from shoal.experiment.prepare import prepare
from shoal.experiment.run_card import seeds_card
from shoal.experiment.rundir import SEEDS, RunDir, default_directory
from shoal.telemetry.callbacks import Callback
from shoal.telemetry.curves import student_t
from shoal.telemetry.outputs import jsonable

if TYPE_CHECKING:
    import torch

    from shoal.experiment.trained_policy import TrainedPolicy

__all__ = ["SeedOptions", "SeedRuns", "train_seeds"]

Launch = Callable[..., Run]
MEASURED = ("eval_return", "train_return", "env_steps", "learner_steps", "seconds", "env_steps_per_second")
LOOK_SECONDS = 0.2
MOST_SEEDS = 10_000
CHILD = """
import signal, sys
from shoal.runtime.cleanup import PR_SET_PDEATHSIG, prctl
prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
import cloudpickle
from shoal.experiment.run import launch
plan, callbacks = cloudpickle.load(sys.stdin.buffer)
launch(plan, callbacks=callbacks)
"""


@dataclass(frozen=True)
class SeedOptions:
    """How many seeds, and how many of them at the same time."""

    count: int
    at_once: int = 1

    def __post_init__(self) -> None:
        for name, value in (("--seeds", self.count), ("--seeds-at-once", self.at_once)):
            if not isinstance(value, int) or not 1 <= value <= MOST_SEEDS:
                raise ConfigError(f"{name} is {value}; it must be a whole number from 1 to {MOST_SEEDS}")


@dataclass
class SeedRuns:
    """The runs of several seeds. It acts with the best of them."""

    directory: Path
    runs: list[Run]
    summary: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Any:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        return f"<{len(self.runs)} runs in {self.directory}: {sentence(self.summary)}>"

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        plan = self.runs[0].prepared.plan if self.runs else None
        title = f"{plan.title} on {plan.env.name}, {len(self.runs)} seeds" if plan is not None else "no run has finished"
        return seeds_card(title, self.directory, self.summary, [run.directory for run in self.runs])

    @property
    def best(self) -> Run:
        """The run whose policy was evaluated best."""
        return max(self.runs, key=lambda run: -math.inf if run.summary.get("eval_return") is None else run.summary["eval_return"])

    @property
    def policy(self) -> TrainedPolicy:
        return self.best.policy

    @property
    def module(self) -> torch.nn.Module:
        return self.best.module


def train_seeds(launch: Launch, plan: Plan, options: SeedOptions, stream: IO[str], callbacks: Sequence[Callback] = ()) -> SeedRuns:
    """Train with as many seeds as `options` says, from the plan's own on, one after another or some side by side."""
    first = plan.experiment.seed
    seeds = range(first, first + options.count)
    if options.at_once > 1 and any(not callback.own_process for callback in callbacks):
        raise ConfigError("callbacks follow runs of this process, and seeds that train at the same time have processes of their "
                          "own; leave out seeds_at_once, or say own_process = True in the callback's class")
    given = plan.experiment.run_dir
    folder = Path(given) if given else default_directory(plan.folder_name, plan.env.name, f"{first}-{seeds[-1]}")
    if given:
        RunDir.check_free(folder)
    plans = {seed: replace(plan, experiment=replace(plan.experiment, seed=seed, run_dir=str(folder / f"seed-{seed}")))
             for seed in seeds}
    prepare(plans[first])  # a mistake is told before a folder is made
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder, plan, seeds, {})
    if options.at_once > 1:
        runs = _side_by_side(plans, callbacks, folder, options.at_once, stream)
    else:
        runs = []
        for number, seed in enumerate(seeds):
            stream.write(f"seed {seed} ({number + 1} of {options.count})\n" if plan.experiment.console.mode != "none" else "")
            runs.append(launch(plans[seed], stream=stream, callbacks=callbacks))
            if runs[-1].summary.get("stopped_by") == "interrupt":
                break
    found = SeedRuns(folder, runs, summary_of([run.summary for run in runs]))
    _save(folder, plan, seeds, found.summary)
    return found


def _save(folder: Path, plan: Plan, seeds: range, summary: Mapping[str, Any]) -> None:
    about = {"preset": plan.names.preset, "algorithm": plan.names.algorithm, "architecture": plan.names.architecture,
             "env": plan.env.name, "seeds": list(seeds)}
    write_json(folder / SEEDS, jsonable({**about, **summary}))


def summary_of(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By metric the mean over seeds, its 95 % interval by Student's t (none for one seed), and every seed's value."""
    found: dict[str, Any] = {"finished": len(summaries)}
    for name in MEASURED:
        values = [float(summary[name]) for summary in summaries if summary.get(name) is not None]
        if values:
            found[name] = {"mean": float(np.mean(values)), **_interval(values), "values": values}
    return found


def _interval(values: Sequence[float]) -> dict[str, float | None]:
    if len(values) < 2:
        return {"low": None, "high": None}
    wide = float(np.std(values, ddof=1)) * student_t(len(values) - 1) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return {"low": mean - wide, "high": mean + wide}


def sentence(summary: Mapping[str, Any]) -> str:
    """The returns of all seeds in words."""
    found = summary.get("eval_return") or summary.get("train_return")
    if not found:
        return f"{summary.get('finished', 0)} seeds finished, none evaluated"
    around = "" if found["low"] is None else f" (95 % interval {found['low']:,.2f} to {found['high']:,.2f})"
    each = ", ".join(f"{value:,.1f}" for value in found["values"])
    return f"return {found['mean']:,.2f}{around} over {len(found['values'])} seeds: {each}"


# ---------------------------------------------------------------------------------------------- side by side
def _side_by_side(plans: Mapping[int, Plan], callbacks: Sequence[Callback], folder: Path, at_once: int,
                  stream: IO[str]) -> list[Run]:
    """Every seed in a process of its own; what it says goes to a log. Ctrl-C reaches all of them: each saves and ends."""
    waiting, running, done = dict(plans), {}, {}  # type: dict[int, Plan], dict[int, subprocess.Popen[bytes]], dict[int, int]
    stopped = False
    try:
        while running or (waiting and not stopped):
            while waiting and len(running) < at_once and not stopped:
                seed = next(iter(waiting))
                running[seed] = _start(waiting.pop(seed), callbacks, folder / f"seed-{seed}.log")
                stream.write(f"seed {seed} begins; follow it with `shoal watch {folder / f'seed-{seed}'}`\n")
                stream.flush()
            try:
                time.sleep(LOOK_SECONDS)
            except KeyboardInterrupt:
                stopped = True
            for seed in [seed for seed, process in running.items() if process.poll() is not None]:
                done[seed] = running.pop(seed).returncode
                _told(seed, done[seed], folder, stream)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return [Run(folder / f"seed-{seed}", RunDir(folder / f"seed-{seed}").summary(), prepare(plan)) for seed, plan in plans.items()
            if done.get(seed) == 0]


def _start(plan: Plan, callbacks: Sequence[Callback], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=file, stderr=file,
                                   env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)})
    assert process.stdin is not None
    process.stdin.write(cloudpickle.dumps((plan, list(callbacks))))
    process.stdin.close()
    return process


def _told(seed: int, code: int, folder: Path, stream: IO[str]) -> None:
    if code != 0:
        log = folder / f"seed-{seed}.log"
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise RoleFailed(f"seed {seed} failed: {' '.join(tail)}; see {log}")
    summary = RunDir(folder / f"seed-{seed}").summary()
    value = summary.get("eval_return")
    stream.write(f"seed {seed} is done: {summary.get('env_steps', 0):,} env steps"
                 + (f", return {value:,.2f}" if value is not None else "") + "\n")
    stream.flush()
