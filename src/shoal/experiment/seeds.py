"""Several runs that differ by their seed: `shoal train PRESET ENV --seeds 5`, `shoal.train(..., seeds=5)`.

    runs/<time>-ppo-CartPole-v1-0-4/    seeds.json: what came out, with means and intervals
        seed-0/ seed-1/ ...             run directories like any other
        seed-0.log ...                  what the runs said, where they went on side by side

`shoal plot` draws the mean of such a folder with a band, `shoal eval` evaluates every seed, `shoal watch` shows how far they are,
`shoal play` and `shoal.load` take the best. `shoal resume` continues the seeds that have not reached their goal, and begins those
that never began.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from shoal.errors import CheckpointError, ConfigError, RoleFailed
from shoal.experiment.checkpoints import read_json, write_json
from shoal.experiment.config import Plan
from shoal.experiment.loaded_run import Run
from shoal.experiment.lock import alone
from shoal.experiment.parse import take_option
from shoal.experiment.prepare import plan_from_json, plan_to_json, prepare
from shoal.experiment.references import check_trust, modules_of, outside
from shoal.experiment.resuming import FINISHED, GOALS, NothingLeft, resume_plan, with_new_values
from shoal.experiment.run_card import seeds_card
from shoal.experiment.rundir import SEEDS, RunDir, default_directory, seed_runs
from shoal.telemetry.callbacks import Callback
from shoal.telemetry.console import counted
from shoal.telemetry.curves import student_t
from shoal.telemetry.outputs import jsonable

if TYPE_CHECKING:
    import torch

    from shoal.experiment.trained_policy import TrainedPolicy

__all__ = ["SeedGroup", "SeedOptions", "SeedRuns", "resume_seeds", "resume_words", "train_seeds"]

Launch = Callable[..., Run]
MEASURED = ("eval_return", "eval_episodes", "train_return", "env_steps", "learner_steps", "seconds", "env_steps_per_second")
LOOK_SECONDS = 0.2
MOST_SEEDS = 10_000
CHILD = """
import signal, sys
from shoal.runtime.cleanup import PR_SET_PDEATHSIG, prctl
prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
import cloudpickle
from shoal.experiment.run import launch
plan, rundir, callbacks = cloudpickle.load(sys.stdin.buffer)
launch(plan, rundir, callbacks=callbacks)
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

    @classmethod
    def taken(cls, arguments: list[str]) -> SeedOptions | None:
        """--seeds N and --seeds-at-once K, taken out of a command's arguments; None where they are not there."""
        given: dict[str, int] = {}
        for name in ("--seeds", "--seeds-at-once"):
            word = take_option(arguments, name, "a whole number")
            if word is not None and not word.isdigit():
                raise ConfigError(f"{name} {word} is not possible: give a whole number")
            if word is not None:
                given[name] = int(word)
        if "--seeds" in given:
            return cls(given["--seeds"], given.get("--seeds-at-once", 1))
        if given:
            raise ConfigError(f"--seeds-at-once {given['--seeds-at-once']} says how many seeds train at the same time; give "
                              "--seeds N too")
        return None

    def words(self) -> str:
        """As they are given on the command line."""
        return f"--seeds {self.count}" + (f" --seeds-at-once {self.at_once}" if self.at_once > 1 else "")


@dataclass(frozen=True)
class SeedGroup:
    """The folder of several seeds, and what they train: all that resuming needs."""

    folder: Path
    plan: Plan
    seeds: tuple[int, ...]
    at_once: int = 1

    @classmethod
    def open(cls, folder: Path, env: Any = None, trust: bool = False) -> SeedGroup:
        """As its seeds.json says; `env` replaces the environment."""
        config, about = cls.config(folder), read_json(folder / SEEDS)
        if env is None:
            check_trust(modules_of(config), trust)
        plan = replace(plan_from_json(config, str(folder / SEEDS), env), trust=trust)
        return cls(folder, plan, tuple(about["seeds"]), about["at_once"])

    @staticmethod
    def config(folder: Path) -> dict[str, Any]:
        """The values of all its runs but their seed; CheckpointError where seeds.json does not say them."""
        about = read_json(folder / SEEDS)
        config, seeds, at_once = (about.get(name) for name in ("config", "seeds", "at_once"))
        if not isinstance(config, dict) or not isinstance(seeds, list) or not seeds or \
                any(not isinstance(number, int) for number in (*seeds, at_once)):
            inside = [run.path for run in seed_runs(folder)]
            raise CheckpointError(f"{folder / SEEDS} does not say how its seeds were trained, so they cannot be resumed together; "
                                  f"resume one by one: shoal resume {inside[0] if inside else folder / 'seed-0'}")
        return RunDir.checked(config, folder / SEEDS)

    def save(self, summary: Mapping[str, Any]) -> None:
        names = self.plan.names
        about = {"preset": names.preset, "algorithm": names.algorithm, "architecture": names.architecture,
                 "env": self.plan.env.name, "seeds": list(self.seeds), "at_once": self.at_once}
        write_json(self.folder / SEEDS, {**jsonable({**about, **summary}), "config": plan_to_json(self.plan)})

    def plan_of(self, seed: int) -> Plan:
        experiment = replace(self.plan.experiment, seed=seed, run_dir=str(self.rundir(seed).path))
        return replace(self.plan, experiment=experiment)

    def rundir(self, seed: int) -> RunDir:
        return RunDir(self.folder / f"seed-{seed}")

    def summary(self, seed: int) -> dict[str, Any]:
        return self.rundir(seed).summary()

    @property
    def begun(self) -> bool:
        return any(self.rundir(seed).config_file.is_file() for seed in self.seeds)

    def remove(self) -> None:
        """Take back a folder in which no run has begun."""
        RunDir(self.folder, (self.folder,)).remove()


