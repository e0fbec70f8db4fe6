"""`--actors auto`: decides how many actors a plan has, of how many environments, and in which processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from shoal.coordination.autoscale import ACTORS_PER_CORE, AutoscaleConfig
from shoal.coordination.calibration import ActorLayout
from shoal.errors import ConfigError
from shoal.experiment.calibration_cache import recall, remember
from shoal.experiment.config import AutoChoice, Plan
from shoal.experiment.machine_checks import drawn
from shoal.experiment.preload import PRELOAD
from shoal.experiment.prepare import prepare
from shoal.experiment.sizing import kept_to
from shoal.runtime import Program
from shoal.runtime.fork_server_client import ForkServerClient

__all__ = ["calibrate_command", "laid_out"]


def laid_out(plan: Plan, say: Callable[[str], None], anew: bool = False) -> Plan:
    """The plan with actors, environments per actor and places decided, and whether the number of actors moves from there.

    On the local runtime and on a cluster calibration finds them, if the architecture can put everything into one place. Inline,
    for other architectures, with replay (whose rate is chosen, not found) and with --autoscale.start, `actor_count` decides. What
    `shoal calibrate` found earlier is taken as it is, unless it is to be measured again (`anew`) and kept.
    """
    experiment = plan.experiment
    if experiment.actors != "auto":
        return plan
    wishes = [name for name in ("start", "most") if getattr(experiment.autoscale, name) is not None]
    if wishes and (why := _fixed(plan)):
        raise ConfigError(f"--autoscale.{wishes[0]} has no use here: {why}; leave it out")
    open_ = experiment.runtime != "inline" and plan.architecture.one_place and not plan.algorithm.from_replay
    most = ACTORS_PER_CORE * _cores()
    if open_:
        with _ground(plan) as (room, most):
            if experiment.autoscale.start is None:
                plan = _calibrated(plan, room, say, anew)
    how = "by the number of cores" if _acting(plan) else "as the architecture has it"
    how = "by --autoscale.start" if experiment.autoscale.start is not None else how
    plan = _following(plan, most, say if open_ else lambda line: None)
    tried = plan.found.tried if plan.found else {}
    return dataclasses.replace(plan, found=AutoChoice(_words(plan), plan.found.how if plan.found else how, tried))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _ground(plan: Plan) -> Iterator[tuple[int, int]]:
    """Where actors would run: how many have a core each, and how many there may be. A cluster that was joined says both; on this
    machine several processes that wait for a simulator share a core."""
    experiment, ours = plan.experiment, (_cores(), ACTORS_PER_CORE * _cores())
    if experiment.runtime != "ray":
        yield ours
        return
    from shoal.runtime.ray import connected

    with connected(experiment.ray, sum(ours)) as room_for:
        room = None if room_for is None else room_for(drawn(prepare(plan)))
        yield ours if room is None else (room, room)


def _acting(plan: Plan) -> int:
    """How many actors there are."""
    return plan.actor_count if plan.architecture.has_actors else 0


def _words(plan: Plan) -> str:
    experiment = plan.experiment
    return str(ActorLayout(_acting(plan), experiment.architecture.envs_per_actor, plan.one_place, experiment.learner_threads,
                           experiment.learners, experiment.runtime == "inline"))


def _fixed(plan: Plan) -> str:
    """Why the number of actors cannot follow the learner; empty where it can."""
    names, experiment = plan.names, plan.experiment
    if experiment.runtime == "inline":
        return "--runtime inline runs all roles in one thread"
    if experiment.several or experiment.policies == "league":
        return "several policies share the actors"
    if plan.algorithm.from_replay:
        return f"--algorithm {names.algorithm} learns from a replay table, whose rate is chosen"
    return plan.architecture.fixed_actors(experiment.architecture)


def _following(plan: Plan, most: int, say: Callable[[str], None]) -> Plan:
    """Let the number of actors follow the learner from here on, where it can: up to the number that was given, or else `most`."""
    experiment, why = plan.experiment, _fixed(plan)
    start = plan.actor_count
    if why:
        say(f"the number of actors stays {start}: {why}")
        scale = dataclasses.replace(experiment.autoscale, start=None, most=None)
    else:
        most = experiment.autoscale.most or max(start, most)
        say(f"the number of actors follows the learner: {start} at first, 1 to {most}")
        scale = dataclasses.replace(experiment.autoscale, start=start, most=most)
    return dataclasses.replace(plan, experiment=dataclasses.replace(experiment, actors=start, autoscale=scale))


def _calibrated(plan: Plan, cores: int, say: Callable[[str], None], anew: bool) -> Plan:
    """The plan with the fastest of the layouts that were tried, now or earlier. On a cluster actors have processes of their own,
    unless the user asked for one place: a single process would leave the other nodes idle."""
    experiment, architecture = plan.experiment, plan.experiment.architecture
    drawn(prepare(plan))  # find what is wrong before anything is tried
    from shoal.coordination import calibrate, candidates

    rows = architecture.envs_per_actor * plan.slots_per_batch
    ray = experiment.ray if experiment.runtime == "ray" else None
    layouts = [layout for layout in candidates(rows, cores)
               if (layout.one_place or not architecture.one_place)  # what was asked for stays
               and (ray is None or layout.one_place == architecture.one_place)
               and not (layout.one_place and layout.actors < experiment.learners)
               and (layout.one_place or layout.actors <= (experiment.autoscale.most or layout.actors))]
    if not layouts:
        raise ConfigError("--actors auto has no layout to choose from with --architecture.one-place, "
                          f"{experiment.learners} learners and {cores} cores; give --actors {experiment.learners} instead")

    def draw(layout: ActorLayout) -> Program:
        trial = _with(plan, layout)
        quiet = dataclasses.replace(trial.experiment.eval, enabled=False)
        silent = dataclasses.replace(trial.experiment, autoscale=AutoscaleConfig(), eval=quiet, until_return=None)
        return prepare(dataclasses.replace(trial, experiment=silent)).program()

    date, trials = ("", []) if anew or ray is not None else recall(plan, cores)
    trials = [trial for trial in trials if trial.layout in layouts]
    how = f"by trying on {date} (shoal calibrate)" if trials else "by trying"
    if not trials:
        say(f"calibrating: {rows} environments per batch on {cores} cores")
        with contextlib.nullcontext() if ray is not None else ForkServerClient(PRELOAD) as fork_server:
            trials = calibrate(layouts, draw, say, experiment.faults, fork_server, ray)
        if anew and trials and ray is None:
            say(f"kept in {remember(plan, cores, trials)}")
    if not trials:
        say("no layout could be measured, so the number of cores decides")
        return plan
    tried = {str(trial.layout): trial.env_steps_per_second for trial in trials}
    return dataclasses.replace(_with(plan, trials[0].layout), found=AutoChoice(str(trials[0].layout), how, tried))


def _with(plan: Plan, layout: ActorLayout) -> Plan:
    """A batch of all learners together holds the same rows as before: one unroll of every actor."""
    experiment = plan.experiment
    learners = max(layout.learners, experiment.learners)
    changes: dict[str, Any] = {"envs_per_actor": layout.envs_per_actor, "one_place": layout.one_place}
    if plan.architecture.batch_slots:
        changes["batch_slots"] = max(1, layout.actors // learners)
    architecture = dataclasses.replace(experiment.architecture, **changes)
    return dataclasses.replace(plan, experiment=dataclasses.replace(
        experiment, architecture=architecture, actors=layout.actors, learners=learners,
        learner_threads=layout.learner_threads))


def calibrate_command(arguments: list[str]) -> int:
    """`shoal calibrate ENV [PRESET] [options]`: measure once, so that --actors auto begins at once from then on."""
    from shoal.experiment.parse import parse_train, split_positionals

    given, rest = split_positionals(arguments, 2)
    if not 1 <= len(given) <= 2:
        raise ConfigError("which environment, and which preset? Such as: shoal calibrate CartPole-v1 impala")
    env, preset = given[0], given[1] if len(given) == 2 else "impala"
    plan = parse_train([preset, env, *rest, "--actors", "auto"])
    open_ = plan.architecture.one_place and not plan.algorithm.from_replay
    if not open_ or plan.experiment.runtime != "local" or plan.experiment.autoscale.start is not None:
        why = _fixed(plan) or "its number of actors is given"
        raise ConfigError(f"there is nothing to calibrate for {preset}: {why}")
    with kept_to(plan.experiment.cores):
        found = laid_out(plan, lambda line: print(line, flush=True), anew=True).found
    assert found is not None
    print(f"chosen: {found.chosen}; `shoal train {preset} {env} --actors auto` begins with it")
    return 0
