"""The cluster under a run: joined or started, asked for what the program needs, and given back."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from shoal.errors import ConfigError
from shoal.runtime.program import Place, Program
from shoal.runtime.ray.config import RayConfig, set_defaults
from shoal.runtime.ray.host import Host, sweep, tail

__all__ = ["Cluster", "Demand", "beside", "connected", "demands", "reachable"]

THREADS = {"live": "life", "deliver": "post", "tell": "post", "listen": "line"}  # of a host: each group of methods has one
PLACEMENT_SECONDS = 30.0
RELEASE_SECONDS = 5.0
CONNECT_SECONDS = 5.0
TAIL_SECONDS = 5.0
LOOK_SECONDS = 5.0   # between two looks at the object stores
STORE_SECONDS = 1.0  # which one may take
MANY = ("sink", "client")                              # ends of which there are many ...
FEW = ("source", "server", "publisher", "member")      # ... and few


@dataclass(frozen=True)
class Demand:
    """What a place needs, and whether those like it are to be spread over the nodes or put together."""

    place: str
    cpus: float
    gpus: float
    spread: bool
    shard: bool = False  # one of the servers that share a load; else who is spread is one of many

    @property
    def bundle(self) -> dict[str, float]:
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


def demands(program: Program, config: RayConfig, places: Iterable[Place]) -> list[Demand]:
    """Computed from the graph: who only sends or asks is one of many and is spread, and so are the shards of a server; who takes,
    serves or publishes is one of few and is packed."""
    found = []
    for place in places:
        nodes = [program.nodes[name] for name in dict.fromkeys(name for name, _ in place.members)]
        ends = {port.end for node in nodes for port in node.ports.values()}
        few = bool(ends & set(FEW))
        shard = ends <= {"server"} and any(node.most > 1 for node in nodes)
        spread = shard or (bool(ends & set(MANY)) and not few)
        cpus = config.cpus_per_place + max(node.compute_threads for node in nodes) - 1
        computes = program.on_gpu and few and ends != {"server"}
        found.append(Demand(place.name, cpus, config.gpus_per_learner if computes else 0.0, spread, shard))
    return found


def connect(config: RayConfig, cpus: float) -> None:
    """Join the cluster, or start one here: with so many CPUs, since processes share cores here as on the local runtime."""
    set_defaults()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True,
                             "namespace": f"shoal-{uuid.uuid4().hex[:12]}"}
    address = config.joined
    try:
        with silence():
            if address:
                knock(address)
                ray.init(address=address, **quiet)
                return
            ray.init(address="local", num_cpus=max(math.ceil(cpus), len(os.sched_getaffinity(0))), include_dashboard=False,
                     object_store_memory=config.object_store_mb * 1_000_000, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f"--ray.address {address}" if address else "a local Ray cluster"
        raise ConfigError(f"{where} cannot be {'joined' if address else 'started'}: {first}; is it running (`ray status`), and "
                          "is RAY_AUTH_MODE the same on both sides? Without --ray.address a cluster is started on this "
                          "machine") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray takes SIGTERM for itself; it is the run's
                signal.signal(number, handler)


def disconnect() -> None:
    """And stop the cluster, if it was started here."""
    if ray.is_initialized():
        with silence():
            ray.shutdown()


@contextlib.contextmanager
def connected(config: RayConfig, cpus: float) -> Iterator[float | None]:
    """One connection for several runs, one after the other. Gives the CPUs of the cluster; None: it is one of our own, which has as
    many as are asked for."""
    own = not ray.is_initialized()
    if own:
        connect(config, cpus)
    try:
        yield None if own and config.joined is None else float(ray.cluster_resources().get("CPU", 0.0))
    finally:
        if own:
            disconnect()


def beside(program: Program, config: RayConfig, cpus: float) -> int:
    """How many of those of whom there are many have room in a cluster beside all others; at least one is asked for."""
    found = demands(program, config, program.places.values())
    many = [demand.cpus for demand in found if demand.spread and not demand.shard]
    rest = sum(demand.cpus for demand in found) - sum(many)
    return max(1, math.floor((cpus - rest) / max(many, default=config.cpus_per_place)))


class Cluster:
    """A connection to a Ray cluster for the time of one run."""

    def __init__(self, program: Program, config: RayConfig, names: Iterable[str]) -> None:
        self.config, self.program = config, program
        self.session = uuid.uuid4().hex[:12]
        self.demands = {demand.place: demand for demand in demands(program, config, program.places.values())}
        self._groups: list[PlacementGroup] = []
        self._bundles: dict[str, tuple[PlacementGroup, int]] = {}
        self._looked = time.monotonic(), 0.0, 0.0  # when, and the calls and bytes until then
        self._seen: dict[str, float] = {}
        wanted = [self.demands[name] for name in names]
        self._own = not ray.is_initialized()
        if self._own:
            connect(config, sum(demand.cpus for demand in self.demands.values()))  # of all that may ever run
        try:
            self._check(wanted)
            self._place(wanted)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ resources
    def _check(self, wanted: list[Demand]) -> None:
        """Say at once what is missing, instead of waiting for ever. What another run has just given back comes a moment later."""
        begun = time.monotonic()
        while True:
            have, free = ray.cluster_resources(), ray.available_resources()
            if not (words := self._missing(wanted, have, free)):
                return
            enough = not self._missing(wanted, have, have)
            if time.monotonic() - begun >= max(self.config.wait_seconds, RELEASE_SECONDS if enough else 0.0):
                raise ConfigError(words if enough else self._missing(wanted, have, have))
            time.sleep(0.2)

    def _missing(self, wanted: list[Demand], have: dict[str, float], free: dict[str, float]) -> str:
        """What does not fit into `free`, and the way out."""
        cpus, gpus = sum(demand.cpus for demand in wanted), sum(demand.gpus for demand in wanted)
        if cpus <= free.get("CPU", 0) and gpus <= free.get("GPU", 0):
            return ""
        many = [demand for demand in wanted if demand.spread and not demand.shard]
        rest = cpus - sum(demand.cpus for demand in many)
        room = int((free.get("CPU", 0) - rest) / many[0].cpus) if many else 0
        if gpus > free.get("GPU", 0):
            way = "use --device cpu, or a lower --ray.gpus-per-learner"
        else:
            way = f"use {f'--actors {room}, or ' if room >= 1 else ''}--ray.cpus-per-place below {self.config.cpus_per_place:g}"
        others = "" if free is have else f", but others use all but {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
        size = f"{have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs on {len(nodes())} nodes"
        return (f"asked for {cpus:g} CPUs and {gpus:g} GPUs, the cluster has {size}{others}; {way} (nodes that are on their way "
                "are waited for with --ray.wait-seconds)")

    def _place(self, wanted: list[Demand]) -> None:
        """Placement groups: those of whom there are many are spread, the shards of a server among themselves, the others packed."""
        for kind in ((True, True), (True, False), (False, False)):
            mine = [demand for demand in wanted if (demand.spread, demand.shard) == kind]
            if not mine:
                continue
            group = placement_group([demand.bundle or {"CPU": 0.001} for demand in mine], strategy="SPREAD" if kind[0] else "PACK")
            self._groups.append(group)
            for number, demand in enumerate(mine):
                self._bundles[demand.place] = (group, number)
            if not group.wait(PLACEMENT_SECONDS + self.config.wait_seconds):
                sizes = ", ".join(f"{node['Resources'].get('CPU', 0):g}" for node in nodes())
                raise ConfigError(f"the cluster has CPUs enough, but not together: no nodes (of {sizes} CPUs) hold "
                                  f"{len(mine)} places of {max(d.cpus for d in mine):g} CPUs and {max(d.gpus for d in mine):g} "
                                  "GPUs; use fewer --actors or --learner-threads")

    # ------------------------------------------------------------------ actors
    def start(self, place: str, incarnation: int) -> Any:
        """A new actor for a place: in its bundle, or (a place that came later) where there is room."""
        demand = self.demands[place]
        strategy: Any = "SPREAD"
        if place in self._bundles:
            group, number = self._bundles[place]
            strategy = PlacementGroupSchedulingStrategy(group, number)
        return HOST.options(num_cpus=demand.cpus, num_gpus=demand.gpus, scheduling_strategy=strategy, max_restarts=0,
                            max_task_retries=0).remote(self.session, place, incarnation)

    def read_tail(self, node: str, life: str, offset: int) -> bytes:
        """The end of the log of a place that was killed, from its node if that lives."""
        if not reachable(node):
            return b""
        try:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            text: bytes = ray.get(TAIL.options(scheduling_strategy=there).remote(self.session, life, offset), timeout=TAIL_SECONDS)
        except Exception:  # it is going down as well
            return b""
        return text

    def room(self, places: list[str]) -> float:
        """How many of these places, none of which runs, could be started now: those with a bundle of their own, and as many
        others as there are CPUs free."""
        others = [self.demands[place] for place in places if place not in self._bundles]
        kept = sum(place in self._bundles for place in places)
        cpus = max((demand.cpus for demand in others), default=0.0)
        fits = math.floor(ray.available_resources().get("CPU", 0.0) / cpus) if cpus else len(others)
        return kept + min(len(others), fits)

    def waits_for(self) -> str:
        """For a place that is not placed: what there is."""
        free = ray.available_resources()
        return f"the cluster's {len(nodes())} nodes have {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free"

    def surroundings(self, calls: float, moved: float) -> dict[str, float]:
        """How many nodes there are, what their object stores hold, and how much goes from place to place: of the calls and bytes so
        far, what came since the last look."""
        now, (before, old_calls, old_moved) = time.monotonic(), self._looked
        elapsed = now - before
        if not self._seen or elapsed >= LOOK_SECONDS:
            self._looked = now, calls, moved
            self._seen = {"nodes": float(len(nodes())), "object_store_mb": store_bytes() / 1e6,
                          "calls_per_second": (calls - old_calls) / elapsed,
                          "carried_mb_per_second": (moved - old_moved) / elapsed / 1e6}
        return self._seen

    def close(self) -> None:
        for group in self._groups:
            with contextlib.suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)
        sweep(self.session)
        if self._own:
            disconnect()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What Ray's native code says while it connects and disconnects goes past Python's streams."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def nodes() -> list[dict[str, Any]]:
    """The living nodes."""
    return [node for node in ray.nodes() if node["Alive"]]


def knock(address: str) -> None:
    """Raise at once where nobody listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def reachable(node: str) -> bool:
    """Whether a node lives: Ray takes some seconds to know, but one that is gone takes no connection."""
    for entry in nodes():
        if entry["NodeID"] == node:
            where = entry["NodeManagerAddress"], entry["NodeManagerPort"]
            with contextlib.suppress(OSError), socket.create_connection(where, timeout=1.0):
                return True
    return False


def store_bytes() -> float:
    """What all object stores hold; NaN where the cluster does not say."""
    from ray._private.internal_api import get_memory_info_reply
    from ray._private.state import state

    try:
        reply = get_memory_info_reply(state, timeout_seconds=STORE_SECONDS)
        return float(reply.store_stats.object_store_bytes_used)
    except Exception:  # a node that is just dying: the next look will tell
        return math.nan


for _name, _thread in THREADS.items():
    setattr(Host, _name, ray.method(concurrency_group=_thread)(getattr(Host, _name)))
HOST = ray.remote(num_cpus=0, concurrency_groups=dict.fromkeys(THREADS.values(), 1))(Host)
TAIL = ray.remote(num_cpus=0, max_retries=0)(tail)
