"""What a program asks of a cluster, computed from its graph, and the error texts where a cluster has less. Imports no Ray."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.runtime.checkpointing import SCARCE_ENDS
from shoal.runtime.program import Place, Program, ScaleOptions
from shoal.runtime.ray.ray_config import RayConfig

__all__ = ["Demand", "Size", "demands", "missing", "plural", "replicas_that_fit", "sizes", "too_large"]

PLENTIFUL_ENDS = ("sink", "client")  # ends that many roles hold
GRAIN = 1e-4                         # of a CPU: Ray's smallest unit


@dataclass(frozen=True)
class Demand:
    """What a place needs, and whether places like it are spread over the nodes or packed together."""

    place: str
    cpus: float
    gpus: float
    spread: bool
    shard: bool = False  # one of the servers that share a load; other places that are spread only send or ask
    scales: Literal["", "senders", "members"] = ""  # which of the program's ScaleOptions set how many of these there are

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
    """Places that only send or ask are spread, and so are the shards of a server; places that take, serve or publish are packed."""
    found = []
    for place in places:
        nodes = [program.nodes[name] for name in dict.fromkeys(name for name, _ in place.members)]
        ends = {port.end for node in nodes for port in node.ports.values()}
        scarce = bool(ends & set(SCARCE_ENDS))
        shard = ends <= {"server"} and any(node.most > 1 for node in nodes)
        spread = shard or (bool(ends & set(PLENTIFUL_ENDS)) and not scarce)
        cpus = config.cpus_per_place + max(node.compute_threads for node in nodes) - 1
        said = [node.on_gpu for node in nodes if node.on_gpu is not None]
        computes = program.on_gpu and (any(said) if said else scarce and ends != {"server"})
        found.append(Demand(place.name, cpus, config.gpus_per_place if computes else 0.0, spread, shard,
                            "senders" if spread and not shard else "members" if "member" in ends else ""))
    if any(demand.spread and not demand.shard for demand in found):
        return [replace(demand, scales=demand.scales if demand.spread else "") for demand in found]
    return _numbered(found)


def _numbered(found: list[Demand]) -> list[Demand]:
    """Where no place only sends or asks, the roles that do live with others: in the kind of places of which there are most."""
    kinds = Counter(_kind(demand.place) for demand in found if not demand.shard)
    kind, count = max(kinds.items(), key=lambda item: item[1], default=("", 0))
    return [replace(d, scales=(d.scales or "senders") if count > 1 and _kind(d.place) == kind else "") for d in found]


def _kind(place: str) -> str:
    """main-3 and peer_3-0 are the fourth of their kind."""
    return place.removesuffix("-0").rstrip("0123456789").rstrip("-_") or place


def replicas_that_fit(program: Program, config: RayConfig, cpus: float) -> int:
    """How many of the places that only send or ask fit into a cluster of `cpus` CPUs beside all others; at least 1."""
    found = demands(program, config, program.places.values())
    many = [demand.cpus for demand in found if demand.spread and not demand.shard]
    rest = sum(demand.cpus for demand in found) - sum(many)
    return max(1, math.floor((cpus - rest + GRAIN) / max(many, default=config.cpus_per_place)))


def missing(wanted: Sequence[Demand], have: Size, free: Size, nodes: int, cpus_per_place: float, options: ScaleOptions) -> str:
    """What does not fit into `free`, and what to type instead; empty when everything fits."""
    asked = Size(sum(demand.cpus for demand in wanted), sum(demand.gpus for demand in wanted))
    if free.holds(asked.cpus, asked.gpus):
        return ""
    if not free.holds(0.0, asked.gpus):
        way = f"use {options.no_gpu}, or {options.fewer_gpus}"
    else:
        way = f"use {_fewer(wanted, asked.cpus, free.cpus, options)}--ray.cpus-per-place below {cpus_per_place:g}"
    others = "" if free == have else f", but other programs use all but {free}"
    return (f"asked for {asked}, the cluster has {have} on {plural(nodes, 'node')}{others}; {way} (if nodes are still starting, "
            "wait for them with --ray.wait-seconds)")


def _fewer(wanted: Sequence[Demand], asked: float, free: float, options: ScaleOptions) -> str:
    """The options with the number of replicas that would fit; empty where not even one would."""
    scaled = [demand for demand in wanted if demand.scales]
    if not scaled:
        return ""
    flags = options.senders if scaled[0].scales == "senders" else options.members
    fits = math.floor((free - asked + sum(demand.cpus for demand in scaled) + GRAIN) / max(demand.cpus for demand in scaled))
    return " ".join(f"{flag} {fits}" for flag in flags) + ", or " if flags and fits >= 1 else ""


def too_large(wanted: Sequence[Demand], nodes: Sequence[Size], options: ScaleOptions) -> str:
    """The place that no single node could ever hold, and what to type instead; empty where there is none."""
    for demand in sorted(wanted, key=lambda d: (-d.cpus, -d.gpus)):
        if not any(node.holds(demand.cpus, demand.gpus) for node in nodes):
            largest = max(nodes, key=lambda node: (node.cpus, node.gpus), default=Size(0.0, 0.0))
            way = f"use {options.no_gpu}, or {options.fewer_gpus}" if largest.holds(demand.cpus, 0.0) else \
                f"use {options.threads}, or a lower --ray.cpus-per-place"
            return (f"{demand.place} asks for {Size(demand.cpus, demand.gpus)} on one node, the largest of "
                    f"{plural(len(nodes), 'node')} has {largest}; {way} (if nodes are still starting, wait for them with "
                    "--ray.wait-seconds)")
    return ""


def sizes(wanted: Sequence[Demand]) -> str:
    """Places, counted by what each asks for: 1 of 2.3 CPUs and 0 GPUs, 3 of 1 CPUs and 0 GPUs."""
    found = Counter(str(Size(demand.cpus, demand.gpus)) for demand in wanted)
    return ", ".join(f"{count} of {size}" for size, count in found.items())


def plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
