"""`shoal.train`, `shoal.resume`, `shoal.load`: a run, from Python and for the command line.

    run = shoal.train("impala", "CartPole-v1", actors=2, until_return=475)
    run.summary["eval_return"], run.directory
    action = run.policy.act(observation)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

from shoal.coordination.autoscale import Autoscaler, Rule
from shoal.envs.factory import must_be_compiled
from shoal.envs.recorded_env import RecordedEnv
from shoal.errors import ConfigError
from shoal.experiment.auto_layout import laid_out
from shoal.experiment.callback_process import callback_output
from shoal.experiment.checkpoints import SavedSlices, saved_slices
from shoal.experiment.components import Components
from shoal.experiment.config import Experiment, Names, Plan, default_plan, offline_data
from shoal.experiment.config_file import read_config
from shoal.experiment.initial_weights import initial_weights
from shoal.experiment.loaded_run import Run, compute_threads
from shoal.experiment.lock import alone
from shoal.experiment.machine_checks import drawn
from shoal.experiment.policies import absolute, policies_given
from shoal.experiment.prepare import Prepared, plan_from_json, plan_to_json, prepare
from shoal.experiment.presets import load_preset
from shoal.experiment.references import EnvRef, check_trust, modules_of
from shoal.experiment.resuming import base_of, resume_plan
from shoal.experiment.run_control import RunControl
from shoal.experiment.rundir import SEEDS, RunDir, default_directory, run_or_best_seed
from shoal.experiment.seeds import SeedGroup, SeedOptions, SeedRuns, resume_seeds, train_seeds
from shoal.experiment.session import Base, Goals, RunSession
from shoal.experiment.sizing import kept_to, sizing_lines
from shoal.experiment.values import with_values
from shoal.learning import Algorithm
from shoal.offline import found_at
from shoal.options import flag
from shoal.telemetry.callbacks import Callback, checked
from shoal.telemetry.console import console, counted
from shoal.telemetry.outputs import JsonLines, Output, say
from shoal.telemetry.tensorboard import TensorBoard

if TYPE_CHECKING:
    from shoal.runtime import Program

__all__ = ["Run", "launch", "load", "plan_of", "resume", "train"]

IMPORT_SECONDS = 0.05  # between two looks whether an import is over


@overload
def train(preset: str | None = None, env: Any = None, *, seeds: int, **more: Any) -> SeedRuns: ...


@overload
def train(preset: str | None = None, env: Any = None, *, seeds: None = None, **more: Any) -> Run: ...


def train(preset: str | None = None, env: Any = None, *, algorithm: Any = None, architecture: Any = None,
          data: str | Path | None = None, config: str | Path | None = None, callbacks: Sequence[Callback] = (),
          seeds: int | None = None, seeds_at_once: int = 1, trust: bool = False, **overrides: Any) -> Run | SeedRuns:
    """Train, and return the Run when it is done. Raises ConfigError for wrong arguments, RoleFailed for a role that
    kept failing.

    `env` is an id, a gymnasium.Env class or a callable. Give a preset (a name, or the path of a TOML file), or an algorithm and an
    architecture: their names, import paths (module:Class), classes, instances or Configs. Everything else overrides a value:
    `actors=2`, `net={"hidden": (32,)}`, `**{"algorithm.lr": 1e-3}`. A preset that learns from a recording is given its folder as
    `data`; `env` is the simulator then, and may be left out. Several policies:
    `policies={"walker": None, "rival": "random"}` (values of its own, None, or what acts without learning),
    `policy_of=lambda agent, episode: "walker"`, `train=["walker"]`. `callbacks` are told what happens (shoal.Callback).
    `config` is a TOML file (`shoal show ... --out FILE`) that says what to train. `seeds=3` trains with three seeds and returns
    SeedRuns: the runs, the mean and the interval of what came out, and the policy of the best. With `trust` runs that are named
    (fixed policies, `init_from`) may import modules from outside the installed environment.
    """
    callbacks = checked(callbacks)
    if "callback" in overrides:
        raise ConfigError("there is no setting 'callback'; did you mean callbacks=[...]?")
    plan = replace(plan_of(preset, env, algorithm, architecture, overrides, data, config), trust=trust)
    if seeds is None:
        return launch(plan, callbacks=callbacks)
    return train_seeds(launch, plan, SeedOptions(seeds, seeds_at_once), sys.stdout, callbacks)


def plan_of(preset: str | None, env: Any, algorithm: Any, architecture: Any, overrides: Mapping[str, Any],
            data: str | Path | None = None, config: str | Path | None = None) -> Plan:
    """A plan from Python's arguments; with a preset, `algorithm` and `architecture` are mappings of values."""
    values = policies_given(dict(overrides))
    if isinstance(earlier := values.get("init_from"), Run | SeedRuns | Path):
        values["init_from"] = str(earlier if isinstance(earlier, Path) else earlier.directory)
    if config is not None:
        return _plan_with_file(config, preset, env, algorithm, architecture, values)
    if data is not None:
        found, given = offline_data(str(data), None if env is None else EnvRef.given(env))
        env, values = found.target, {**given, **values}
    elif preset is not None and env is None and load_preset(preset).offline:
        raise ConfigError(f'which recording? Such as shoal.train("{preset}", data="logs", env="CartPole-v1")')
    if preset is not None and env is None:
        raise ConfigError(f'which environment? Such as shoal.train("{preset}", "CartPole-v1")')
    if not isinstance(env, str | RecordedEnv) and not callable(env):
        raise ConfigError(f"env={env!r} is not possible: give an id, a gymnasium.Env class or a callable")
    for name, value in (("algorithm", algorithm), ("architecture", architecture)):
        if isinstance(value, Mapping):
            values[name] = value
        elif value is not None and preset is not None:
            raise ConfigError(f'preset "{preset}" and {name}={value!r}: give a preset, or an algorithm and an architecture')
    if preset is not None:
        loaded = load_preset(preset)
        return default_plan(Names(loaded.algorithm, loaded.architecture, preset), EnvRef.given(env), loaded, values)
    if any(value is None or isinstance(value, Mapping) for value in (algorithm, architecture)):
        raise ConfigError('give a preset, or algorithm="..." and architecture="..."; `shoal list` shows what there is')
    return default_plan(Components.given(algorithm, architecture), EnvRef.given(env), None, values)