@dataclass(frozen=True)
class SeedPart:
    """What is left to do for one seed."""

    plan: Plan
    rundir: RunDir | None = None
    """The run to resume; none: it begins."""


@dataclass
class SeedRuns:
    """The runs of several seeds. It acts with the best of them."""

    directory: Path
    runs: list[Run]
    summary: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    """Whether Ctrl-C has ended them; `shoal resume` continues with the folder."""

    def __iter__(self) -> Any:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        return f"<{counted(len(self.runs), 'run')} in {self.directory}: {sentence(self.summary)}>"

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        plan = self.runs[0].prepared.plan if self.runs else None
        title = f"{plan.title} on {plan.env.name}, {counted(len(self.runs), 'seed')}" if plan is not None else "no run has finished"
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
    given = plan.experiment.run_dir
    folder = Path(given) if given else default_directory(plan.folder_name, plan.env.name, f"{first}-{seeds[-1]}")
    group = SeedGroup(folder, plan, tuple(seeds), options.at_once)
    _check_callbacks(group, callbacks)
    if given:
        RunDir.check_free(folder)
    prepare(group.plan_of(first))  # a mistake is told before a folder is made
    folder.mkdir(parents=True, exist_ok=True)
    group.save({})
    return _train_all(launch, group, {seed: SeedPart(group.plan_of(seed)) for seed in seeds}, stream, callbacks)


def resume_seeds(launch: Launch, group: SeedGroup, overrides: Mapping[str, Any], env: Any, trust: bool, stream: IO[str],
                 callbacks: Sequence[Callback] = ()) -> SeedRuns:
    """Continue seeds that have not reached their goal, and begin those that never began; new goals are those of all."""
    _check_callbacks(group, callbacks)
    if overrides.get("offline") is False:
        raise ConfigError(f"{group.folder} holds runs of several seeds; resume each of them with --online")
    group = replace(group, plan=replace(group.plan, experiment=with_new_values(group.plan.experiment, overrides)))
    todo: dict[int, SeedPart] = {}
    for seed in group.seeds:
        rundir = group.rundir(seed)
        if not any(rundir.path.glob("checkpoints/[!.]*")):
            if done := group.summary(seed).get("env_steps", 0):
                raise ConfigError(f"{rundir.path} has done {done:,} env steps and has no whole checkpoint to resume from; to begin "
                                  "this seed anew, remove that folder")
            todo[seed] = SeedPart(group.plan_of(seed))
        elif group.summary(seed).get("stopped_by") not in FINISHED or overrides.keys() & set(GOALS):
            with contextlib.suppress(NothingLeft):
                todo[seed] = SeedPart(resume_plan(rundir, overrides, env, trust), rundir)
    if not todo:
        raise NothingLeft(f"all {len(group.seeds)} seeds of {group.folder} have reached their goal; to continue, give a larger "
                          "--max-env-steps, --max-seconds or a higher --until-return")
    for seed, part in todo.items():
        if part.rundir is None and group.rundir(seed).path.exists():  # killed before its first checkpoint: it begins anew
            with alone(group.rundir(seed).path, "it ends"):
                group.rundir(seed).remove()
    group.save({})
    return _train_all(launch, group, todo, stream, callbacks)


def resume_words(folder: Path) -> str:
    """What continues with the seeds of a folder."""
    trusted = " --trust" if outside(modules_of(SeedGroup.config(folder))) else ""
    return f"shoal resume {shlex.quote(str(folder))}{trusted}"


def _check_callbacks(group: SeedGroup, callbacks: Sequence[Callback]) -> None:
    if group.at_once > 1 and any(not callback.own_process for callback in callbacks):
        raise ConfigError("callbacks follow runs of this process, and seeds that train at the same time have processes of their "
                          "own; leave out seeds_at_once, or say own_process = True in the callback's class")


