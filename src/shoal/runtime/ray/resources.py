"""What a program asks of a cluster, computed from its graph, and the words for what it does not have. Knows nothing of Ray."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shoal.runtime.program import Place, Program
from shoal.runtime.ray.config import RayConfig
from shoal.runtime.saving import FEW

__all__ = ["Demand", "Size", "beside", "counted", "demands", "missing", "sizes", "too_large"]

MANY = ("sink", "client")  # ends of which there are many
GRAIN = 1e-4               # of a CPU: Ray counts in no finer ones


@dataclass(frozen=True)
class Demand:
    """What a place needs, and whether those like it are to be spread over the nodes or put together."""

    place: str
    cpus: float
    gpus: float
    spread: bool
    shard: bool = False  # one of the servers that share a load; else who is spread is one of many
    flags: tuple[str, ...] = ()  # options that say how many of these there are

    @property
    def bundle(self) -> dict[str, float]:
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


@dataclass(frozen=True)
class Size:
    """CPUs and GPUs of a node, or of a whole cluster."""

    cpus: float
    gpus: float

    def holds(self, cpus: float, gpus: float) -> bool:
        return cpus <= self.cpus + GRAIN and gpus <= self.gpus + GRAIN

    def __str__(self) -> str:
        return f"{round(self.cpus, 4):g} CPUs and {round(self.gpus, 4):g} GPUs"


def demands(program: Program, config: RayConfig, places: Iterable[Place]) -> list[Demand]:
    """Who only sends or asks is one of many and is spread, and so are the shards of a server; who takes, serves or publishes is one
    of few and is packed."""
    found = []
    for place in places:
        nodes = [program.nodes[name] for name in dict.fromkeys(name for name, _ in place.members)]
        ends = {port.end for node in nodes for port in node.ports.values()}
        few = bool(ends & set(FEW))
        shard = ends <= {"server"} and any(node.most > 1 for node in nodes)
        spread = shard or (bool(ends & set(MANY)) and not few)
        cpus = config.cpus_per_place + max(node.compute_threads for node in nodes) - 1
        computes = program.on_gpu and few and ends != {"server"}
        flags = ("--actors",) if spread and not shard else ("--actors", "--learners") if "member" in ends else ()
        found.append(Demand(place.name, cpus, config.gpus_per_learner if computes else 0.0, spread, shard, flags))
    if any(demand.spread and not demand.shard for demand in found):
        return [replace(demand, flags=demand.flags if demand.spread else ()) for demand in found]
    return _paired(found)


def _paired(found: list[Demand]) -> list[Demand]:
    """Where nobody only sends or asks, actors live with their learners, or are learners: in the places that are numbered."""
    kinds = Counter(_kind(demand.place) for demand in found if not demand.shard)
    kind, count = max(kinds.items(), key=lambda item: item[1], default=("", 0))
    return [replace(d, flags=(d.flags or ("--actors",)) if count > 1 and _kind(d.place) == kind else ()) for d in found]


def _kind(place: str) -> str:
    """main-3 and learner_3-0 are the fourth of their kind."""
    return place.removesuffix("-0").rstrip("0123456789").rstrip("-_") or place


def beside(program: Program, config: RayConfig, cpus: float) -> int:
    """How many of those of whom there are many have room in a cluster beside all others; at least one is asked for."""
    found = demands(program, config, program.places.values())
    many = [demand.cpus for demand in found if demand.spread and not demand.shard]
    rest = sum(demand.cpus for demand in found) - sum(many)
    return max(1, math.floor((cpus - rest + GRAIN) / max(many, default=config.cpus_per_place)))


def missing(wanted: Sequence[Demand], have: Size, free: Size, nodes: int, cpus_per_place: float) -> str:
    """What does not fit into `free`, and the way out; nothing where all of it does."""
    asked = Size(sum(demand.cpus for demand in wanted), sum(demand.gpus for demand in wanted))
    if free.holds(asked.cpus, asked.gpus):
        return ""
    many, flags = [demand.cpus for demand in wanted if demand.flags], next((d.flags for d in wanted if d.flags), ())
    rest = asked.cpus - sum(many)
    room = math.floor((free.cpus - rest + GRAIN) / max(many)) if many else 0
    if not free.holds(0.0, asked.gpus):
        way = "use --device cpu, or a lower --ray.gpus-per-learner"
    else:
        fewer = " ".join(f"{flag} {room}" for flag in flags) + ", or " if room >= 1 else ""
        way = f"use {fewer}--ray.cpus-per-place below {cpus_per_place:g}"
    others = "" if free == have else f", but others use all but {free}"
    return (f"asked for {asked}, the cluster has {have} on {counted(nodes, 'node')}{others}; {way} (nodes that are on their way "
            "are waited for with --ray.wait-seconds)")


def too_large(wanted: Sequence[Demand], nodes: Sequence[Size]) -> str:
    """The place that no single node could ever hold; nothing where there is none."""
    for demand in sorted(wanted, key=lambda d: (-d.cpus, -d.gpus)):
        if not any(node.holds(demand.cpus, demand.gpus) for node in nodes):
            largest = max(nodes, key=lambda node: (node.cpus, node.gpus), default=Size(0.0, 0.0))
            way = "use --device cpu, or a lower --ray.gpus-per-learner" if largest.holds(demand.cpus, 0.0) else \
                "use fewer --learner-threads, or a lower --ray.cpus-per-place"
            return (f"{demand.place} asks for {Size(demand.cpus, demand.gpus)} on one node, the largest of "
                    f"{counted(len(nodes), 'node')} has {largest}; {way} (nodes that are on their way are waited for with "
                    "--ray.wait-seconds)")
    return ""


def sizes(wanted: Sequence[Demand]) -> str:
    """Places by what each asks for: 1 of 2.3 CPUs and 0 GPUs, 3 of 1 CPUs and 0 GPUs."""
    found = Counter(str(Size(demand.cpus, demand.gpus)) for demand in wanted)
    return ", ".join(f"{count} of {size}" for size, count in found.items())


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