def _plan_with_file(path: str | Path, preset: str | None, env: Any, algorithm: Any, architecture: Any,
                    values: dict[str, Any]) -> Plan:
    """What a file says, with what is given beside it."""
    for name, value in (("algorithm", algorithm), ("architecture", architecture)):
        if isinstance(value, Mapping):
            values[name] = value
        elif value is not None:
            preset = preset or str(value)
    if preset is not None:
        raise ConfigError(f"config={str(path)!r} says what to train; leave {preset!r} out, or change it in the file")
    return read_config(path).plan(None if env is None else EnvRef.given(env), values)


def load(run: str | Path, *, env: Any = None, trust: bool = False, checkpoint: str | None = None, **overrides: Any) -> Run:
    """A run by its directory, to act with or to evaluate; policy="last" or "best" chooses its policy. `checkpoint` names one of its
    checkpoints, whose last policy is meant if nothing else is said. Of a folder of several seeds the best is loaded, and a line
    says which that is."""
    rundir = run_or_best_seed(Path(run), say)
    if checkpoint is not None:
        rundir.checkpoints().named(checkpoint)
        overrides = {"policy": "last", **overrides}
    config = rundir.config()
    if env is None:
        check_trust(modules_of(config), trust)
    plan = plan_from_json(config, str(rundir.config_file), env)
    acting = replace(plan.experiment, demos=None, offline=False)  # what it learned from is not needed to act
    prepared = prepare(replace(plan, experiment=with_values(acting, overrides, ""), trust=trust))
    return Run(rundir.path, rundir.summary(), prepared, checkpoint)