def _train_all(launch: Launch, group: SeedGroup, todo: Mapping[int, SeedPart], stream: IO[str],
               callbacks: Sequence[Callback]) -> SeedRuns:
    """Train these seeds, and write down what came out of all of them."""
    with alone(group.folder):
        try:
            if group.at_once > 1:
                trained, interrupted = _side_by_side(group, todo, callbacks, stream)
            else:
                trained, interrupted = _one_by_one(launch, group, todo, callbacks, stream)
        except Exception:
            if group.begun and group.plan.experiment.console.mode != "none":
                stream.write(f"`{resume_words(group.folder)}` continues with the seeds that are not done\n")
                stream.flush()
            raise
        runs = [trained.get(seed) or Run(group.rundir(seed).path, group.summary(seed), prepare(group.plan_of(seed)))
                for seed in group.seeds if seed in trained or group.summary(seed)]
        found = SeedRuns(group.folder, runs, summary_of([run.summary for run in runs]), interrupted)
        group.save(found.summary)
    return found


def _one_by_one(launch: Launch, group: SeedGroup, todo: Mapping[int, SeedPart], callbacks: Sequence[Callback],
                stream: IO[str]) -> tuple[dict[int, Run], bool]:
    """The runs, and whether Ctrl-C has ended one of them."""
    trained: dict[int, Run] = {}
    for seed, part in todo.items():
        how = " is resumed" if part.rundir is not None else ""
        where = f"seed {seed} ({group.seeds.index(seed) + 1} of {len(group.seeds)}){how}\n"
        stream.write(where if part.plan.experiment.console.mode != "none" else "")
        try:
            trained[seed] = launch(part.plan, part.rundir, stream=stream, callbacks=callbacks)
        except KeyboardInterrupt:  # before it has begun
            if group.begun:
                return trained, True
            group.remove()
            raise
        if trained[seed].summary.get("stopped_by") == "interrupt":
            return trained, True
    return trained, False


def summary_of(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By metric the mean over seeds, its 95 % interval by Student's t (none for one seed), and every seed's value."""
    found: dict[str, Any] = {"finished": sum(summary.get("stopped_by") in FINISHED for summary in summaries)}
    for name in MEASURED:
        of = "eval_return" if name == "eval_episodes" else name  # episodes are those of an evaluated policy
        values = [float(summary[name]) for summary in summaries if None not in (summary.get(name), summary.get(of))]
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
    count, episodes = len(found["values"]), summary.get("eval_episodes", {}).get("values", ())
    plural = "s" * (list(episodes) != [1])
    rest = f", of {', '.join(f'{number:,.0f}' for number in episodes)} episode{plural}" if len(episodes) == count else ""
    return f"return {found['mean']:,.2f}{around} over {counted(count, 'seed')}: {each}{rest}"


# ---------------------------------------------------------------------------------------------- side by side
def _side_by_side(group: SeedGroup, todo: Mapping[int, SeedPart], callbacks: Sequence[Callback],
                  stream: IO[str]) -> tuple[dict[int, Run], bool]:
    """Every seed in a process of its own; what it says goes to a log. Ctrl-C reaches all of them: each saves and ends."""
    folder = group.folder
    waiting, running, done = dict(todo), {}, []  # type: dict[int, SeedPart], dict[int, subprocess.Popen[bytes]], list[int]
    stopped = False
    try:
        while running or (waiting and not stopped):
            while waiting and len(running) < group.at_once and not stopped:
                seed = next(iter(waiting))
                running[seed] = _start(waiting.pop(seed), callbacks, folder / f"seed-{seed}.log")
                stream.write(f"seed {seed} begins; follow it with `shoal watch {folder / f'seed-{seed}'}`\n")
                stream.flush()
            try:
                time.sleep(LOOK_SECONDS)
                for seed in [seed for seed, process in running.items() if process.poll() is not None]:
                    done.append(seed)
                    _told(seed, running.pop(seed).returncode, folder, stream, stopped)
            except KeyboardInterrupt:
                stopped = True
        if stopped and not group.begun:
            group.remove()
            raise KeyboardInterrupt
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return {seed: Run(group.rundir(seed).path, group.summary(seed), prepare(todo[seed].plan)) for seed in done
            if group.summary(seed)}, stopped


def _start(part: SeedPart, callbacks: Sequence[Callback], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=file, stderr=file,
                                   env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)})
    assert process.stdin is not None
    process.stdin.write(cloudpickle.dumps((part.plan, part.rundir, list(callbacks))))
    process.stdin.close()
    return process


def _told(seed: int, code: int, folder: Path, stream: IO[str], stopped: bool) -> None:
    if code != 0 and stopped:  # before it had begun
        return
    if code != 0:
        log = folder / f"seed-{seed}.log"
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise RoleFailed(f"seed {seed} failed: {' '.join(tail)}; see {log}")
    summary = RunDir(folder / f"seed-{seed}").summary()
    value = summary.get("eval_return")
    stream.write(f"seed {seed} is done: {summary.get('env_steps', 0):,} env steps"
                 + (f", return {value:,.2f}" if value is not None else "") + "\n")
    stream.flush()
