"""What can be wrong with a study, found before anything is written."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.coordination.population.exploit import EXPLOIT_RULES, ExploitRule
from shoal.coordination.population.priors import Range
from shoal.errors import ConfigError
from shoal.experiment.parse import parse_train
from shoal.experiment.prepare import Prepared, prepare
from shoal.experiment.references import import_path
from shoal.experiment.values import value_of, with_values
from shoal.tuning.member_run import value_words
from shoal.tuning.searches import SEARCH_RULES, SearchRule
from shoal.tuning.study import MOST_MEMBERS, StudySettings, check_bounds

__all__ = ["budget", "checked", "env_word", "member_options"]

UNLIMITED = 10**9
INTERVAL, INTERVALS = 20_000, 10  # env steps of an interval, and intervals, where nothing is given
MEMBERS = 8
OF_MEMBERS = ("run_dir", "policy")
OTHER_GOALS = {"max_learner_steps": "max-env-steps", "max_seconds": "max-env-steps", "until": "until-return"}
"""Of a run, by what a study has in their place: they would hold for a member's first interval only."""
FIXED = ("seed", "runtime", "run_dir", "max_env_steps", "max_learner_steps", "max_seconds", "until_return", "until", "env",
         "preset")
KEEP_TABLE = {"--replay.checkpoint", "--replay.no-checkpoint", "--no-replay.checkpoint"}
OF_SEARCH = {"exploit": "population", "resample": "population", "points": "grid", "reduction": "halving"}
"""Options that mean something to one kind of search only."""


def checked(preset: str, env: str, vary: Mapping[str, str], options: Sequence[str], *, every_env_steps: int | None,
            max_env_steps: int | None, until_return: float | None, search: SearchRule, population: int | None,
            exploit: ExploitRule | None, resample: float | None, points: int | None, reduction: int | None, seed: int,
            workers: int | None, cluster: str | None) -> StudySettings:
    """The settings, after a look at everything that can be wrong."""
    if not vary:
        raise ConfigError('nothing is varied; give for instance --vary "algorithm.lr=loguniform(1e-4,1e-2)"')
    _check_rules(search, {"exploit": exploit, "resample": resample, "points": points, "reduction": reduction})
    check_bounds({"population": population, "workers": workers, "resample": resample, "points": points, "reduction": reduction,
                  "seed": seed})
    interval, most = budget(search, every_env_steps, max_env_steps, until_return)
    words = member_options(preset, env, options, interval < most)
    ranges = {name.replace("-", "_"): text for name, text in vary.items()}  # as config.json names them
    settings = StudySettings(preset, env, ranges, population or MEMBERS, interval, most, until_return, search,
                             exploit or "truncation", resample or 0.0, points or 3, reduction or 3, seed, workers, cluster, words)
    for name in settings.vary:
        _check_varied(name, settings)
    settings = replace(settings, vary=_as_options_want(settings))
    if search == "grid":
        settings = _on_a_grid(settings, population)
    for end in (0, -1):  # both ends of every range
        _prepared(settings, {name: prior.grid(2)[end] for name, prior in settings.priors.items()})
    if search == "population":
        _check_copies(settings)
    return settings


def _prepared(settings: StudySettings, values: Mapping[str, object]) -> Prepared:
    """A member with these values: the environment and the network can be made."""
    plan = parse_train([settings.preset, settings.env, *settings.options, *value_words(values)])
    plan.validate()
    return prepare(plan)


def _check_copies(settings: StudySettings) -> None:
    """Refuse values between which the state of a learner differs: other networks, optimisers or statistics."""
    usual = {name: prior.grid(2)[0] for name, prior in settings.priors.items()}
    for name, prior in settings.priors.items():
        states = {}
        for value in prior.grid(2):
            state = _prepared(settings, {**usual, name: value}).algorithm.learn(0).state
            states[str(value)] = {part: tensor.shape for part, tensor in state.items()}
        (first, shapes), *others = states.items()
        other = next((value for value, found in others if found != shapes), None)
        if other is not None:
            raise ConfigError(f"--vary {name} is not possible with --search population: a member with {first} cannot take over the "
                              f"state of one with {other}; use --search random, grid or halving, or vary something else")


def _check_rules(search: str, given: Mapping[str, object]) -> None:
    if search not in SEARCH_RULES:
        raise ConfigError(f"--search {search} is not a kind of search; use {', '.join(SEARCH_RULES)}")
    for name, value in given.items():
        if value is not None and search != OF_SEARCH[name]:
            raise ConfigError(f"--{name} {value} means nothing to --search {search}; leave it out, or use --search "
                              f"{OF_SEARCH[name]}")
    if given["exploit"] is not None and given["exploit"] not in EXPLOIT_RULES:
        raise ConfigError(f"--exploit {given['exploit']} is not a rule; use {', '.join(EXPLOIT_RULES)}")


