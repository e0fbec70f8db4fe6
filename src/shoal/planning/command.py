"""`shoal plan PRESET ENV --actors 2000`: measure the parts here, simulate them there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shoal.bench.text_tables import UNMEASURED
from shoal.errors import ConfigError
from shoal.options import Options, number
from shoal.planning.pipeline import simulate
from shoal.planning.terms import Cluster, Costs, Forecast
from shoal.telemetry.outputs import say

if TYPE_CHECKING:
    from shoal.experiment.config import Plan

__all__ = ["plan_command", "table"]

USAGE = """\
shoal plan PRESET ENV --actors 2000 [--learners 4] [--cores-per-node 16] [--nodes 8] [--gigabits 10] [options of train]

Runs the preset for some seconds with one actor and with two, then predicts env steps/s, learner idle and policy lag with more
actors: a discrete-event simulation of actors, slots, learners, cores and links. docs/scaling.md says how far you can trust it.
"""
KNOWN = ("actor_learner", "synchronous")
SIZES = (1, 2, 5)
BUSY = 0.3  # of the cores: more load than that shows in every number


@dataclass(frozen=True)
class PlanOptions(Options):
    """Predict what more actors, learners and machines would do."""

    actors: int = number(1000, at_least=1, at_most=10_000)
    """How many actors; the table has smaller numbers too. The model has not been tried with more than 10000."""
    learners: int = number(1, at_least=1, at_most=64)
    """How many learners share the gradients. The model has not been tried with more than 64."""
    cores_per_node: int | None = number(None, at_least=1)
    """Cores of each machine; as many as here by default."""
    nodes: int | None = number(None, at_least=1)
    """How many machines; by default enough for every actor and every learner to have a core."""
    gigabits: float = number(10.0, above=0)
    """Bandwidth of each machine's link, in gigabits per second and direction."""
    seconds: float = number(5.0, above=0)
    """How long each of the two runs is measured."""

    def validate(self) -> None:
        super().validate()
        if self.nodes is not None and self.nodes > self.actors + self.learners:
            raise ConfigError(f"--nodes {self.nodes} is more machines than there are actors and learners to run on them (--actors "
                              f"{self.actors} --learners {self.learners}); give --nodes {self.actors + self.learners} or fewer")

    def cluster(self, actors: int) -> Cluster:
        """The machines for one row of the table."""
        cores = self.cores_per_node or len(os.sched_getaffinity(0))
        made = Cluster.of(actors, self.learners, cores, self.gigabits)
        return made if self.nodes is None else replace(made, nodes=self.nodes)


def plan_command(arguments: list[str]) -> int:
    from shoal.experiment.parse import parse_options, parse_train

    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if arguments else 2
    mine, rest = _apart(arguments)
    options = parse_options(PlanOptions, PlanOptions(), mine, "shoal plan PRESET ENV")
    options.validate()
    plan = parse_train(rest)
    batch, depth = _shape(plan)
    if plan.experiment.runtime != "local":
        say(f"--runtime {plan.experiment.runtime} is ignored: the parts are measured on the local runtime of this machine")
    lockstep = plan.names.architecture == "synchronous"
    costs = _measured(plan, options, batch, depth, lockstep)
    rows = [simulate(costs, options.cluster(n), n, options.learners, batch, depth, lockstep=lockstep)
            for n in _sizes(options.actors)]
    sys.stdout.write("\n" + table(rows) + "\n\n" + told(costs, options, batch, depth, lockstep) + f"\n\n{UNMEASURED}\n")
    return 0


