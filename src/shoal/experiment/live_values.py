"""Values that may change during a run: which there are, whether a change makes sense, and where it arrives.

A field is live if its Config declares it (`number(..., live=True)`): its users read it from the options at every use, so a
change in place reaches an actor with its next weights and a learner with its next update, also where updates are CUDA graphs (the
learning rate and the weight of the entropy are inputs of the graph). All else was used to lay out memory, wires and networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from shoal.errors import ConfigError
from shoal.experiment.config import Plan
from shoal.experiment.values import keys, with_values
from shoal.options import is_live
from shoal.roles.replay_config import ReplayConfig

__all__ = ["changed_plan", "live_keys"]

RATIO = "replay.samples_per_insert"


def live_keys(plan: Plan) -> list[str]:
    """All that may change in a run of this plan, as `shoal set` names it."""
    return [key for key in keys(plan.experiment) if _may_change(plan, key)]


def _may_change(plan: Plan, key: str) -> bool:
    experiment = plan.experiment
    return (_declared(experiment, key) and (key != RATIO or _limited(plan))
            and (not key.startswith("league.") or experiment.policies == "league"))


def _limited(plan: Plan) -> bool:
    """Whether a table between actors and learner holds up one or the other."""
    return plan.algorithm.from_replay and not plan.experiment.offline


def _declared(experiment: Any, key: str) -> bool:
    *path, name = key.split(".")
    options = experiment
    for part in path:
        options = getattr(options, part)
    return is_dataclass(options) and is_live(options, name)


def changed_plan(plan: Plan, values: Mapping[str, Any], running: bool = True) -> Plan:
    """The plan with these values; ConfigError where one of them cannot change, perhaps only while the run is running, or makes no
    sense."""
    experiment = with_values(plan.experiment, values, "")  # says it where there is no such value, or another kind is needed
    for key in values:
        if key == RATIO and not _limited(plan):
            raise ConfigError(f"{key} does not fit a run without a replay table between actors and learner. What can change: "
                              f"{', '.join(live_keys(plan))}")
        if not _may_change(plan, key):
            raise ConfigError(f"{key} cannot change during a run: networks, wires or stored data were made with it; start "
                              f"another run. What can change: {', '.join(live_keys(plan))}")
        if running and key.startswith("algorithm.") and _in_group(plan):
            raise ConfigError(f"{key} cannot change while several learners make one update: one of them would use it sooner than "
                              "the others, and they would drift apart; stop the run, set it, and resume")
    if RATIO in values:
        _check_ratio(plan, experiment.replay, running)
    if "actors" in values:
        if not isinstance(values["actors"], int):
            raise ConfigError(f"actors={values['actors']} is not possible during a run: give a number")
        experiment = replace(experiment, autoscale=replace(experiment.autoscale, start=None, most=None))
    changed = replace(plan, experiment=experiment)
    changed.validate()
    return changed


def _check_ratio(plan: Plan, replay: ReplayConfig, running: bool) -> None:
    given = replay.samples_per_insert
    if running and plan.architecture.needs_relabel:
        raise ConfigError(f"{RATIO} cannot change while --architecture {plan.names.architecture} runs, whose tables have ratios of "
                          "their own; stop the run, set it, and resume")
    if (given is None) != (plan.experiment.replay.samples_per_insert is None):
        words = "none: this run has a ratio, and" if given is None else f"{given:g}: this run has none, and"
        raise ConfigError(f"{RATIO}={words} its wires were made for that; start another run")
    if given is not None:
        replay.band(plan.actor_count)  # says it where --replay.tolerance is too small for it


def _in_group(plan: Plan) -> bool:
    """Whether several roles make the same update."""
    architecture = plan.architecture
    alike = architecture.takes_scores and architecture.learner_role == architecture.scaled_role  # every worker of es learns
    return plan.experiment.learners > 1 or (alike and plan.actor_count > 1)
