"""`shoal train`, `resume`, `eval`, `play`: the commands that train or act."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from shoal.errors import ConfigError, EnvironmentError_, RoleFailed, ShoalError
from shoal.experiment.config import ConsoleConfig
from shoal.experiment.parse import parse_options, parse_train, split_positionals
from shoal.experiment.references import check_trust, modules_of, outside
from shoal.experiment.run import Run, launch, load, resume_plan
from shoal.experiment.rundir import RunDir
from shoal.experiment.values import apply
from shoal.runtime import RayConfig

__all__ = ["eval_command", "play_command", "resume_command", "train_command"]


def train_command(arguments: list[str]) -> int:
    if not arguments or arguments in (["-h"], ["--help"]):
        from shoal.cli import HELP

        sys.stdout.write(HELP)
        return 0 if arguments else 2
    sys.path.append(os.getcwd())  # for --net.module and environments of the user's own; installed modules come first
    return _go(lambda: launch(parse_train(arguments)))


@dataclass(frozen=True)
class Resume:
    """Go on from the newest checkpoint."""

    until_return: float | None = None
    """Stop when an evaluation's mean return reaches this; as before without it."""
    max_env_steps: int | None = None
    """Stop after this many agent decisions, earlier parts included."""
    max_learner_steps: int | None = None
    """Stop after this many updates, earlier parts included."""
    max_seconds: float | None = None
    """Stop after this much time, earlier parts included."""
    runtime: Literal["local", "inline", "ray"] | None = None
    """Where roles live from now on; as before without it."""
    actors: int | Literal["auto"] | None = None
    """How many actors from now on, on a machine or a cluster of another size, or auto to find it anew; as before without it."""
    learner_threads: int | None = None
    """Threads that each learner computes with, on a machine with another number of cores; as before without it."""
    ray: RayConfig = dataclasses.field(default_factory=RayConfig)
    """The cluster of --runtime ray; each value as before without it, and --ray.address None for one of its own."""
    trust: bool = False
    """Import modules that the run names, also from outside the installed environment."""
    console: ConsoleConfig = dataclasses.field(default_factory=ConsoleConfig)
    """What is shown while it runs; each value as before without it."""

    @classmethod
    def of(cls, rundir: RunDir) -> Resume:
        """With the run's own values, so that what is not given stays."""
        config, where = rundir.config(), str(rundir.config_file)
        return apply(cls(), {name: config[name] for name in ("ray", "console") if name in config}, where)


def resume_command(arguments: list[str]) -> int:
    rundir, options = _run_and_options(arguments, Resume, "shoal resume RUN", Resume.of)
    _say_modules(rundir, options.trust)
    names = ("until_return", "max_env_steps", "max_learner_steps", "max_seconds", "runtime", "actors", "learner_threads")
    overrides: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    overrides |= {name: dataclasses.asdict(getattr(options, name)) for name in ("ray", "console")}
    return _go(lambda: launch(resume_plan(rundir, overrides, trust=options.trust), rundir))


def _go(start: Any) -> int:
    """Run, then say where it is, what came out, and how to go on."""
    try:
        run: Run = start()
    except EnvironmentError_ as error:
        if _while_running(error):
            raise RoleFailed(f"an environment broke its contract: {error}") from None
        raise
    except ShoalError:
        raise
    except KeyboardInterrupt:  # once it has begun it ends in peace, with a summary
        sys.stdout.write("\nstopped by hand before the run began; nothing was written\n")
        raise
    except Exception as error:  # inline, where a role's own exception is raised as it is
        if _while_running(error):
            raise RoleFailed(f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}") from None
        raise
    _farewell(run, sys.stdout)
    return 130 if run.summary.get("stopped_by") == "interrupt" else 0


