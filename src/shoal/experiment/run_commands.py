"""`shoal train`, `resume`, `eval`, `play`: the commands that train or act."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from shoal.envs.opponent_env import OPPONENTS, OpponentMaker, built_in_opponent
from shoal.envs.recorded_env import RecordedEnv
from shoal.errors import ConfigError, EnvironmentError_, RoleFailed, ShoalError
from shoal.experiment.best_response import best_response
from shoal.experiment.config import ConsoleConfig, RayOptions
from shoal.experiment.evaluation import Evaluation
from shoal.experiment.parse import is_option, parse_command, parse_options, parse_train, split_positionals
from shoal.experiment.policy_choice import PolicyChoice
from shoal.experiment.references import EnvRef, check_trust, find, modules_of, outside
from shoal.experiment.resuming import FINISHED, resume_plan
from shoal.experiment.run import Run, launch, load
from shoal.experiment.rundir import SEEDS, RunDir, run_or_best_seed, seed_runs
from shoal.experiment.seeds import SeedGroup, SeedOptions, SeedRuns, resume_seeds, resume_words, sentence, summary_of, train_seeds
from shoal.experiment.values import keys, with_values
from shoal.options import Options, number
from shoal.roles.policy_opponent import script_opponent
from shoal.telemetry.outputs import say

__all__ = ["eval_command", "play_command", "resume_command", "train_command"]

UNKNOWN = object()
Kind = TypeVar("Kind", bound=Options)
Trained = TypeVar("Trained", Run, SeedRuns)


def train_command(arguments: list[str]) -> int:
    arguments = list(arguments)
    seeds = SeedOptions.taken(arguments)
    if seeds is not None:
        return _go_with_seeds(lambda: train_seeds(launch, parse_train(arguments), seeds, sys.stdout))
    return _go(lambda: launch(parse_train(arguments)))


def _go_with_seeds(start: Callable[[], SeedRuns]) -> int:
    """Train with several seeds, then say what came out of all of them."""
    found = _guarded(start)
    where = shlex.quote(str(found.directory))
    sys.stdout.write(f"\n{sentence(found.summary)}\n  runs    {found.directory}\n  best    {found.best.directory}\n"
                     f"  plot    shoal plot {where} --out curves.png\n")
    if found.interrupted:
        sys.stdout.write(f"  resume  {resume_words(found.directory)}\n")
    return 130 if found.interrupted else 0


@dataclass(frozen=True)
class Resume(Options):
    """Continue from the newest checkpoint."""

    until_return: float | None = number(None)
    """Stop when an evaluation's mean return reaches this; unchanged by default."""
    until: str | None = None
    """Stop when an evaluation's METRIC[(OPPONENT)] >= (or <=) NUMBER; unchanged by default."""
    max_env_steps: int | None = number(None, above=0)
    """Stop after this many agent decisions, earlier parts included."""
    max_learner_steps: int | None = number(None, above=0)
    """Stop after this many updates, earlier parts included."""
    max_seconds: float | None = number(None, above=0)
    """Stop after this much time, earlier parts included."""
    runtime: Literal["local", "inline", "ray"] | None = None
    """Where roles live from now on; unchanged by default."""
    actors: int | Literal["auto"] | None = number(None, at_least=1)
    """How many actors from now on (another machine may hold more), or auto to measure again; unchanged by default."""
    online: bool = False
    """Let actors act from now on, in a run that has learned from --demos alone (--offline); it keeps learning from them too."""
    env: str | None = None
    """The simulator of a run that had none: for --online, or for evaluations from now on."""
    learner_threads: int | None = number(None, at_least=1)
    """Threads that each learner computes with, on a machine with another number of cores; unchanged by default."""
    ray: RayOptions = dataclasses.field(default_factory=RayOptions)
    """The cluster of --runtime ray; values you leave out are unchanged, and --ray.address None starts a cluster here."""
    trust: bool = False
    """Import modules that the run names, also from outside the installed environment."""
    console: ConsoleConfig = dataclasses.field(default_factory=ConsoleConfig)
    """What is shown while it runs; values you leave out are unchanged."""

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Resume:
        """With the run's own values, so that what is not given stays."""
        return with_values(cls(), {name: config[name] for name in ("ray", "console") if name in config}, where)


