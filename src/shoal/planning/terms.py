"""The words of the model: what parts cost, where they would run, and what comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Cluster", "Cost", "Costs", "Forecast", "bottleneck"]


@dataclass(frozen=True)
class Cost:
    """Seconds on an undisturbed core, and seconds in which nothing is computed (a sleep, a simulator, a device)."""

    cpu: float
    wait: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu + other.cpu, self.wait + other.wait)

    def times(self, factor: float) -> Cost:
        return Cost(factor * self.cpu, factor * self.wait)


@dataclass(frozen=True)
class Costs:
    """What the parts of a workload cost."""

    decisions: float
    """Env steps in one unroll."""
    env: Cost
    """The environment steps of one unroll."""
    inference: Cost
    """The forward passes of one unroll."""
    put: Cost
    """Recording an unroll and handing its slot over."""
    pull: Cost
    """Taking over newer weights."""
    get: Cost
    """Copying one slot into a batch."""
    update: Cost
    """Learning from one batch."""
    publish: Cost
    """Publishing the weights."""
    update_slot: Cost = Cost(0.0)
    """Learning from one more slot, where a batch has one of every actor."""
    reduce: Cost = Cost(0.0)
    """Adding one more learner's gradients, for one update."""
    full_speed: float = 1.0
    """Speed of a core while all are busy, compared with one that is alone."""
    turn: float = 0.0
    """Seconds on a core that a process loses when another one had it before: its caches are cold."""
    spread: float = 0.0
    """Of an unroll's time: standard deviation over mean."""
    slot_bytes: float = 0.0
    weights_bytes: float = 0.0

    @property
    def unroll(self) -> Cost:
        """What an actor does for one unroll, without taking over weights."""
        return self.env + self.inference + self.put


@dataclass(frozen=True)
class Cluster:
    """Where it would run. One node: everything together. More: learners have the first ones for themselves, actors the rest."""

    cores_per_node: int
    nodes: int = 1
    gigabits: float = 10.0
    """Of each node's link, each way."""

    @classmethod
    def of(cls, actors: int, learners: int, cores_per_node: int, gigabits: float = 10.0) -> Cluster:
        """Just enough nodes for every actor and every learner to have a core."""
        if actors + learners <= cores_per_node:
            return cls(cores_per_node, 1, gigabits)
        return cls(cores_per_node, math.ceil(learners / cores_per_node) + math.ceil(actors / cores_per_node), gigabits)

    def seconds(self, nbytes: float) -> float:
        """How long a link needs for these bytes."""
        return 8e-9 * nbytes / self.gigabits


@dataclass(frozen=True)
class Forecast:
    """What the model says of one size."""

    actors: int
    learners: int
    nodes: int
    env_steps_per_second: float
    learner_idle: float
    policy_lag: float
    bottleneck: str
    blocked: float
    """Share of their time that actors wait for a free slot."""
    core_use: float
    """Share of the actors' cores in use."""
    stretch: float
    """How much longer computing takes because others want the same core."""
    learner_time: dict[str, float] = field(default_factory=dict)
    """Shares of the learners' time."""
    link_in: float = 0.0
    """Use of the busiest link into a learner's node."""
    link_out: float = 0.0
    """Use of the link through which weights leave."""
    inflation: float = 1.0
    """Seconds on a core, per second that the same work would take alone."""
    turns: float = 0.0
    """How often an actor gets a core after another job, per unroll."""


def bottleneck(seen: Forecast, costs: Costs, lockstep: bool = False) -> str:
    """What to widen first. In lock step actors and learner take turns, and the slower one is the bottleneck."""
    late = "; weights arrive late: the learner's link is full" if seen.link_out > 0.95 else ""
    if seen.stretch > 1.15 and seen.core_use > 0.85:
        return f"cores: there are too few, so computing takes {seen.stretch:.1f} times as long{late}"
    if seen.link_in > 0.95:
        return f"the link into the learners is full{late}"
    if seen.learner_idle < (0.5 if lockstep else 0.05) or seen.blocked > 0.1:
        most = max(seen.learner_time, key=lambda name: seen.learner_time[name])
        words = {"get": "copying slots", "update": "updates", "reduce": "sharing gradients", "publish": "publishing weights"}
        return f"learner: {words[most]} ({100 * seen.learner_time[most]:.0f} % of its time){late}"
    parts = {"environment": costs.env, "inference": costs.inference, "recording and handing over": costs.put}
    total = sum(cost.cpu + cost.wait for cost in parts.values())
    most = max(parts, key=lambda name: parts[name].cpu + parts[name].wait)
    return f"actors: {most} ({100 * (parts[most].cpu + parts[most].wait) / total:.0f} % of an unroll){late}"
