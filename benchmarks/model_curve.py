"""The curve that the discrete-event model of `shoal plan` predicts for a case of the scaling suite, calibrated with the suite's own
runs of one and two actors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shoal.planning.measure import Observation, fitted
from shoal.planning.pipeline import simulate
from shoal.planning.terms import Cluster

__all__ = ["observed", "predicted", "summarised"]

Rows = Sequence[Mapping[str, Any]]


def observed(summary: Mapping[str, Any], architecture: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a row keeps of its run for the calibration; None where the model does not know the architecture."""
    known = architecture["name"] == "actor_learner" and not architecture["one_place"]
    if not known or (seen := summarised(summary)) is None:
        return None
    return {**asdict(seen), "batch": architecture["batch_slots"], "depth": architecture["slots_per_actor"]}


def summarised(summary: Mapping[str, Any]) -> Observation | None:
    """A whole run from its summary.json: the kernel's time is shared out by how long roles were busy. None where no actors send
    unrolls to learners."""
    roles, wire, seconds = summary["roles"], summary["wires"].get("unrolls", {}), summary["seconds"]
    if not {"actor", "learner"} <= roles.keys() or "env" not in roles["actor"]["phases"] or not seconds:
        return None
    busy = sum(role["busy"] * role["instances"] * seconds for role in roles.values())
    computing = min(1.0, summary["cpu_seconds"] / busy) if busy else 1.0

    def seconds_of(role: Mapping[str, Any]) -> dict[str, float]:
        shares = {**role["phases"], "busy": role["busy"], "cpu": computing * role["busy"]}
        return {name: share * role["instances"] * seconds for name, share in shares.items()}

    actor, learner = roles["actor"], roles["learner"]
    return Observation(actor["instances"], learner["instances"], seconds, summary["env_steps"], actor["steps_per_second"] * seconds,
                       learner["steps_per_second"] * seconds / learner["instances"], wire["consumed_per_second"] * seconds,
                       summary["learner_steps"], seconds_of(actor), seconds_of(learner), summary["policy_lag"]["mean"] or 0.0,
                       actor["waits"].get("unrolls", 0.0), 0.0, 0.0)


def predicted(by_actors: Mapping[int, Rows]) -> list[tuple[float, float]]:
    """(actors, env steps/s) of the model; nothing where there are no runs of one and two actors."""
    one, two = (_kept(by_actors.get(n, ())) for n in (1, 2))
    if one is None or two is None:
        return []
    (batch, depth), _ = ((seen.pop("batch"), seen.pop("depth")) for seen in (one, two))
    cores = next((row["limit"]["cores"] for rows in by_actors.values() for row in rows if row.get("limit")), None)
    costs = fitted(Observation(**one), Observation(**two), batch, depth, cores)
    cluster = Cluster(cores or len(os.sched_getaffinity(0)))
    return [(float(n), simulate(costs, cluster, n, 1, batch, depth).env_steps_per_second) for n in sorted(by_actors)]


def _kept(rows: Rows) -> dict[str, Any] | None:
    return next((dict(row["observed"]) for row in rows if not row["error"] and row.get("observed")), None)