def resume(run: str | Path, *, env: Any = None, trust: bool = False, callbacks: Sequence[Callback] = (),
           **overrides: Any) -> Run | SeedRuns:
    """Continue from the newest checkpoint. New stop conditions (until_return, max_env_steps, max_learner_steps, max_seconds) may
    be given. The folder of several seeds continues with the seeds that have not reached their goal, and begins those that never
    began."""
    callbacks = checked(callbacks)
    if (Path(run) / SEEDS).is_file():
        return resume_seeds(launch, SeedGroup.open(Path(run), env, trust), overrides, env, trust, sys.stdout, callbacks)
    rundir = RunDir.open(Path(run))
    return launch(resume_plan(rundir, overrides, env, trust), rundir, callbacks=callbacks)


def launch(plan: Plan, rundir: RunDir | None = None, stream: IO[str] | None = None, callbacks: Sequence[Callback] = ()) -> Run:
    """Check, create or continue the run directory, run, and return the finished run."""
    started = time.monotonic()
    with contextlib.ExitStack() as held:
        held.enter_context(kept_to(plan.experiment.cores))
        if rundir is not None:
            held.enter_context(alone(rundir.path))
        return _launched(plan, rundir, stream or sys.stdout, started, held, callbacks)


def _launched(plan: Plan, rundir: RunDir | None, stream: IO[str], started: float, held: contextlib.ExitStack,
              callbacks: Sequence[Callback]) -> Run:
    """`held` keeps the run directory to this process until the run is over."""
    if rundir is None and plan.experiment.run_dir:
        RunDir.check_free(Path(plan.experiment.run_dir))
    if plan.experiment.replay.demo_ratio and plan.experiment.demos is None:
        raise ConfigError(f"--replay.demo-ratio {plan.experiment.replay.demo_ratio:g} draws demonstrations, and there are none; "
                          "give --demos PATH (make some with `shoal data record SOURCE ENV --out PATH`), or --replay.demo-ratio 0")
    if plan.experiment.demos is not None:  # as an absolute path: a resume may come from another folder
        plan = replace(plan, experiment=replace(plan.experiment, demos=str(found_at(plan.experiment.demos))))
    if not (plan.experiment.offline or plan.env.simulated):
        raise plan.env.target.refuse()
    plan = replace(plan, experiment=replace(plan.experiment, fixed=absolute(plan.experiment.fixed)))
    say = _speaker(plan, stream)
    for line in sizing_lines(plan):
        say(line)
    if must_be_compiled(plan.env.target):
        say(f"{plan.env.name} is compiled now, at its first use on this machine; that takes up to half a minute")
    prepared = prepare(laid_out(plan, say))
    plan, resumed = prepared.plan, 0
    if rundir is None and plan.experiment.init_from is not None:
        prepared = replace(prepared, initial=initial_weights(prepared, plan.experiment.init_from, say))
    if rundir is None:
        program = drawn(prepared)
        program.starts_paused = plan.experiment.runtime != "ray"  # until there is a checkpoint; in a cluster some may never start
        rundir, base = _new_directory(plan), Base()
        held.enter_context(alone(rundir.path))
        undo: Callable[[], None] = rundir.remove
    else:
        before = rundir.config()
        resumed, base = before.get("resumed", 0) + 1, base_of(rundir)
        program = drawn(prepared, resumed)
        _check_slices(prepared, rundir)
        rundir.begin_again(plan_to_json(plan, resumed))
        undo = partial(rundir.save_config, before)
    program.folder = rundir.path.resolve()
    program.go_on_above(int(base.snapshot.get("weights_version", 0)))
    _limit(program, plan.experiment, base)
    session = None
    try:
        session = _session(prepared, program, rundir, base, stream, started, callbacks)
        _run(program, session, prepared)
    except BaseException:
        if session is None or not session.begun:  # refused (no such cluster, no room in it) or stopped: all is as it was before
            _take_back(session, undo)
        raise
    return Run(rundir.path, session.summary, prepared)


def _new_directory(plan: Plan) -> RunDir:
    experiment, config = plan.experiment, plan_to_json(plan)
    if experiment.run_dir:
        return RunDir.create(Path(experiment.run_dir), config)
    return RunDir.create_default(default_directory(plan.folder_name, plan.env.name, experiment.seed), config)


