"""`shoal tune`, `shoal tune resume`, `shoal tune show`, and `shoal.tune` in Python."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shoal.coordination.population.exploit import EXPLOIT_RULES, ExploitRule
from shoal.coordination.population.priors import Prior
from shoal.errors import ConfigError
from shoal.experiment.lock import alone
from shoal.experiment.parse import parse_train
from shoal.experiment.prepare import prepare
from shoal.telemetry.outputs import say
from shoal.tuning.coordinator import StudyCoordinator
from shoal.tuning.study import Study, StudySettings

__all__ = ["tune", "tune_command"]

USAGE = "shoal tune PRESET ENV --vary NAME=RANGE ... --every-env-steps N --max-env-steps M [options of shoal train]"
UNLIMITED = 10**9
MOST_MEMBERS = 10_000
OF_MEMBERS = ("run_dir", "policy")
FIXED = ("seed", "runtime", "run_dir", "max_env_steps", "max_learner_steps", "max_seconds", "until_return", "until", "env",
         "preset")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; usage: {USAGE}")


def tune_command(arguments: list[str]) -> int:
    if arguments[:1] in (["resume"], ["show"]):
        if len(arguments) != 2:
            raise ConfigError(f"shoal tune {arguments[0]} STUDY: give the folder of one study")
        study = Study.open(Path(arguments[1]))
        if arguments[0] == "show":
            sys.stdout.write(table(study))
            return 0
        return _go(study)
    parser = Parser(prog="shoal tune", usage=USAGE,
                    description="Train a population of runs and search for good values while they train.")
    parser.add_argument("preset")
    parser.add_argument("env")
    parser.add_argument("--vary", action="append", default=[], metavar="NAME=RANGE",
                        help="a value to search, such as algorithm.lr=loguniform(1e-4,1e-2); may be given several times")
    parser.add_argument("--population", type=int, default=8, help="how many runs train (default 8)")
    parser.add_argument("--every-env-steps", type=int, help="agent decisions after which a member may copy a better one")
    parser.add_argument("--max-env-steps", type=int, help="agent decisions of each member")
    parser.add_argument("--until-return", type=float, help="stop when a member reaches this return")
    parser.add_argument("--exploit", choices=EXPLOIT_RULES, default="truncation", help="who copies whom; none is random search")
    parser.add_argument("--resample", type=float, default=0.0,
                        help="probability of drawing a new value instead of perturbing it (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the study; members get the seeds that follow (default 0)")
    parser.add_argument("--workers", type=int, help="members that train at the same time (default: one per core)")
    parser.add_argument("--study", help="folder of the study (default: studies/<time>-<preset>-<env>)")
    known, rest = parser.parse_known_args(arguments)
    pairs = [word.partition("=") for word in known.vary]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--vary {name} has no range; write for instance {name}=loguniform(1e-4,1e-2)")
        if sum(name == other for other, _, _ in pairs) > 1:
            raise ConfigError(f"--vary {name} is given twice; give one range")
    settings = checked(known.preset, known.env, {name: text for name, _, text in pairs}, rest, population=known.population,
                       every_env_steps=known.every_env_steps, max_env_steps=known.max_env_steps, until_return=known.until_return,
                       exploit=known.exploit, resample=known.resample, seed=known.seed, workers=known.workers)
    return _go(Study.create(_folder(known.study, settings), settings))


def tune(preset: str, env: str, *, vary: Mapping[str, Prior], every_env_steps: int, max_env_steps: int | None = None,
         until_return: float | None = None, population: int = 8, exploit: ExploitRule = "truncation", resample: float = 0.0,
         seed: int = 0, workers: int | None = None, study: str | Path | None = None, **overrides: Any) -> Study:
    """Train a population and return the study: `study.best.policy.act(observation)`. Members are processes, so `env` is an id or
    module:callable. Everything else overrides a value of all members."""
    if not isinstance(env, str):
        raise ConfigError(f"env={env!r} is not possible: members are processes; give an id, or module:callable as text")
    settings = checked(preset, env, {name: str(prior) for name, prior in vary.items()}, _flags(overrides), population=population,
                       every_env_steps=every_env_steps, max_env_steps=max_env_steps, until_return=until_return, exploit=exploit,
                       resample=resample, seed=seed, workers=workers)
    found = Study.create(_folder(None if study is None else str(study), settings), settings)
    with alone(found.path):
        StudyCoordinator(found, lambda line: None).run()
    return found


def checked(preset: str, env: str, vary: Mapping[str, str], options: Sequence[str], *, population: int, every_env_steps: int | None,
            max_env_steps: int | None, until_return: float | None, exploit: ExploitRule, resample: float, seed: int,
            workers: int | None) -> StudySettings:
    """The settings, after a look at everything that can be wrong: nothing is written before."""
    if not vary:
        raise ConfigError('nothing is varied; give for instance --vary "algorithm.lr=loguniform(1e-4,1e-2)"')
    if every_env_steps is None or every_env_steps < 1:
        raise ConfigError("an interval needs a length of at least 1; give --every-env-steps N, long enough for an evaluation to "
                          "tell members apart")
    if max_env_steps is None and until_return is None:
        raise ConfigError("when does it end? Give --max-env-steps M for each member, or --until-return R")
    budget = UNLIMITED if max_env_steps is None else max_env_steps
    if budget < every_env_steps:
        raise ConfigError(f"--max-env-steps {budget} is less than one interval of --every-env-steps {every_env_steps}, so nobody "
                          "would ever copy; raise the one or lower the other")
    for name, value, least, most in (("population", population, 1, MOST_MEMBERS), ("workers", workers, 1, MOST_MEMBERS),
                                     ("resample", resample, 0, 1), ("seed", seed, 0, 2**53)):
        if value is not None and not least <= value <= most:
            raise ConfigError(f"--{name} {value:g} is not possible; give a number from {least} to {most:,}")
    if until_return is not None and not math.isfinite(until_return):
        raise ConfigError(f"--until-return {until_return} is not possible; give a finite number")
    for word in options:
        if (name := word.removeprefix("--").split("=")[0].replace("-", "_")) in OF_MEMBERS and word.startswith("--"):
            raise ConfigError(f"--{name.replace('_', '-')} is set for every member by the study; leave it out"
                              + (", or give --study FOLDER" if name == "run_dir" else ""))
    for name in vary:
        _check_varied(name.replace("-", "_"), exploit)
    if exploit not in EXPLOIT_RULES:
        raise ConfigError(f"--exploit {exploit} is not a rule; use {', '.join(EXPLOIT_RULES)}")
    words = list(options) if any(word.split("=")[0] == "--runtime" for word in options) else [*options, "--runtime", "inline"]
    settings = StudySettings(preset, env, dict(vary), population, every_env_steps, budget, until_return, exploit, resample, seed,
                             workers or len(os.sched_getaffinity(0)), tuple(words))
    for end in (0, -1):  # both ends of every range
        values = [word for name, prior in settings.priors.items()
                  for word in (f"--{name.replace('_', '-')}", str(prior.grid(2)[end]))]
        plan = parse_train([preset, env, *words, *values])
        plan.validate()
        prepare(plan)  # the environment and the network can be made
    return settings


def _check_varied(name: str, exploit: ExploitRule) -> None:
    """Refuse what belongs to the study itself, and what a copy would not fit."""
    if name in FIXED:
        raise ConfigError(f"--vary {name} is not possible: the study itself sets it for every member; vary values of the "
                          "algorithm, the architecture or the replay table")
    if name.startswith("net.") and exploit != "none":
        raise ConfigError(f"--vary {name} is not possible with --exploit {exploit}: a member cannot take over the weights of "
                          "another network; add --exploit none, or vary something else")


def _flags(overrides: Mapping[str, Any]) -> list[str]:
    """Python's keyword arguments as options of `shoal train`."""
    words: list[str] = []
    for name, value in overrides.items():
        *section, last = name.replace("_", "-").split(".")
        if isinstance(value, bool):
            words.append("--" + ".".join([*section, last if value else f"no-{last}"]))
        else:
            words += ["--" + ".".join([*section, last]), *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def _folder(given: str | None, settings: StudySettings) -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(settings.preset).stem}-{settings.env.replace('/', '_').replace(':', '_')}"
    return Path(given) if given else Path("studies") / name


