"""`shoal data record` and `shoal data info`: demonstrations in and out. docs/demos.md."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shoal import __version__
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.experiment.config import EnvsConfig, Names, default_plan
from shoal.experiment.dataset_commands import check_command, check_target, convert, convert_command
from shoal.experiment.parse import parse_command
from shoal.experiment.presets import load_preset, preset_names
from shoal.experiment.references import EnvRef, check_trust, find, modules_of
from shoal.experiment.rundir import SEEDS, run_or_best_seed
from shoal.experiment.suggestions import closest
from shoal.experiment.value_command import evaluate_command
from shoal.options import Options, number
from shoal.telemetry.outputs import say

if TYPE_CHECKING:
    from shoal.learning import Algorithm

__all__ = ["RecordOptions", "data_command", "source_of"]

USAGE = "shoal data record SOURCE ENV"


@dataclass(frozen=True)
class RecordOptions(Options):
    """Play whole episodes and write them to a folder."""

    out: str | None = None
    """The folder; demos/<environment> by default."""
    episodes: int = number(100, at_least=1)
    """How many episodes."""
    steps: int | None = number(None, at_least=1)
    """Stop earlier, after the episode with which this many decisions are reached."""
    num_envs: int = number(8, at_least=1)
    """Environments that are played side by side; fewer take less memory."""
    seed: int = number(0, at_least=0, below=2**53)
    """Seed of the environments and of everything random."""
    epsilon: float = number(0.0, at_least=0, at_most=1)
    """Share of actions that are replaced by random ones."""
    explore: bool = False
    """Let a run's policy explore as in training, instead of acting greedily."""
    format: Literal["folder", "minari", "parquet", "hdf5", "npz"] = "folder"
    """What is written: shoal's own folder, a Minari dataset whose id is --out, or one file of steps (--out FILE.parquet)."""
    append: bool = False
    """Add to the recording that is there."""
    overwrite: bool = False
    """Replace the recording that is there."""
    trust: bool = False
    """Import modules that a run names, also from outside the installed environment."""
    envs: EnvsConfig = dataclasses.field(default_factory=EnvsConfig)
    """How environments are made; those of a run are made as the run made them."""

    def validate(self) -> None:
        super().validate()
        self.envs.validate()
        if self.append and self.overwrite:
            raise ConfigError("--append adds to a recording and --overwrite replaces it; give one of them")
        if self.format != "folder" and (self.append or self.overwrite or self.out is None):
            raise ConfigError(f"--format {self.format} writes a new recording; give its name with --out, without --append or "
                              "--overwrite")


def data_command(arguments: list[str]) -> int:
    commands = {"record": _record, "info": _info, "convert": convert_command, "check": check_command, "evaluate": evaluate_command}
    if not arguments or arguments[0] not in commands:
        raise ConfigError(f"shoal data {' '.join(arguments)}: give `record SOURCE ENV`, `info PATH`, `check PATH`, `convert A B` "
                          "or `evaluate RUN PATH`")
    return commands[arguments[0]](arguments[1:])


# ---------------------------------------------------------------------------------------------- record
def _record(arguments: list[str]) -> int:
    given, options = parse_command(RecordOptions, arguments, 2, USAGE)
    if not given or len(given) > 2:
        raise ConfigError(f"{USAGE}: SOURCE is a run directory, a script (expert.py, expert.py:function or module:function), a "
                          "preset, scripted (the environment's registered expert) or random; then the environment")
    make = source_of(given[0], given[1] if len(given) > 1 else None, options)
    with _interruptible() as stop:
        if options.format == "folder":
            return _play(make, options, stop)
        return _play_into(make, options, stop)