def _check_changeable(words: list[str], kept: Resume, config: Mapping[str, Any], path: Path) -> None:
    """Name a value that the run goes on with as it began."""
    for word in filter(is_option, words):
        name = word.partition("=")[0]
        key = name.lstrip("-").replace("-", "_")
        value: Any = config
        for part in key.split("."):
            value = value.get(part, UNKNOWN) if isinstance(value, Mapping) else UNKNOWN
        if value is not UNKNOWN and key not in keys(kept):
            raise ConfigError(f"{name} stays as the run began with it ({value}); `shoal set {path} {key}=VALUE` changes some "
                              f"values while it runs, and `shoal train ... --init-from {path}` begins another run with its weights")


def resume_command(arguments: list[str]) -> int:
    usage = "shoal resume RUN"
    if any(word in ("-h", "--help") for word in arguments):
        parse_options(Resume, Resume(), ["--help"], usage)
    words, rest = split_positionals(arguments, 1)
    path = _one_run(words, usage)
    several = (path / SEEDS).is_file()
    config = SeedGroup.config(path) if several else RunDir.open(path).config()
    kept = Resume.of(config, str(path))
    _check_changeable(rest, kept, config, path)
    options = parse_options(Resume, kept, rest, usage)
    options.validate()
    _say_modules(config, options.trust)
    names = ("until_return", "until", "max_env_steps", "max_learner_steps", "max_seconds", "runtime", "actors", "learner_threads")
    overrides: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    overrides |= {name: dataclasses.asdict(getattr(options, name)) for name in ("ray", "console")}
    if options.online:
        overrides["offline"] = False
    env = None if options.env is None else EnvRef.named(options.env).target
    if several:
        return _go_with_seeds(lambda: resume_seeds(launch, SeedGroup.open(path, env, options.trust), overrides, env, options.trust,
                                                   sys.stdout))
    rundir = RunDir(path)
    return _go(lambda: launch(resume_plan(rundir, overrides, env, options.trust), rundir))


def _go(start: Callable[[], Run]) -> int:
    """Run, then say where it is, what came out, and how to continue."""
    run = _guarded(start)
    _farewell(run, sys.stdout)
    return 130 if run.summary.get("stopped_by") == "interrupt" else 0


def _guarded(start: Callable[[], Trained]) -> Trained:
    """Run; what a program raises becomes RoleFailed."""
    try:
        return start()
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


