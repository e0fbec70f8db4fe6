"""A run's part of a Ray cluster: reserves what the program needs, starts actors, looks at nodes, releases everything."""

from __future__ import annotations

import contextlib
import math
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from shoal.errors import ConfigError
from shoal.runtime.program import Program
from shoal.runtime.ray import connection
from shoal.runtime.ray.host import LOG, Host, scratch, sweep, tail
from shoal.runtime.ray.liveness import ClusterWatch
from shoal.runtime.ray.ray_config import RayConfig
from shoal.runtime.ray.resources import GRAIN, Demand, Size, demands, missing, plural, sizes, too_large

__all__ = ["RayCluster"]

T = TypeVar("T")

THREADS = {"live": "life", "deliver": "messages", "tell": "messages", "listen": "reports"}  # method of a Host -> its thread
PLACEMENT_SECONDS = 30.0
RELEASE_SECONDS = 5.0
TAIL_SECONDS = 5.0
SWEEP_SECONDS = 10.0
LOOK_SECONDS = 5.0   # between two looks at the object stores
STORE_SECONDS = 1.0  # that such a look may take
LIST_SECONDS = 0.5   # between two looks at the list of nodes


class RayCluster:
    """A connection to a Ray cluster for the time of one run."""

    def __init__(self, program: Program, config: RayConfig, names: Iterable[str]) -> None:
        self.config, self.program = config, program
        self.session = uuid.uuid4().hex[:12]
        self.demands = {demand.place: demand for demand in demands(program, config, program.places.values())}
        self._groups: list[PlacementGroup] = []
        self._bundles: dict[str, tuple[PlacementGroup, int]] = {}
        self._looked = time.monotonic(), 0.0, 0.0  # when, and the calls and bytes until then
        self._seen: dict[str, float] = {}
        self._listed: tuple[float, set[str]] = (0.0, set())  # when Ray was asked, and the nodes that it takes for alive
        self._used_nodes: set[str] = set()  # nodes that places have run on
        self.watch: ClusterWatch | None = None
        self.address = ""
        wanted = [self.demands[name] for name in names]
        self._own = not ray.is_initialized()
        if self._own:
            connection.connect(config, sum(demand.cpus for demand in self.demands.values()))  # of all that may ever run
        try:
            connection.remember(scratch(self.session))
            self.address = ray.util.get_node_ip_address()
            self._check(wanted)
            self._place(wanted)
            self.watch = ClusterWatch(ray.get_runtime_context().gcs_address)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ resources
    def _check(self, wanted: list[Demand]) -> None:
        """Raise if something is missing, instead of waiting for ever; what another run just released comes a moment later."""
        begun = time.monotonic()
        while True:
            have, free, found = size(ray.cluster_resources()), size(ray.available_resources()), nodes()
            each = self.config.cpus_per_place
            options = self.program.options
            lacking = (missing(wanted, have, have, len(found), each, options)
                       or too_large(wanted, [size(one["Resources"]) for one in found], options))
            if not (words := lacking or missing(wanted, have, free, len(found), each, options)):
                return
            if time.monotonic() - begun >= max(self.config.wait_seconds, 0.0 if lacking else RELEASE_SECONDS):
                raise ConfigError(words)
            time.sleep(0.2)

    def _place(self, wanted: list[Demand]) -> None:
        """Create placement groups: places that only send or ask are spread, shards of a server too, all others are packed."""
        for kind in ((True, True), (True, False), (False, False)):
            mine = [demand for demand in wanted if (demand.spread, demand.shard) == kind]
            if not mine:
                continue
            group = placement_group([demand.bundle or {"CPU": 0.001} for demand in mine], strategy="SPREAD" if kind[0] else "PACK")
            self._groups.append(group)
            for number, demand in enumerate(mine):
                self._bundles[demand.place] = (group, number)
            deadline = time.monotonic() + PLACEMENT_SECONDS + self.config.wait_seconds
            while not group.wait(1):  # s, during which Ctrl-C has no effect
                if time.monotonic() < deadline:
                    continue
                there = ", ".join(str(size(node["Resources"])) for node in nodes())
                ways = [f"fewer {flag}" for flag in self.program.options.senders] + [self.program.options.threads]
                raise ConfigError(f"the cluster has enough CPUs, but not on the same nodes: its nodes ({there}) cannot hold these "
                                  f"places at once: {sizes(mine)}; use {' or '.join(ways)}")

    # ------------------------------------------------------------------ actors
    def start(self, place: str, incarnation: int) -> Any:
        """Create the actor of a place: in its bundle or, for a place that was added later, where CPUs are free."""
        demand = self.demands[place]
        strategy: Any = "SPREAD"
        if place in self._bundles:
            group, number = self._bundles[place]
            strategy = PlacementGroupSchedulingStrategy(group, number)
        return HOST.options(num_cpus=demand.cpus, num_gpus=demand.gpus, scheduling_strategy=strategy, max_restarts=0,
                            max_task_retries=0).remote(self.session, place, incarnation)

    def used(self, node: str) -> None:
        """A place has started on this node."""
        self._used_nodes.add(node)

    def listed(self, node: str) -> bool:
        """Whether Ray takes a node for alive: it notices a death only after some seconds."""
        when, found = self._listed
        if time.monotonic() - when > LIST_SECONDS:
            found = self._ask(lambda: {entry["NodeID"] for entry in nodes()}, found)
            self._listed = time.monotonic(), found
        return node in found

    def reachable(self, node: str) -> bool:
        """Whether a node is alive, even if Ray has not noticed its death: a dead one accepts no connection."""
        for entry in self._nodes():
            if entry["NodeID"] == node:
                where = entry["NodeManagerAddress"], entry["NodeManagerPort"]
                with contextlib.suppress(OSError), socket.create_connection(where, timeout=1.0):
                    return True
        return False

    @property
    def gone(self) -> bool:
        """Whether the cluster itself has died."""
        return self.watch is not None and self.watch.gone

    @property
    def head(self) -> str:
        return self.watch.address if self.watch is not None else ""

    @property
    def why_gone(self) -> str:
        return self.watch.why if self.watch is not None else ""

    def answers(self) -> bool:
        """Whether the cluster accepts connections at this moment."""
        return self.watch is None or self.watch.reachable()

    def _nodes(self) -> list[dict[str, Any]]:
        none: list[dict[str, Any]] = []
        return self._ask(nodes, none)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        return question() if self.watch is None else self.watch.ask(question, otherwise)

    def read_tail(self, node: str, life: str, offset: int) -> bytes:
        """The end of the log of a killed place, from its node if that is alive."""
        if (scratch(self.session, life) / LOG).exists():
            return tail(self.session, life, offset)
        if not self.reachable(node):
            return b""

        def there() -> bytes:
            task = TAIL.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            text: bytes = ray.get(task.remote(self.session, life, offset), timeout=TAIL_SECONDS)
            return text

        return self._ask(there, b"")

    def room(self, places: list[str]) -> float:
        """How many of these places, none of which runs, could be started now: all that have a bundle, and as many others as fit
        into the free CPUs."""
        others = [self.demands[place] for place in places if place not in self._bundles]
        kept = sum(place in self._bundles for place in places)
        cpus = max((demand.cpus for demand in others), default=0.0)
        fits = math.floor((self._ask(free_now, Size(0.0, 0.0)).cpus + GRAIN) / cpus) if cpus else len(others)
        return kept + min(len(others), fits)

    def waits_for(self) -> str:
        """What a place that waits for CPUs waits for, in words."""
        free, found = self._ask(free_now, Size(0.0, 0.0)), self._nodes()
        return f"the cluster has {free} free on {plural(len(found), 'node')}"

    def surroundings(self, calls: float, moved: float) -> dict[str, float]:
        """The number of nodes, what their object stores hold, and the calls and bytes per second between places since the last
        look, computed from the totals so far."""
        now, (before, old_calls, old_moved) = time.monotonic(), self._looked
        elapsed = now - before
        if not self._seen or elapsed >= LOOK_SECONDS:
            self._looked = now, calls, moved
            self._seen = {"nodes": self._ask(lambda: float(len(nodes())), self._seen.get("nodes", math.nan)),
                          "object_store_mb": self._ask(store_bytes, math.nan) / 1e6,
                          "calls_per_second": (calls - old_calls) / elapsed,
                          "carried_mb_per_second": (moved - old_moved) / elapsed / 1e6}
        return self._seen

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ask(self._release, None)
        sweep(self.session)
        gone = self.gone or not self.answers()
        if self.watch is not None:
            self.watch.close()
        if gone:
            connection.abandon()
        elif self._own:
            connection.disconnect()

    def _release(self) -> None:
        """Release the bundles, and remove the folders on other machines that places have run on."""
        for group in self._groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        far = [one["NodeID"] for one in nodes() if one["NodeID"] in self._used_nodes and one["NodeManagerAddress"] != self.address]
        swept = [SWEEP.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(self.session)
                 for node in far]
        if swept:
            ray.wait(swept, num_returns=len(swept), timeout=SWEEP_SECONDS)


def nodes() -> list[dict[str, Any]]:
    """The living nodes."""
    return [node for node in ray.nodes() if node["Alive"]]


def size(resources: Mapping[str, float]) -> Size:
    return Size(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def free_now() -> Size:
    return size(ray.available_resources())


def store_bytes() -> float:
    """Bytes in all object stores; NaN where the cluster does not say."""
    from ray._private.internal_api import get_memory_info_reply
    from ray._private.state import state

    try:
        reply = get_memory_info_reply(state, timeout_seconds=STORE_SECONDS)
        return float(reply.store_stats.object_store_bytes_used)
    except Exception:  # a node is just dying: the next look will succeed
        return math.nan


for _name, _thread in THREADS.items():
    setattr(Host, _name, ray.method(concurrency_group=_thread)(getattr(Host, _name)))
HOST = ray.remote(num_cpus=0, concurrency_groups=dict.fromkeys(THREADS.values(), 1))(Host)
TAIL = ray.remote(num_cpus=0, max_retries=0)(tail)
SWEEP = ray.remote(num_cpus=0, max_retries=0)(sweep)