def _run(program: Program, session: RunSession, prepared: Prepared) -> None:
    from shoal import runtime

    experiment, found = prepared.plan.experiment, prepared.plan.found
    here = experiment.learner_threads if experiment.runtime == "inline" else 1  # else somebody else computes
    with interruptible(session), compute_threads(here):
        if found is not None:
            session.announce(f"chosen: {found.chosen}, {found.how} (--actors auto)")
        runtime.run(program, session, experiment.runtime, session.rundir.logs, experiment.faults, ray=experiment.ray)


def _limit(program: Program, experiment: Experiment[Any, Any], base: Base) -> None:
    """Let the roles that act, and those that learn, keep to what is left of their budgets."""
    for counter, most in (("env_steps", experiment.max_env_steps), ("learner_steps", experiment.max_learner_steps)):
        if most is not None:
            program.limits[counter] = most - base.totals.get(counter, 0)


def _take_back(session: RunSession | None, undo: Callable[[], None]) -> None:
    if session is not None:
        session.abandon()
    with contextlib.suppress(OSError):  # a full disk must not hide why
        undo()


def _check_slices(prepared: Prepared, rundir: RunDir) -> None:
    """Parameters come back as they were saved: of the same net, and in as many slices."""
    newest = rundir.checkpoints().newest()
    if newest is None:
        return
    learning = {policy.scope: policy.algorithm for policy in prepared.several} or {"": prepared.algorithm}
    for scope, algorithm in learning.items():
        _check_slices_of(prepared, rundir, algorithm, saved_slices(newest, scope))


def _check_slices_of(prepared: Prepared, rundir: RunDir, algorithm: Algorithm, saved: SavedSlices) -> None:
    params = algorithm.learn(0).state.get("params")
    if not saved.sizes or params is None:
        return
    before, now = sum(saved.sizes) if saved.cut else max(saved.sizes), len(params)
    if before != now:
        why = f"its net has {before:,} parameters, and this one would have {now:,}; leave out what changes it"
    elif saved.cut and (changed := _changed_processes(prepared, rundir)):
        why = f"its parameters were saved in {len(saved.sizes)} slices; leave out {changed}"
    else:
        return
    raise ConfigError(f"{rundir.path} cannot be resumed: {why}, or start a new run with `shoal train`")


def _changed_processes(prepared: Prepared, rundir: RunDir) -> str:
    """The first option that asks for another number of processes than the run had."""
    before, now = rundir.config().get("architecture", {}), prepared.plan.experiment.architecture
    changed = [name for name in prepared.plan.architecture.process_options if before.get(name) not in (None, getattr(now, name))]
    return f"{flag(changed[0], 'architecture')} {getattr(now, changed[0])}" if changed else ""


def _speaker(plan: Plan, stream: IO[str]) -> Callable[[str], None]:
    """Where a line goes before there is a console."""
    if plan.experiment.console.mode == "none":
        return lambda line: None
    return lambda line: print(line, file=stream, flush=True)


def _session(prepared: Prepared, program: Program, rundir: RunDir, base: Base, stream: IO[str], started: float,
             callbacks: Sequence[Callback]) -> RunSession:
    names, experiment, env = prepared.plan.names, prepared.plan.experiment, prepared.plan.env
    goals = Goals(experiment.until_return, experiment.max_env_steps, experiment.max_learner_steps, experiment.max_seconds,
                  experiment.until)
    found, before = prepared.plan.found, rundir.summary()
    layout = asdict(found) if found else _kept_layout(before) if before.get("actors") == experiment.actors else None
    who = "offline" if experiment.offline else layout["chosen"] if layout else counted(experiment.actors, "actor")
    title = f"{prepared.plan.title} on {env.name} · {experiment.runtime} · {who} · seed {experiment.seed}"
    outputs: list[Output | None] = [
        console(experiment.console.mode, stream, title, vars(goals), experiment.console.every_seconds),
        JsonLines(rundir.metrics_file),
        TensorBoard(rundir.path / "tensorboard") if experiment.tensorboard else None,
        *(callback_output(callback) for callback in callbacks),
    ]
    learning = prepared.metrics
    labels = {"preset": names.preset, "algorithm": names.algorithm, "architecture": names.architecture, "env": env.name,
              "runtime": experiment.runtime, "seed": experiment.seed, "actors": experiment.actors,
              "learners": experiment.learners, "layout": layout}
    return RunSession(rundir, labels, goals, checkpoint_seconds=experiment.checkpoint.every_seconds,
                      keep=experiment.checkpoint.keep, outputs=[output for output in outputs if output is not None], base=base,
                      started=started, autoscaler=_autoscaler(prepared), batch_slots=_batch_slots(prepared),
                      algorithm_metrics=learning, role_metrics=[one for one in program.metrics if one not in learning],
                      policy=experiment.policy, last_env_steps=experiment.eval.last_env_steps, scopes=prepared.scopes,
                      commands=RunControl(rundir, prepared.plan, program.resumed))