def _while_running(error: BaseException) -> bool:
    """Whether an error came out of a running program (inline), not out of the checks before it."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("shoal.runtime") for frame, _ in frames)


def _farewell(run: Run, out: IO[str]) -> None:
    summary = run.summary
    reason = str(summary.get("stopped_by"))
    stopped = {"return": "the return was reached", "until": "the goal was reached", "env_steps": "env-step budget used up",
               "learner_steps": "update budget used up", "seconds": "time budget used up",
               "interrupt": "stopped by hand", "stop": "stopped by `shoal stop`"}.get(reason, reason)
    shown = [f"{name.replace('_', ' ')} {_number(summary.get(name))}" for name in ("eval_return", "train_return")]
    where = shlex.quote(str(run.directory))
    simulator = "" if run.prepared.plan.env.simulated else " --env ENV"
    trusted = " --trust" if run.prepared.plan.trust or outside(modules_of(RunDir(run.directory).config())) else ""
    saved = summary["checkpoint_bytes"]
    if summary.get("checkpoint_failed"):
        kept = "an older one is kept" if saved["all"] else "there is none"
        out.write(f"\nthe last checkpoint could not be written ({summary['checkpoint_failed']}); {kept}\n")
    unit, what = ("learner_steps", "updates") if run.prepared.plan.experiment.offline else ("env_steps", "env steps")
    tables = f", {saved['replay'] / 1e6:,.1f} MB of it replay tables" if saved["replay"] else ""
    out.write(f"\n{stopped}: {summary[unit]:,} {what} in {summary['seconds']:.1f} s "
              f"({_number(summary[f'{unit}_per_second'], 0)}/s), {', '.join(shown)}\n"
              f"  run     {run.directory}\n")
    if summary.get("policy") is not None:
        choice = PolicyChoice(summary["policy"], "learner", summary["policy_version"], summary["policy_env_steps"],
                              summary["eval_return"], summary["eval_episodes"])
        out.write(f"  policy  {choice.sentence().removeprefix('policy ')}\n")
    if saved["all"]:
        out.write(f"  saved   {saved['all'] / 1e6:,.{1 if saved['all'] >= 1e6 else 2}f} MB in the newest checkpoint{tables}\n"
                  f"  play    shoal play {where}{trusted}{simulator}\n"
                  f"  resume  shoal resume {where}{trusted}{_further(summary, unit)}\n")
    else:
        out.write("  saved   nothing: there is no checkpoint to play or resume; remove the run, or keep it for its logs\n")
    out.flush()


def _further(summary: Mapping[str, Any], unit: str) -> str:
    """What `shoal resume` needs besides the run: nothing where its goal is not reached, else a larger budget, in round numbers."""
    if summary.get("stopped_by") not in FINISHED:
        return ""
    unit = summary["stopped_by"] if summary["stopped_by"] in ("env_steps", "learner_steps", "seconds") else unit
    done = int(summary[unit])
    round_: int = 10 ** max(1 if unit == "seconds" else 3, int(math.log10(max(done, 1))))
    return f" --max-{unit.replace('_', '-')} {(done // round_ + 2) * round_}"


def _number(value: float | None, digits: int = 2) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"


# ---------------------------------------------------------------------------------------------- acting
@dataclass(frozen=True)
class Eval(Options):
    """Mean return of fresh episodes, played with a policy of the newest checkpoint: greedily, or with sampled actions where the
    run's own evaluations are (--eval.no-greedy). Of a folder of --seeds every seed is evaluated, and the last line is their mean
    with its 95 % interval."""

    env: str | None = None
    """The simulator, for a run that had none."""
    episodes: int = number(100, at_least=1)
    """How many episodes."""
    seed: int = number(1_000_000, at_least=0, below=2**53)
    """Seed of the environments."""
    against: str | None = None
    """Play matches on every side against random, perfect, another run's policy (RUN or RUN:POLICY) or module:function (observation
    -> action); by default as the run was evaluated."""
    best_response: int | None = number(None, at_least=1)
    """Train a new policy (ppo) for this many env steps against the run's and say how much it wins: a lower bound of the run's
    exploitability."""
    policy: str | None = None
    """best of all evaluated versions, or last; by default the run's own --policy. With several policies NAME, or NAME:last; by
    default the first."""
    checkpoint: str | None = None
    """A checkpoint by its name or its number of env steps, such as 000000120000 or 120000; the newest by default. Its last policy
    is taken, unless --policy says best."""
    trust: bool = False
    """Import modules that the run names, also from outside the installed environment."""


def eval_command(arguments: list[str]) -> int:
    path, options = _run_and_options(arguments, Eval, "shoal eval RUN")
    if options.best_response is not None and options.against is not None:
        raise ConfigError(f"--best-response {options.best_response} learns an opponent, and --against {options.against} names one; "
                          "give one of them")
    if (path / SEEDS).is_file():
        return _eval_seeds(path, options)
    run, name = _load_and_say(RunDir.open(path), options)
    if options.best_response is not None:
        found = best_response(run, name, options.best_response, options.episodes, options.seed)
        sys.stdout.write(f"{run.prepared.plan.env.name}: a best response learned in {options.best_response:,} env steps gets "
                         f"{found.sentence()}\nso exploitability is at least about {max(0.0, float(found.returns.mean())):.3f}\n")
        return 0
    _evaluate(run, name, options)
    return 0


def _eval_seeds(folder: Path, options: Eval) -> int:
    """Every seed that has a checkpoint, then their mean with its interval."""
    if options.best_response is not None:
        raise ConfigError(f"--best-response {options.best_response} is learned against one run, and {folder} holds several; give "
                          f"one of them, such as {folder / 'seed-0'}")
    found = []
    for rundir in seed_runs(folder):
        sys.stdout.write(f"{rundir.path.name}\n")
        if rundir.checkpoints().newest() is None:
            sys.stdout.write("it has no checkpoint yet\n")
            continue
        returns = _evaluate(*_load_and_say(rundir, options), options).returns
        found.append({"eval_return": float(returns.mean()), "eval_episodes": len(returns)})
    if not found:
        raise ConfigError(f"no seed of {folder} has a checkpoint; follow them with `shoal watch {folder}`")
    sys.stdout.write(f"{sentence(summary_of(found))}\n")
    return 0


def _evaluate(run: Run, name: str | None, options: Eval) -> Evaluation:
    result = run.evaluate(options.episodes, options.seed, _opponent(run, options), name)
    against = options.against or run.prepared.plan.experiment.against
    sys.stdout.write(f"{run.prepared.plan.env.name}{f' against {against}' if against else ''}: {result.sentence()}\n")
    return result


def _maker(home: Run, options: Play) -> OpponentMaker | None:
    """What --against of `shoal play` names."""
    from shoal.experiment.match_play import human_opponent

    if options.against == "human":
        return human_opponent(home, sys.stdout)
    found = _opponent(home, options)
    source = home.prepared.source
    return built_in_opponent(found, source.env, source.kwargs) if isinstance(found, str) else found


def _opponent(home: Run, options: Eval | Play) -> str | OpponentMaker | None:
    """What --against names: a built-in opponent, a run or one of its policies, or a function."""
    word = options.against
    if word is None or word in OPPONENTS:
        return word
    path, _, policy = word.rpartition(":") if ":" in word and not Path(word).exists() else (word, "", "")
    if Path(path).exists():
        return load(path, trust=options.trust).as_opponent(home, policy or None)
    if policy and path:
        return script_opponent(find(word), word)
    raise ConfigError(f"--against {word} is not an opponent; use one of {', '.join(OPPONENTS)}, or give the directory of a run "
                      "or module:function (or human, to play yourself: `shoal play`)")


@dataclass(frozen=True)
class Play(Options):
    """Watch a run's policy play; of a folder of --seeds the best seed's."""

    env: str | None = None
    """The simulator, for a run that had none."""
    episodes: int = number(1, at_least=1)
    """How many episodes."""
    seed: int = number(0, at_least=0, below=2**53)
    """Seed of the environment."""
    against: str | None = None
    """In games: on every side in turn against random, perfect, human (you), RUN, RUN:POLICY or module:function; without it the
    run's policies play for all agents."""
    policy: str | None = None
    """best of all evaluated versions, or last; by default the run's own --policy. Of several policies NAME, or NAME:last; the first
    by default."""
    checkpoint: str | None = None
    """A checkpoint by its name or its number of env steps; the newest by default. Its last policy is taken, unless --policy says
    best."""
    video: str | None = None
    """Write a film instead of showing it: FILE.gif or FILE.mp4."""
    trust: bool = False
    """Import modules that the run names, also from outside the installed environment."""