def budget(search: SearchRule, every: int | None, most: int | None, until_return: float | None) -> tuple[int, int]:
    """Env steps of an interval, and of a member in all. What is not given follows: a tenth of a member's steps, ten intervals."""
    if until_return is not None and not math.isfinite(until_return):
        raise ConfigError(f"--until-return {until_return} is not possible; give a finite number")
    if most is None and until_return is None:
        most = INTERVALS * (INTERVAL if every is None else every)
    if every is None and most is not None:
        every = most if search in ("random", "grid") else max(1, most // INTERVALS)  # those two compare nobody on the way
    every = INTERVAL if every is None else every
    if every < 1:
        raise ConfigError(f"--every-env-steps {every} is not possible; an interval needs at least 1, and enough for an evaluation "
                          "to tell members apart")
    most = UNLIMITED if most is None else most
    if most < every:
        raise ConfigError(f"--max-env-steps {most} is less than one interval of --every-env-steps {every}, so nobody "
                          "would ever be compared; raise the one or lower the other")
    return every, most


def member_options(preset: str, env: str, given: Sequence[str], intervals: bool) -> tuple[str, ...]:
    """Options of every member. Unless they say otherwise, each is one process, and replay tables outlive the end of an interval."""
    for word in given:
        if (name := word.removeprefix("--").split("=")[0].replace("-", "_")) in OF_MEMBERS and word.startswith("--"):
            raise ConfigError(f"--{name.replace('_', '-')} is set for every member by the study; leave it out"
                              + (", or give --study FOLDER" if name == "run_dir" else ""))
        if name in OTHER_GOALS and word.startswith("--"):
            raise ConfigError(f"--{name.replace('_', '-')} does not end the members of a study; give --{OTHER_GOALS[name]}")
    names = {word.split("=")[0] for word in given}
    words = list(given) if "--runtime" in names else [*given, "--runtime", "inline"]
    plan = parse_train([preset, env, *words])
    if not plan.experiment.eval.enabled:
        raise ConfigError("--no-eval.enabled leaves nothing to compare members by; leave it out")
    if intervals and not names & KEEP_TABLE and plan.algorithm.from_replay:
        words.append("--replay.checkpoint")
    return tuple(words)


def _check_varied(name: str, settings: StudySettings) -> None:
    """Refuse what belongs to the study itself, and what a copy would not fit."""
    if name in FIXED:
        raise ConfigError(f"--vary {name} is not possible: the study itself sets it for every member; vary values of the "
                          "algorithm, the architecture or the replay table")
    if name.startswith("net.") and settings.search == "population":
        raise ConfigError(f"--vary {name} is not possible with --search population: a member cannot take over the weights of "
                          "another network; use --search random, grid or halving, or vary something else")


def _as_options_want(settings: StudySettings) -> dict[str, str]:
    """The ranges, of numbers with a fraction where the option takes them: uniform(0, 1) of an entropy is not 0 or 1."""
    experiment = parse_train([settings.preset, settings.env, *settings.options]).experiment
    ranges = dict(settings.vary)
    for name, prior in settings.priors.items():
        if isinstance(prior, Range) and prior.whole:
            with contextlib.suppress(ConfigError):  # it takes no single number, or is not there: `_prepared` says so
                low, high = (value_of(with_values(experiment, {name: bound}, ""), name) for bound in (prior.low, prior.high))
                ranges[name] = str(replace(prior, low=low, high=high))
    return ranges


def _on_a_grid(settings: StudySettings, population: int | None) -> StudySettings:
    """With a member for each point."""
    count = math.prod(len(prior.grid(settings.points)) for prior in settings.priors.values())
    if population not in (None, count):
        raise ConfigError(f"--population {population} is not possible: the grid has {count} points, one for each member; leave it "
                          "out, or change --points")
    if count > MOST_MEMBERS:
        raise ConfigError(f"the grid has {count:,} points, and a study has at most {MOST_MEMBERS:,} members; lower --points")
    return replace(settings, population=count)


def env_word(env: Any) -> str:
    """What other programs find an environment by."""
    word = env if isinstance(env, str) else import_path(env) if callable(env) else None
    if word is None:
        what = getattr(env, "__qualname__", repr(env))
        raise ConfigError(f"env={what} is not possible: members are programs of their own, which import their environment; give an "
                          "id, or a class or function of a module: put it into a file such as my_env.py, and `import my_env`")
    return word