def _play_into(source: EpisodeSource, options: RecordOptions, stop: Callable[[], bool]) -> int:
    """Record into a folder, and from there into another format. Where that fails, the folder stays."""
    import shutil
    import tempfile

    target = f"minari:{options.out}" if options.format == "minari" else str(options.out)
    if options.format != "minari" and Path(target).suffix not in (f".{options.format}", ".h5" if options.format == "hdf5" else ""):
        raise ConfigError(f"--out {target} does not fit --format {options.format}; give a name that ends in .{options.format}")
    check_target(target)
    folder = tempfile.mkdtemp(prefix="shoal-recording-")
    recording, written = f"{folder}/recording", False
    try:
        code = _play(source, dataclasses.replace(options, out=recording), stop)
        if Path(recording, "demos.json").exists():
            convert(recording, target)
        written = True
    finally:
        if written or not Path(recording, "demos.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"what was recorded is in {recording}: `shoal data convert {recording} {target}` writes it where there is room")
    return code


@dataclass(frozen=True)
class EpisodeSource:
    """Who acts, and where."""

    words: str
    """For demos.json and for people."""
    env: EnvRef
    envs: EnvsConfig
    actor: Callable[[Any, np.random.Generator], Any]
    """(environments, rng) -> shoal.envs.rollout.ActFunction"""


def source_of(name: str, env: str | None, options: RecordOptions) -> EpisodeSource:
    """The source that a word of the command line (or of a benchmark suite) names."""
    if any((Path(name) / file).is_file() for file in ("config.json", SEEDS)):
        return _run_source(Path(name), env, options)
    if env is None:
        raise ConfigError(f"which environment? Add its id: shoal data record {name} CartPole-v1")
    if options.explore:
        raise ConfigError(f"--explore needs a run's policy, and {name} is not a run; --epsilon mixes random actions into any")
    place = EnvRef.named(env)
    if name == "random":
        from shoal.envs.random_policy import RandomPolicy

        return EpisodeSource("random actions", place, options.envs, lambda made, rng: RandomPolicy(made.action_space, rng))
    if name == "scripted":
        return _script_source(_expert_of(env), place, options)
    if name in preset_names() or name.endswith(".toml"):
        return _preset_source(name, place, options)
    if ":" in name or name.endswith(".py"):
        return _script_source(name, place, options)
    what = "it does not exist" if not Path(name).exists() else "it has no config.json, and does not end in .py"
    known = closest(name, [*preset_names(), "random", "scripted"], "presets")
    raise ConfigError(f"{name} is not a run directory, script or preset ({what}){known}")


def _expert_of(env: str) -> str:
    """The script that is registered for an environment."""
    from shoal.envs.experts import EXPERTS

    if env not in EXPERTS:
        raise ConfigError(f"{env} has no registered expert; there are some for {', '.join(EXPERTS)}; give a script instead, such "
                          f"as `shoal data record expert.py {env}`")
    return EXPERTS[env]


def _script_source(name: str, env: EnvRef, options: RecordOptions) -> EpisodeSource:
    """A function of a script or of a module."""
    from shoal.offline.recording import ScriptPolicy

    function = _function(name)
    return EpisodeSource(f"script {name}", env, options.envs, lambda made, rng: ScriptPolicy(function, made, rng, name))


def _run_source(path: Path, env: str | None, options: RecordOptions) -> EpisodeSource:
    """The policy of a run's newest checkpoint."""
    from shoal.experiment.run import load

    if options.envs != EnvsConfig():
        raise ConfigError("--envs.* does not fit a run directory, whose environments are made as the run made them; leave it out")
    rundir = run_or_best_seed(path, say)
    for line in check_trust(modules_of(rundir.config()), options.trust):
        sys.stdout.write(f"{line}\n")
    run = load(rundir.path, env=env if env not in (None, rundir.config()["env"]["name"]) else None, trust=options.trust)
    published, plan = run.published, run.prepared.plan
    how = "exploring" if options.explore else "greedy"
    return EpisodeSource(f"run {rundir.path} ({plan.title}, {how})", plan.env, plan.experiment.envs,
                         lambda made, rng: _Acting(run.prepared.algorithm, published, made.num_seats, options.explore, rng))


def _preset_source(name: str, env: EnvRef, options: RecordOptions) -> EpisodeSource:
    """A preset's policy before anything is learned, exploring as training begins."""
    from shoal.acting import Progress
    from shoal.experiment.prepare import prepare

    preset = load_preset(name)
    plan = default_plan(Names(preset.algorithm, preset.architecture, name), env, preset,
                        {"envs.backend": options.envs.backend, "envs.kwargs": options.envs.kwargs, "seed": options.seed},
                        measure=False)
    algorithm = prepare(plan).algorithm
    published = algorithm.learn(options.seed).published(Progress())
    return EpisodeSource(f"preset {name}, untrained", env, plan.experiment.envs,
                         lambda made, rng: _Acting(algorithm, published, made.num_seats, True, rng))


class _Acting:
    """An algorithm's policy as an actor of a recording."""

    def __init__(self, algorithm: Algorithm, published: Any, seats: int, explore: bool, rng: np.random.Generator) -> None:
        import torch

        from shoal.acting import ActionLikelihood, Progress

        self.policy, self.viewer = algorithm.policy(), algorithm.record.viewer(seats)
        self.policy.load(published)
        self.state = self.policy.initial_state(seats)
        self.likely = self.policy if isinstance(self.policy, ActionLikelihood) and not self.state else None
        self.rng = torch.Generator().manual_seed(int(rng.integers(2**31)))
        self.explore = algorithm.explore(0, 1, seats, Progress.of(published["progress"])) if explore else None

    def __call__(self, step: Any, previous: Any) -> Tree:
        self.view = self.viewer.of(step, previous)
        action, self.state, _ = self.policy.act(self.view, self.state, self.explore, self.rng)
        return action

    def log_prob(self, step: Any, action: np.ndarray) -> np.ndarray | None:
        """Of these actions at the step that it has acted on; not known where the policy has a memory."""
        return None if self.likely is None else self.likely.log_prob(self.view, action, self.explore)


def _function(name: str) -> Callable[..., Any]:
    """The function behind expert.py, expert.py:function or module:function; it is called policy where nothing else is said."""
    place, _, inside = name.partition(":")
    inside = inside or "policy"
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ConfigError(f"there is no script {place}; give the path of a Python file with a function {inside}(observation)")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a user's script may raise anything
            raise ConfigError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
        functions = {word: thing for word, thing in vars(module).items() if callable(thing) and word[0] != "_"}
    else:
        thing = find(f"{place}:{inside}")
        functions = {inside: thing} if callable(thing) else {}
    if inside not in functions:
        there = f"; there are {', '.join(functions)}" if functions else ""
        raise ConfigError(f"{name}: there is no function {inside!r}{there}; write def {inside}(observation)")
    function: Callable[..., Any] = functions[inside]
    return function


def _play(source: EpisodeSource, options: RecordOptions, stop: Callable[[], bool]) -> int:
    from shoal.experiment.loaded_run import compute_threads
    from shoal.offline import DemoWriter
    from shoal.offline.recording import RecordingOptions, record, recording_info
    from shoal.roles.parts import EnvSource

    path = Path(options.out or Path("demos") / re.sub(r"[^A-Za-z0-9_.-]+", "-", source.env.name))
    kwargs = source.envs.arguments()
    env = EnvSource(source.env.target, source.envs.backend, kwargs).make(min(options.num_envs, options.episodes))
    try:
        first = env.reset(options.seed)
        about = dataclasses.replace(recording_info(env, first, kwargs), env=source.env.name)
        made = {"source": source.words, "seed": options.seed, "epsilon": options.epsilon, "shoal": __version__,
                "date": time.strftime("%Y-%m-%d %H:%M")}
        writer = DemoWriter.create(path, about, made, append=options.append, overwrite=options.overwrite)
        how = ("source", "seed", "epsilon")
        if options.append and any(all(one.get(name) == made[name] for name in how) for one in writer.written.made[:-1]):
            raise ConfigError(f"--append with --seed {options.seed} would record the same episodes again; give another --seed")
        order = RecordingOptions(options.episodes, options.steps, options.seed, options.epsilon)
        actor = source.actor(env, np.random.default_rng(options.seed))
        with writer, compute_threads(1):
            done = record(env, first, actor, writer, order, say, stop)
    finally:
        env.close()
    say(f"{'stopped by hand: ' if stop() else ''}{done:,} episodes of {source.words} in {source.env.name}"
         + (f", {options.episodes - done:,} fewer than asked for" if stop() else ""))
    if (path / "demos.json").exists():
        _describe(path)
    return 130 if stop() else 0


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C (or SIGTERM) once: write what is there and stop. Twice: stop at once."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return

    def handler(number: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield pressed.is_set
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# ---------------------------------------------------------------------------------------------- info
def _info(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("shoal data info PATH: give one folder of demonstrations, or of a Minari dataset")
    _describe(Path(arguments[0]))
    return 0


def _describe(path: Path) -> None:
    from shoal.offline import open_demos

    about = open_demos(path).info
    inside = ", ".join(f"{name}={value!r}" for name, value in (about.kwargs or {}).items())
    env = about.env or "an unnamed environment"
    say(f"{path}: {about.kind} recording of {env}{f' ({inside})' if inside else ''}")
    say(f"  episodes      {about.episodes:,} ({about.terminated:,} terminated, {about.episodes - about.terminated:,} truncated)")
    say(f"  steps         {about.steps:,}, {about.nbytes / 1e6:,.2f} MB")
    for name, spread in (("return", about.returns), ("length", about.lengths)):
        if spread is not None:
            say(f"  {name:<13} {spread.mean:.4g} ± {spread.std:.3g} (min {spread.least:.4g}, max {spread.most:.4g})")
    say(f"  observations  {about.observation_space}")
    say(f"  actions       {about.action_space}{f', masks of {about.mask_size}' if about.mask_size else ''}")
    for part in about.made:
        say(f"  made          {', '.join(f'{name} {value}' for name, value in part.items() if value is not None)}")