def _go(study: Study) -> int:
    with alone(study.path, "members write checkpoints and end"):
        say(f"study {study.path}: {study.settings.population} members, {study.settings.workers} at a time")
        try:
            StudyCoordinator(study, say).run()
        except KeyboardInterrupt:
            say(f"stopped by hand; every member continues from its newest checkpoint with `shoal tune resume {study.path}`")
            return 130
    sys.stdout.write(table(study))
    return 0


def table(study: Study) -> str:
    """The members, best first."""
    members = sorted(study.members(), key=lambda one: -1e30 if one.fitness is None else one.fitness, reverse=True)
    lineage = study.lineage()
    names = list(study.settings.vary)
    head = ["member", "env steps", "fitness", *names, "copied", "ancestor"]
    rows = [[str(one.number), f"{one.env_steps:,}", "-" if one.fitness is None else f"{one.fitness:.2f}",
             *(f"{one.values[name]:.4g}" if isinstance(one.values[name], float) else str(one.values[name]) for name in names),
             str(sum(row["event"] == "copy" and row["member"] == one.number for row in lineage)), str(one.ancestor)]
            for one in members]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    known = [one.fitness for one in members if one.fitness is not None]
    mean = f", mean fitness {sum(known) / len(known):.2f}" if known else ""
    lines.append(f"{len({one.ancestor for one in members})} of {len(members)} ancestors are left{mean}")
    return "\n".join(lines) + "\n"