def _while_running(error: BaseException) -> bool:
    """Whether an error came out of a running program (inline), not out of the checks before it."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("shoal.runtime") for frame, _ in frames)


def _farewell(run: Run, out: IO[str]) -> None:
    summary = run.summary
    reason = str(summary.get("stopped_by"))
    stopped = {"return": "the return was reached", "env_steps": "all env steps were taken",
               "learner_steps": "all updates were made", "seconds": "the time is over",
               "interrupt": "stopped by hand"}.get(reason, reason)
    shown = [f"{name.replace('_', ' ')} {_number(summary.get(name))}" for name in ("eval_return", "train_return")]
    where = shlex.quote(str(run.directory))
    trusted = " --trust" if outside(modules_of(RunDir(run.directory).config())) else ""
    saved = summary["checkpoint_bytes"]
    if summary.get("checkpoint_failed"):
        kept = "an older one is kept" if saved["all"] else "there is none"
        out.write(f"\nthe last checkpoint could not be written ({summary['checkpoint_failed']}); {kept}\n")
    unit, what = ("learner_steps", "updates") if run.prepared.plan.experiment.offline else ("env_steps", "env steps")
    tables = f", {saved['replay'] / 1e6:,.1f} MB of it replay tables" if saved["replay"] else ""
    out.write(f"\n{stopped} after {summary[unit]:,} {what} in {summary['seconds']:.1f} s "
              f"({_number(summary[f'{unit}_per_second'], 0)}/s): {', '.join(shown)}\n"
              f"  run     {run.directory}\n")
    if saved["all"]:
        out.write(f"  saved   {saved['all'] / 1e6:,.1f} MB in the newest checkpoint{tables}\n"
                  f"  play    shoal play {where}{trusted}\n"
                  f"  resume  shoal resume {where}{trusted} --max-{unit.replace('_', '-')} {_further(summary[unit])}\n")
    else:
        out.write("  saved   nothing: there is no checkpoint to play or resume; remove the run, or keep it for its logs\n")
    out.flush()


def _further(env_steps: int) -> int:
    """A round number well beyond."""
    unit = 10 ** max(3, int(math.log10(max(env_steps, 1))))
    return (env_steps // unit + 2) * unit


def _number(value: float | None, digits: int = 2) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"


# ---------------------------------------------------------------------------------------------- acting
@dataclass(frozen=True)
class Eval:
    """Mean return of fresh episodes, played greedily with the newest checkpoint."""

    episodes: int = 100
    """How many episodes."""
    seed: int = 1_000_000
    """Of the environments."""
    trust: bool = False
    """Import modules that the run names, also from outside the installed environment."""


def eval_command(arguments: list[str]) -> int:
    rundir, options = _run_and_options(arguments, Eval, "shoal eval RUN")
    if options.episodes < 1:
        raise ConfigError(f"--episodes {options.episodes} is not possible: give 1 or more")
    _say_modules(rundir, options.trust)
    run = load(rundir.path, trust=options.trust)
    result = run.evaluate(options.episodes, options.seed)
    sys.stdout.write(f"{run.prepared.plan.env.name}: {result.sentence()}\n")
    return 0


@dataclass(frozen=True)
class Play:
    """Watch a run's policy play."""

    episodes: int = 1
    """How many episodes."""
    seed: int = 0
    """Of the environment."""
    video: str | None = None
    """Write a GIF instead of showing it."""
    trust: bool = False
    """Import modules that the run names, also from outside the installed environment."""


def play_command(arguments: list[str]) -> int:
    from shoal.experiment.playing import show, write_gif

    rundir, options = _run_and_options(arguments, Play, "shoal play RUN")
    if options.episodes < 1:
        raise ConfigError(f"--episodes {options.episodes} is not possible: give 1 or more")
    if options.video is not None and not options.video.endswith(".gif"):
        raise ConfigError(f"--video {options.video} is not possible: give a name that ends in .gif")
    _say_modules(rundir, options.trust)
    run = load(rundir.path, trust=options.trust)
    if options.video is not None:
        write_gif(run, options.episodes, options.seed, Path(options.video), sys.stdout)
    else:
        show(run, options.episodes, options.seed, sys.stdout)
    return 0


def _run_and_options(arguments: list[str], kind: Any, usage: str, of: Any = None) -> tuple[RunDir, Any]:
    """The run, and the options over the defaults of their kind; `of` gives those that the run itself has."""
    if any(word in ("-h", "--help") for word in arguments):
        parse_options(kind, kind(), ["--help"], usage)
    positionals, rest = split_positionals(arguments, 1)
    if len(positionals) != 1:
        raise ConfigError(f"{usage}: give one run directory; `shoal runs` lists them")
    rundir = RunDir.open(Path(positionals[0]))
    return rundir, parse_options(kind, of(rundir) if of else kind(), rest, usage)


def _say_modules(rundir: RunDir, trust: bool) -> None:
    """A run directory is data, but using it imports the modules that it names: say which."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where `train` found them too; to look is not yet to import
    for line in check_trust(modules_of(rundir.config()), trust):
        sys.stdout.write(f"{line}\n")