def _kept_layout(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """What --actors auto had chosen for the earlier parts of a run, as its summary says; None where it says nothing of the kind."""
    layout = summary.get("layout")
    return layout if isinstance(layout, dict) and isinstance(layout.get("chosen"), str) else None


def _batch_slots(prepared: Prepared) -> int:
    """Unrolls that an update waits for, all learners together; 0 where their number is not fixed, or there are none."""
    plan = prepared.plan
    fixed = plan.architecture.batch_slots and not plan.algorithm.from_replay
    return plan.slots_per_batch * plan.experiment.learners if fixed else 0


@runtime_checkable
class _Bounded(Protocol):
    """The options of an architecture that bounds the age of data."""

    max_staleness: int | None


def _autoscaler(prepared: Prepared) -> Autoscaler | None:
    """What lets the number of actors follow the learner; None where it is fixed."""
    plan, experiment = prepared.plan, prepared.plan.experiment
    scale = experiment.autoscale
    if not experiment.moving:
        return None
    staleness = experiment.architecture.max_staleness if isinstance(experiment.architecture, _Bounded) else None
    limits = [limit for limit in (scale.max_lag, prepared.algorithm.max_lag, staleness) if limit is not None]
    assert scale.most is not None
    return Autoscaler(Rule(1, scale.most, min(limits, default=None)), scale.every_seconds, role=plan.architecture.scaled_role,
                      learner=plan.architecture.learner_role)


@contextlib.contextmanager
def interruptible(session: RunSession) -> Iterator[None]:
    """Ctrl-C (or SIGTERM) once: checkpoint, clean stop, summary; at once where the run has not begun. Twice: everything is gone at
    once. A terminal that is closed (SIGHUP) counts once, however often it is told: the kernel and the shell may both tell it; under
    nohup it is not heard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if number == signal.SIGHUP:
            let_go_of_the_terminal()
        elif pressed:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h")  # the live table hides the cursor
            os._exit(130)  # children die with their parent
        first, pressed = not pressed, True
        session.interrupt()
        if first:
            before_it_begins(number, frame)

    def before_it_begins(number: int, frame: FrameType | None) -> None:
        """Nobody looks at the session then, perhaps for long: a cluster may wait for its nodes. Modules in C that are just being
        imported would lose an exception, so that is waited for."""
        if not session.begun and importing(frame):
            signal.setitimer(signal.ITIMER_REAL, IMPORT_SECONDS)
        elif not session.begun:
            if callable(outer := before[signal.SIGINT]):
                outer(signal.SIGINT, frame)  # raises KeyboardInterrupt; the command's own also takes note of it
            raise KeyboardInterrupt

    heard = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        heard.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in heard}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, before_it_begins)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, old in before.items():
            if signal.getsignal(number) in (handler, before_it_begins):  # not where the outer handler has put another in its place
                signal.signal(number, old)


def importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported just there."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def let_go_of_the_terminal() -> None:
    """Whatever is still said goes nowhere, if the terminal is really gone: writing to it would fail, to the last goodbye."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        try:
            os.write(fd, b"")
        except OSError:
            os.dup2(nowhere, fd)
    os.close(nowhere)
