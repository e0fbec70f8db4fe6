"""Checks every case when a suite is read, so that no run is wasted and each measures what it says.

A preset is checked as `shoal train` does before it starts a process: one environment is made and one graph drawn. What depends on
the machine (a missing package, a GPU, a cluster, a checkout of the repository) is not the fault of the suite: it becomes a row with
the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from shoal.bench import checkout
from shoal.bench.suite import Job, SuiteCase
from shoal.errors import ConfigError, ShoalError

if TYPE_CHECKING:
    from shoal.experiment.config import Plan

__all__ = ["check"]

OF_THE_CASE = {"preset": "preset", "env": "env", "runtime": "runtime", "seed": "seeds", "until_return": "until_return",
               "max_env_steps": "max_env_steps", "max_seconds": "max_seconds"}
"""Settings of the experiment that a case gives in a field of its own."""
GOALS = ("seed", "until_return", "max_env_steps", "max_seconds")
"""Settings that do not change which role does what."""


def check(case: SuiteCase, where: str) -> None:
    try:
        _check_numbers(case)
        if case.workload is None and not case.env:
            raise ConfigError("it names no environment; add env = \"CartPole-v1\"")
        if case.preset:
            _check_preset(case)
        elif found := checkout.benchmarks():
            found.runner_of(case).check(case)
    except ShoalError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_numbers(case: SuiteCase) -> None:
    for name in ("max_seconds", "max_env_steps", "limit_seconds", "kill_every"):
        value = getattr(case, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value} is not possible: give more than 0")
    if not 0 <= case.warm_seconds < math.inf:
        raise ConfigError(f"warm_seconds={case.warm_seconds} is not possible: give 0 or more")
    if case.max_seconds is not None and case.warm_seconds >= case.max_seconds:
        raise ConfigError(f"warm_seconds={case.warm_seconds:g} leaves nothing of max_seconds={case.max_seconds:g} to measure; give "
                          "less warm_seconds, or more max_seconds")
    if case.until_return is not None and not math.isfinite(case.until_return):
        raise ConfigError(f"until_return={case.until_return} is not possible: give a number, or leave it out")
    if not case.seeds:
        raise ConfigError("it has no seeds; add seeds = [1]")
    if min(case.seeds) < 0:
        raise ConfigError(f"seeds={list(case.seeds)} is not possible: give 0 or more")
    for name in ("seeds", "actors", "who"):
        values = getattr(case, name)
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise ConfigError(f"{name}={list(values)} has {twice[0]!r} twice; both would be the same run, so give it once")


# ---------------------------------------------------------------------------------------------- presets
def _check_preset(case: SuiteCase) -> None:
    """Refuse what `shoal train` would refuse, before any process is started."""
    if not (case.max_env_steps or case.max_seconds):
        raise ConfigError("it would never end; add max_env_steps or max_seconds")
    if case.kill and case.runtime != "local":
        raise ConfigError(f"kill with runtime={case.runtime!r} is not possible: only with runtime = \"local\" are roles processes "
                          "that can be killed")
    names = {**OF_THE_CASE, **({"actors": "actors"} if case.actors else {})}
    for key in (key for key in case.overrides if key in names):
        raise ConfigError(f"overrides has {key!r}, which the case gives itself; write {names[key]} = ... beside overrides")
    if checkout.missing_checkout(case) is not None:
        return
    runs = [Job(case, case.seeds[0], actors).arguments() for actors in case.actors or (None,)]
    plans = [_plan({**values, "demos": "to be recorded"} if case.expert else values) for values in runs]
    for plan in plans:
        plan.validate()
    if plans[-1].experiment.envs.backend != "envpool":  # which has names of its own
        _check_env(case.env)
    if case.limit and (found := checkout.benchmarks()):
        found.check_limit(case, plans[-1])
    for values in runs:
        _check_roles(case, values)
    if case.expert:
        _check_expert(case)


def _plan(values: Mapping[str, Any]) -> Plan:
    from shoal.experiment.references import EnvRef
    from shoal.experiment.run import plan_of

    more = {name: value for name, value in values.items() if name not in ("preset", "env")}
    return plan_of(values["preset"], EnvRef.named(values["env"]).target, None, None, more)


@cache
def _check_env(name: str) -> None:
    """Refuse an environment that does not exist; none is made."""
    from shoal.envs.atari import registered
    from shoal.envs.builtin.games import GAMES
    from shoal.experiment.references import EnvRef

    try:
        if isinstance(EnvRef.named(name).target, str) and name not in GAMES:  # which gymnasium does not know
            registered(name)
    except ConfigError as error:
        if not (name.startswith("ALE/") and _lacks_package(error)):
            raise


def _check_expert(case: SuiteCase) -> None:
    from shoal.experiment.data_commands import RecordOptions, source_of

    try:
        source_of(case.expert, case.env, RecordOptions())
    except ShoalError as error:
        raise ConfigError(f"expert={case.expert!r} is not possible: {error}") from None


def _check_roles(case: SuiteCase, values: Mapping[str, Any]) -> None:
    """Check that the algorithm can act in the environment, and that the processes to kill will exist. Where the machine lacks a
    package or a GPU, this cannot be checked."""
    import torch

    if case.gpu and not torch.cuda.is_available():
        return
    try:
        _try(json.dumps({name: value for name, value in values.items() if name not in GOALS}, sort_keys=True), case.kill)
    except ShoalError as error:
        if not _lacks_package(error):
            raise


@cache
def _try(arguments: str, kill: Sequence[str]) -> None:
    """Once for the same arguments, which variants and suites share. Demonstrations are recorded later."""
    from shoal.experiment.prepare import prepare

    plan = _plan(json.loads(arguments))
    ready = prepare(replace(plan, experiment=replace(plan.experiment, offline=False)))
    if kill and (found := checkout.benchmarks()):
        found.check_kill(kill, ready, plan.experiment.actors == "auto")


def _lacks_package(error: BaseException | None) -> bool:
    import gymnasium as gym

    while error is not None:
        if isinstance(error, ImportError | gym.error.DependencyNotInstalled):
            return True
        error = error.__cause__ or error.__context__
    return False
