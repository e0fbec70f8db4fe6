"""Whether a case with a preset can be run as it says: its algorithm in its environment, its limit, its victims, its expert.

One environment is made and one graph drawn, as `shoal train` does before it starts a process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import gymnasium as gym
import torch

from shoal import algorithms
from shoal.bench.cases import CASES
from shoal.bench.suite import Job, SuiteCase
from shoal.errors import ConfigError, ShoalError
from shoal.experiment.config import Plan, replayed
from shoal.experiment.data_commands import Record, source_of
from shoal.experiment.prepare import Prepared, prepare
from shoal.experiment.references import EnvRef
from shoal.experiment.run import plan_of

__all__ = ["check_expert", "check_limit", "check_roles", "plan_for"]


GOALS = ("seed", "until_return", "max_env_steps", "max_seconds")
"""What makes no difference to who does what."""


def plan_for(case: SuiteCase, actors: int | str | None) -> Plan:
    values = Job(case, case.seeds[0], actors).arguments()
    return _plan({**values, "demos": "to be recorded"} if case.expert else values)


def _plan(values: Mapping[str, Any]) -> Plan:
    more = {name: value for name, value in values.items() if name not in ("preset", "env")}
    return plan_of(values["preset"], EnvRef.named(values["env"]).target, None, None, more)


def check_limit(case: SuiteCase, plan: Plan) -> None:
    known = sorted({one.scene.env for one in CASES})
    if case.env not in known:
        raise ConfigError(f"limit=true is not possible: the parts of a limit are known for {' and '.join(known)}; write limit = "
                          "false")
    if replayed(algorithms.named(plan.names.algorithm)[1]):
        raise ConfigError(f"limit=true is not possible: {plan.names.algorithm} learns from replay, and is held to its samples per "
                          "insert, not by the parts of that limit; write limit = false")


def check_expert(case: SuiteCase) -> None:
    try:
        source_of(case.expert, case.env, Record())
    except ShoalError as error:
        raise ConfigError(f"expert={case.expert!r} is not possible: {error}") from None


def check_roles(case: SuiteCase, actors: int | str | None) -> None:
    """Whether the algorithm can act there, and whether those who are to die will be there. Where the machine lacks a package or a
    GPU for it, nobody can tell."""
    if case.kill and case.runtime != "local":
        raise ConfigError(f"kill with runtime={case.runtime!r} is not possible: only with runtime = \"local\" are roles processes "
                          "that can be killed")
    if case.gpu and not torch.cuda.is_available():
        return
    values = {name: value for name, value in Job(case, case.seeds[0], actors).arguments().items() if name not in GOALS}
    try:
        _tried(json.dumps(values, sort_keys=True), case.kill)
    except ShoalError as error:
        if not _lacks_package(error):
            raise


@cache
def _tried(arguments: str, kill: Sequence[str]) -> None:
    """Once for the same arguments, which variants and suites share; demonstrations are recorded later."""
    plan = _plan(json.loads(arguments))
    ready = prepare(replace(plan, experiment=replace(plan.experiment, offline=False)))
    if kill:
        _check_kill(kill, ready, plan.experiment.actors == "auto")


def _check_kill(kill: Sequence[str], ready: Prepared, auto: bool) -> None:
    program = ready.program()
    members = [[f"{name} {index}" for name, index in place.members if index < program.nodes[name].start]
               for place in program.places.values()]
    titles = [" + ".join(names) for names in members if names]  # as `ps` shows them
    for victim in kill:
        roles = {part.rpartition(" ")[0] for part in victim.split(" + ")}
        if not (roles <= set(program.nodes) if auto else victim in titles):  # auto: how many there are is known when it runs
            raise ConfigError(f"kill={victim!r} is not possible: no process is called that; there are {', '.join(titles)}")


def _lacks_package(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ImportError | gym.error.DependencyNotInstalled):
            return True
        error = error.__cause__ or error.__context__
    return False
