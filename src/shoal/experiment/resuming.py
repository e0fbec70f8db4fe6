"""What a resumed run continues with: its own plan, with new goals, and what its earlier parts add up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from shoal.errors import ConfigError
from shoal.experiment.checkpoints import read_meta
from shoal.experiment.config import Experiment, Plan, check_ray
from shoal.experiment.lock import alone
from shoal.experiment.prepare import plan_from_json
from shoal.experiment.references import check_trust, modules_of
from shoal.experiment.rundir import RunDir, numbers
from shoal.experiment.session import Base
from shoal.experiment.values import with_values
from shoal.options import flag
from shoal.telemetry.snapshot import COUNTERS

__all__ = ["FINISHED", "GOALS", "NothingLeft", "base_of", "resume_plan", "with_new_values"]

BUDGETS = ("max_env_steps", "max_learner_steps", "max_seconds")
GOALS = ("until_return", "until", *BUDGETS)
FINISHED = ("return", "until", "env_steps", "learner_steps", "seconds")
"""What a run is `stopped_by` that has reached a goal."""


class NothingLeft(ConfigError):
    """A run has reached what it is asked for."""


def resume_plan(rundir: RunDir, overrides: Mapping[str, Any], env: Any = None, trust: bool = False) -> Plan:
    """The plan of a run with new stop conditions, after a look at whether there is anything left to do."""
    config = rundir.config()
    if env is None:
        check_trust(modules_of(config), trust)
    plan = plan_from_json(config, str(rundir.config_file), env)
    with alone(rundir.path):  # not those of a run that goes on
        rundir.checkpoints().set_damaged_aside()
    if rundir.checkpoints().newest() is None:
        raise ConfigError(f"{rundir.path} has no whole checkpoint to resume from; start a new run with `shoal train`")
    experiment = with_new_values(_new_goals(rundir, plan.experiment, overrides), overrides)
    if overrides.get("offline") is False:
        experiment = _going_online(rundir, plan, experiment)
    check_ray(experiment, plan.experiment.ray)
    return replace(plan, experiment=experiment, trust=trust)


def with_new_values(experiment: Experiment[Any, Any], overrides: Mapping[str, Any]) -> Experiment[Any, Any]:
    """A new budget replaces all old ones, and a new goal the old one."""
    if any(name in overrides for name in BUDGETS):
        experiment = replace(experiment, max_env_steps=None, max_learner_steps=None, max_seconds=None)
    if "until" in overrides or "until_return" in overrides:
        experiment = replace(experiment, until_return=None, until=None)
    if "actors" in overrides:  # another number, or found anew: what moved the old one does not hold, perhaps on another cluster
        experiment = replace(experiment, autoscale=replace(experiment.autoscale, start=None, most=None))
    return with_values(experiment, overrides, "")


@runtime_checkable
class _Ramped(Protocol):
    """The options of an architecture in which the share of the actors' own data rises."""

    online_after: int


def _going_online(rundir: RunDir, plan: Plan, experiment: Experiment[Any, Any]) -> Experiment[Any, Any]:
    """Actors begin now, after the updates that were made offline."""
    if not plan.experiment.offline:
        raise ConfigError(f"{rundir.path} is online already: its actors act; leave --online out")
    if isinstance(experiment.architecture, _Ramped):
        done = base_of(rundir).totals["learner_steps"]
        experiment = with_values(experiment, {"architecture.online_after": int(done)}, "")
    return experiment


def _new_goals(rundir: RunDir, experiment: Experiment[Any, Any], overrides: Mapping[str, Any]) -> Experiment[Any, Any]:
    """A return that was reached is not a goal any more; NothingLeft where no other one is left."""
    if rundir.summary().get("stopped_by") in ("return", "until"):
        if not overrides.keys() & set(GOALS):
            goal = f"return of {experiment.until_return:g}" if experiment.until is None else f'goal "{experiment.until}"'
            raise NothingLeft(f"{rundir.path} has reached its {goal}; to continue, give "
                              "--max-env-steps, --max-seconds or a higher --until-return")
        experiment = replace(experiment, until_return=None, until=None)
    base, anew = base_of(rundir), any(name in overrides for name in BUDGETS)
    for name, done in zip(BUDGETS, (base.totals["env_steps"], base.totals["learner_steps"], base.seconds), strict=True):
        limit = overrides.get(name) if anew else getattr(experiment, name)
        if isinstance(limit, int | float) and 0 < limit <= done:
            raise NothingLeft(f"{rundir.path} has already done {done:,.0f} of {flag(name)} {limit:,}; give a "
                              f"larger {flag(name)}")
    return experiment


def base_of(rundir: RunDir) -> Base:
    """What earlier parts of a run add up to. Work done after the newest checkpoint was lost, but it was done."""
    newest = rundir.checkpoints().newest()
    meta = read_meta(newest) if newest is not None else {}
    last = rundir.last_snapshot()
    summary = rundir.summary()  # measured last of all
    saved = numbers(meta.get("totals", {}))
    meta, last, summary = numbers(meta), numbers(last), numbers(summary)
    totals = {name: max(saved.get(name, 0), last.get(name, 0), summary.get(name, 0)) for name in {*COUNTERS, *saved}}
    seconds = max(part.get("seconds", 0.0) for part in (meta, last, summary))
    return Base(totals, seconds, summary.get("peak_memory_mb", 0.0), summary.get("cpu_seconds", 0.0), last)