def _apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of this command, and everything that `shoal train` would be given."""
    from shoal.experiment.parse import is_option

    names = {f"--{name}" for name in PlanOptions.__dataclass_fields__}
    mine: list[str] = []
    rest: list[str] = []
    target, values = rest, 0
    for token in arguments:
        if is_option(token):
            own = "--" + token.partition("=")[0].strip("-").replace("-", "_") in names
            target, values = (mine, 0 if "=" in token else 1) if own else (rest, -1)
            target.append(token)
        elif target is mine and values == 0:
            target = rest  # its value has been read: this is PRESET or ENV
            rest.append(token)
        else:
            values -= target is mine
            target.append(token)
    return mine, rest


def _shape(plan: Plan) -> tuple[int, int]:
    """Slots in a batch, and slots of each actor; a sentence for what the model does not know."""
    names, architecture = plan.names, plan.experiment.architecture
    if names.architecture not in KNOWN or plan.algorithm.from_replay:
        raise ConfigError("shoal plan knows actors that send unrolls to learners (--architecture actor_learner or synchronous, as "
                          f"in impala, rapid_ppo, ppo and a2c), not {names.algorithm} x {names.architecture}; give one of those "
                          "presets")
    lockstep = names.architecture == "actor_learner" and architecture.lockstep
    if architecture.one_place or lockstep:
        raise ConfigError(f"shoal plan does not work with --architecture.{'lockstep' if lockstep else 'one-place'}: it multiplies "
                          "actors that run freely in processes of their own; leave it out")
    if names.architecture == "synchronous":
        return 1, 1  # one slot of every actor
    batch = architecture.batch_slots / architecture.reuse if architecture.buffer_slots else architecture.batch_slots
    return max(1, round(batch)), architecture.slots_per_actor


def _measured(plan: Plan, options: PlanOptions, batch: int, depth: int, lockstep: bool) -> Costs:
    from shoal.experiment.preload import PRELOAD
    from shoal.experiment.prepare import prepare
    from shoal.planning.measure import both, fitted
    from shoal.runtime import Program
    from shoal.runtime.fork_server_client import ForkServerClient

    def draw(actors: int, learners: int) -> Program:
        silent = replace(plan.experiment, actors=actors, learners=learners, until_return=None,
                         eval=replace(plan.experiment.eval, enabled=False))
        return prepare(replace(plan, experiment=silent)).program()

    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if load > BUSY * cores:
        say(f"other processes keep {load:.1f} of {cores} cores busy, so the parts will measure too slow; wait until it is quiet")
    fork_server = ForkServerClient(PRELOAD)
    try:
        one, two = both(draw, fork_server, options.seconds, say)
    finally:
        fork_server.close()
    return fitted(one, two, batch, depth, lockstep=lockstep)


def _sizes(most: int) -> list[int]:
    sizes = [factor * 10**power for power in range(5) for factor in SIZES]
    return [*(size for size in sizes if size < most), most]


# ---------------------------------------------------------------------------------------------- words
def table(rows: Sequence[Forecast]) -> str:
    """One line for each size."""
    head = ("actors", "learners", "nodes", "env steps/s", "learner idle", "lag", "first bottleneck")
    cells = [(f"{row.actors:,}", f"{row.learners}", f"{row.nodes:,}", f"{row.env_steps_per_second:,.0f}",
              f"{100 * row.learner_idle:.0f} %", f"{row.policy_lag:,.1f}", row.bottleneck) for row in rows]
    widths = [max(len(line[i]) for line in (head, *cells)) for i in range(len(head))]
    lines = []
    for *numbers, words in (head, *cells):
        lines.append("  ".join([*(cell.rjust(width) for cell, width in zip(numbers, widths, strict=False)), words]))
    return "\n".join(lines)


def told(costs: Costs, options: PlanOptions, batch: int, depth: int, lockstep: bool) -> str:
    """What was measured, and what is assumed."""
    def one(name: str) -> str:
        cost: Any = getattr(costs, name)
        waiting = f" + {1000 * cost.wait:.3g} ms without a core" if cost.wait else ""
        return f"{1000 * cost.cpu:.3g} ms{waiting}"

    per_unroll = ", ".join(f"{words} {one(name)}" for name, words in (("env", "environment"), ("inference", "inference"),
                                                                      ("put", "recording and handing over"), ("pull", "weights")))
    per_update = ", ".join(f"{words} {one(name)}" for name, words in (("get", "copying a slot"), ("update", "learning"),
                                                                      ("publish", "publishing")))
    per_update += f", and {one('update_slot')} for each slot" if lockstep else ""
    size = "one slot of every actor" if lockstep else f"{batch} slots"
    return (f"measured  an unroll of {costs.decisions:,.0f} env steps: {per_unroll}\n"
            f"          an update of {size}: {per_update}\n"
            f"          cores run at {100 * costs.full_speed:.0f} % of their speed while all are busy; a slot has "
            f"{costs.slot_bytes:,.0f} bytes, the weights {costs.weights_bytes:,.0f}\n"
            f"assumed   cores like those here, links of {options.gigabits:g} Gbit/s, weights sent once to each node and version, "
            f"{depth} slots for each\n"
            "          pair of actor and learner, gradients shared in memory on one node and in a ring between nodes; no\n"
            "          process dies, and the supervisor keeps up")