def play_command(arguments: list[str]) -> int:
    from shoal.experiment.match_play import has_several_agents, show_matches
    from shoal.experiment.playing import show, write_video

    path, options = _run_and_options(arguments, Play, "shoal play RUN")
    if options.video is not None and not options.video.endswith((".gif", ".mp4")):
        raise ConfigError(f"--video is {options.video}; it must end in .gif or .mp4")
    run, name = _load_and_say(run_or_best_seed(path, say), options)
    if isinstance(run.prepared.plan.env.target, RecordedEnv):
        raise run.prepared.plan.env.target.refuse()
    if has_several_agents(run):
        if options.video is not None:
            raise ConfigError(f"--video {options.video}: {run.prepared.plan.env.name} has several agents, and its games are shown "
                              "as text; leave --video out")
        show_matches(run, name, _maker(run, options), options.episodes, options.seed, sys.stdout)
    elif options.against is not None:
        raise ConfigError(f"--against {options.against} needs a game, and {run.prepared.plan.env.name} has one agent; leave it out")
    elif options.video is not None:
        write_video(run, options.episodes, options.seed, Path(options.video), sys.stdout)
    else:
        show(run, options.episodes, options.seed, sys.stdout)
    return 0


def _load_and_say(rundir: RunDir, options: Eval | Play) -> tuple[Run, str | None]:
    """The run, which of its policies is used, and in which version."""
    words = [] if options.policy is None else options.policy.split(":")
    versions = [word for word in words if word in ("best", "last")]
    names = [word for word in words if word not in versions]
    if len(versions) > 1 or len(names) > 1:
        raise ConfigError(f"--policy {options.policy} is not possible: give best, last, the name of a policy, or NAME:last")
    _say_modules(rundir.config(), options.trust)
    env = None if options.env is None else EnvRef.named(options.env).target
    version = {"policy": versions[0]} if versions else {}
    run = load(rundir.path, env=env, trust=options.trust, checkpoint=options.checkpoint, **version)
    name = names[0] if names else None
    sys.stdout.write(f"{f'{name}: ' if name else ''}{run.choice_of(name).sentence()}\n")
    return run, name


def _run_and_options(arguments: list[str], kind: type[Kind], usage: str) -> tuple[Path, Kind]:
    words, options = parse_command(kind, arguments, 1, usage)
    path = _one_run(words, usage)
    if not (path / SEEDS).is_file():
        RunDir.open(path)
    return path, options


def _one_run(words: list[str], usage: str) -> Path:
    if len(words) != 1:
        raise ConfigError(f"{usage}: give one run directory; `shoal runs` lists them")
    return Path(words[0])


def _say_modules(config: Mapping[str, Any], trust: bool) -> None:
    """A run directory is data, but using it imports the modules that it names: say which."""
    for line in check_trust(modules_of(config), trust):
        sys.stdout.write(f"{line}\n")
