"""A Program: roles in places, joined by wires. An architecture draws one; a runtime runs it.

    program = Program("impala", seed=1)
    unrolls = program.stream("unrolls", layout, depth=2)
    weights = program.broadcast("weights", layout)
    program.add("actor", Actor, unrolls=unrolls.sink, weights=weights.reader, replicas=(1, 2, 8))   # least, start, most
    program.add("learner", Learner, unrolls=unrolls.source, weights=weights.publisher)

Each role is made in the process where it will live, as Role(me, **arguments), its ports replaced by endpoints; an argument may
also be a dictionary of ports. What is drawn within `with program.scoped("walker")` has names that begin with "walker.".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol, TypeVar

import numpy as np

from shoal.core import Role
from shoal.errors import ProgramError
from shoal.runtime.wires import BroadcastWire, CallWire, GroupWire, Port, SharedWire, StreamWire, Wire
from shoal.slots import Allocator, Layout, MemoryBlock
from shoal.telemetry import Metric, Stats

__all__ = ["CONTROL", "ControlPort", "EndpointFactory", "Place", "Program", "RoleNode", "ScaleOptions", "Settings",
           "SideWork", "Store"]

PRELOAD = ("numpy", "cloudpickle", "setproctitle", "torch", "shoal.runtime.place")
W = TypeVar("W", bound=Wire)


class Store(Protocol):
    """How a role's state is written to disk; the experiment brings it."""

    def save(self, path: Any, state: Mapping[str, Any]) -> None: ...
    def load(self, path: Any) -> dict[str, Any]: ...


class Settings(Protocol):
    """Values that all roles of a program share and that may change while it runs. Every process holds its own copy, among the
    arguments of its roles; roles read it whenever they need a value."""

    def change(self, values: Mapping[str, Any]) -> None: ...


class EndpointFactory(Protocol):
    """Creates the ends of wires where places share no memory (on a cluster)."""

    def endpoint(self, port: Port, member: int, incarnation: int) -> Any: ...


class ControlPort:
    """Stands for the control handle in a role's arguments."""


CONTROL = ControlPort()


@dataclass(frozen=True)
class ScaleOptions:
    """What an error tells the user to type when a cluster is too small; the application that draws the program declares it."""

    senders: tuple[str, ...] = ()
    """Options that set the number of the roles that only send or ask."""
    members: tuple[str, ...] = ()
    """Options that set the number of the members of a group, where nothing else can be lowered."""
    threads: str = "fewer compute_threads"
    no_gpu: str = "no GPU"
    fewer_gpus: str = "fewer gpus_per_place"


@dataclass(frozen=True)
class SideWork:
    """Work beside that of the program, and how much of it one thread does before the other roles get their turn."""

    counter: str
    """What counts it."""
    free: float
    """Units that are always done in one turn."""
    share: float
    """Further units for each unit of the program's own work (`work_counters`); beyond that, one step in every round."""


@dataclass
class Place:
    """A process (or a Ray actor). Its roles share one loop, or have a thread each; it dies and restarts as a unit."""

    name: str
    members: list[tuple[str, int]] = field(default_factory=list)  # (node, replica)
    threads: bool = False
    core: int | None = None
    """The core that the place is kept on, counted among those that the program may use; None: any."""


@dataclass
class RoleNode:
    """One kind of role in the graph, with 1..most replicas."""

    name: str
    role: Callable[..., Role]
    arguments: dict[str, Any]
    least: int
    start: int
    most: int
    compute_threads: int
    private_bytes: int = 0
    on_gpu: bool | None = None

    @property
    def ports(self) -> dict[str, Port]:
        """By argument; a port in a dictionary is called argument.key."""
        found = {key: value for key, value in self.arguments.items() if isinstance(value, Port)}
        for key, value in self.arguments.items():
            if isinstance(value, Mapping):
                found |= {f"{key}.{inner}": port for inner, port in value.items() if isinstance(port, Port)}
        return found


class Program:
    """The graph.

    `work_counters`: the run has started up when one of these counters grows. `preload`: modules that all places import; on the
    local runtime the fork server imports them once.
    """

    def __init__(self, name: str, seed: int = 0, store: Store | None = None, *, work_counters: tuple[str, ...] = ("steps",),
                 preload: tuple[str, ...] = PRELOAD, options: ScaleOptions | None = None,
                 metrics: tuple[Metric, ...] = ()) -> None:
        self.name, self.seed, self.store = name, seed, store
        self.work_counters, self.preload, self.options = work_counters, preload, options or ScaleOptions()
        self.metrics = metrics  # that roles may name beyond telemetry's registry
        self.resumed = 0  # grows with every resume: part of every seed
        self.limits: dict[str, float] = {}  # how far all roles together may count: those that ask for permits keep to it
        self.side_work: SideWork | None = None  # None: roles that keep their turn (core.KeepsTurn) keep it to the end of their work
        self.starts_paused = False  # whether no role begins its first step before `Supervisor.start_steps`
        self.folder: Path | None = None  # where roles keep files that outlive the program (core.Me.folder)
        self.finishers = 1  # how many instances have to call `me.finish` before the program stops
        self.settings: Settings | None = None  # `Supervisor.change` changes it, in every place
        self.on_gpu = False  # whether roles compute on one: those that take from streams, serve or publish, or say so themselves
        self.nodes: dict[str, RoleNode] = {}
        self.wires: dict[str, Wire] = {}
        self.places: dict[str, Place] = {}
        self.pages: MemoryBlock | None = None
        self.endpoint_factory: EndpointFactory | None = None  # None: the memory of the wires is enough
        self._scope = ""
        self._homes: dict[tuple[str, int], Place] = {}
        self._page_numbers: dict[tuple[str, int], int] = {}
        self._page_names: list[str] = []

    # ------------------------------------------------------------------ drawing
    @contextmanager
    def scoped(self, name: str) -> Iterator[None]:
        """Wires and roles that are added meanwhile are called `name`.wire and `name`.role: a graph has several such parts."""
        before, self._scope = self._scope, f"{self._scope}{name}."
        try:
            yield
        finally:
            self._scope = before

    def _wire(self, wire: W) -> W:
        wire.name = f"{self._scope}{wire.name}"
        if wire.name in self.wires:
            raise ProgramError(f"two wires are called {wire.name}; names are unique in a program")
        if wire.name in ("clock", "control"):
            raise ProgramError(f"a wire cannot be called {wire.name}: time spent in other waits is counted under that name")
        self.wires[wire.name] = wire
        return wire

    def stream(self, name: str, layout: Layout, depth: int = 2, full: str = "block", paired: bool = False) -> StreamWire:
        return self._wire(StreamWire(name, layout, depth, full, paired))

    def broadcast(self, name: str, layout: Layout, least_readers: int = 1) -> BroadcastWire:
        """With `least_readers` 0 it need not have a reader."""
        return self._wire(BroadcastWire(name, layout, least_readers))

    def go_on_above(self, version: int) -> None:
        """Let all broadcasts number what they publish above `version`: the program continues an earlier one."""
        for wire in self.wires.values():
            if isinstance(wire, BroadcastWire):
                wire.begin_above = version

    def call(self, name: str, request: Layout, reply: Layout, depth: int = 2) -> CallWire:
        return self._wire(CallWire(name, request, reply, depth))

    def group(self, name: str, nbytes: int) -> GroupWire:
        return self._wire(GroupWire(name, nbytes))

    def shared(self, name: str, layout: Layout, instead: str = "") -> SharedWire:
        """`instead`: what the user may type where processes cannot share memory (an option that draws no shared wire)."""
        return self._wire(SharedWire(name, layout, instead))

    def add(self, name: str, role: Callable[..., Role], *, replicas: int | tuple[int, int, int] = 1,
            place: str | Callable[[int], str] | None = None, compute_threads: int = 1, private_bytes: int = 0,
            on_gpu: bool | None = None, **arguments: Any) -> RoleNode:
        """Add a role. `replicas` is a number, or (least, start, most). `place` names a process to share. `private_bytes` is the
        memory that each replica allocates for itself, where that is much. `on_gpu`: whether it computes on a GPU if the program
        does; None: its wires tell (see `Program.on_gpu`)."""
        least, start, most = (replicas, replicas, replicas) if isinstance(replicas, int) else replicas
        if not 0 <= least <= start <= most or most < 1:
            raise ProgramError(f"role {name}: replicas must be 0 <= least <= start <= most, not {least}, {start}, {most}")
        name = f"{self._scope}{name}"
        if name in self.nodes:
            raise ProgramError(f"two roles are called {name}; names are unique in a program")
        node = RoleNode(name, role, arguments, least, start, most, compute_threads, private_bytes, on_gpu)
        self.nodes[name] = node
        for port in node.ports.values():
            if self.wires.get(port.wire.name) is not port.wire:
                raise ProgramError(f"role {name} is given {port!r}, which belongs to another program")
            port.wire.join(port.end, node)
        for index in range(most):
            where = place(index) if callable(place) else place or f"{name}-{index}"
            home = self._homes[name, index] = self.places.setdefault(where, Place(where))
            home.members.append((name, index))
        return node

    def threaded(self, place: str) -> None:
        """Give each role of this place a thread of its own: for places where one role computes for long."""
        if place not in self.places:
            raise ProgramError(f"there is no place {place}; there are {', '.join(self.places)}")
        self.places[place].threads = True

    def pin(self, node: str) -> None:
        """Keep each replica that is alone in its place on a core of its own: otherwise the system moves busy ones about while
        another core idles."""
        for index in range(self.nodes[node].most):
            home = self._homes[node, index]
            home.core = index if len(home.members) == 1 else None

    # ------------------------------------------------------------------ for the runtimes
    def instances(self) -> list[tuple[str, int]]:
        """Every (node, replica) there can be, in the order of drawing."""
        return [(node.name, index) for node in self.nodes.values() for index in range(node.most)]

    def first_instances(self) -> list[tuple[str, int]]:
        """Every (node, replica) that the run starts with."""
        return [(node.name, index) for node in self.nodes.values() for index in range(node.start)]

    def place_of(self, node: str, index: int) -> Place:
        return self._homes[node, index]

    def build(self, allocator: Allocator) -> None:
        """Lay out all memory, for the most replicas there can be."""
        for wire in self.wires.values():
            wire.build(allocator)
        waits = (f"wait_seconds/{name}" for name in (*self.wires, "clock", "control"))
        self._page_names = Stats.names(waits, self.metrics)
        self._page_numbers = {instance: number for number, instance in enumerate(self.instances())}
        self.pages = allocator.memory(8 * len(self._page_names) * len(self._page_numbers))

    def endpoint(self, port: Port, node: str, index: int, incarnation: int) -> Any:
        """The end of a wire that an instance holds in place of a port."""
        member = port.wire.member_number(port.end, node, index)
        if self.endpoint_factory is not None:
            return self.endpoint_factory.endpoint(port, member, incarnation)
        return port.wire.attach(port.end, member, incarnation)

    def release(self) -> None:
        """Release all memory: the run is over."""
        for wire in self.wires.values():
            wire.release()
        self.pages = None

    def stats(self, node: str, index: int) -> Stats:
        """The counters of one instance."""
        return Stats(self._page_names, self.page(node, index), self.metrics)

    def page(self, node: str, index: int) -> np.ndarray:
        """The page of one instance; it outlives its incarnations, so totals never run backwards."""
        assert self.pages is not None
        size, page = 8 * len(self._page_names), self._page_numbers[node, index]
        words: np.ndarray = self.pages.array()[page * size : (page + 1) * size].view("f8")
        return words

    def describe(self) -> str:
        """The graph in words, for `shoal show`."""
        lines = [f"program {self.name}", "", "places (processes) and roles"]
        shown: set[str] = set()
        for place in self.places.values():
            node_names = list(dict.fromkeys(node for node, _ in place.members))
            key = ",".join(node_names)
            if key in shown:
                continue
            shown.add(key)
            same = [other for other in self.places.values() if list(dict.fromkeys(n for n, _ in other.members)) == node_names]
            label = place.name if len(same) == 1 else f"{same[0].name} .. {same[-1].name}"
            lines.append(f"  [{label}]{' a thread per role' if place.threads else ''}")
            for name in node_names:
                node = self.nodes[name]
                count = f"{node.most}" if node.least == node.most else f"{node.least}..{node.most}, {node.start} at first"
                lines.append(f"    {name} x {count}   {_title(node.role)}")
                for argument, port in node.ports.items():
                    arrow = "-->" if port.end in ("sink", "publisher", "client") else "<--" if port.end != "member" else "<->"
                    lines.append(f"      {arrow} {port.wire.name:<12} ({port.wire.kind}.{port.end}, as {argument})")
        lines += ["", "wires"]
        for wire in self.wires.values():
            ends = "   ".join(f"{end}: {', '.join(dict.fromkeys(n for n, _ in wire.users(end))) or 'none'}" for end in wire.ends)
            lines.append(f"  {wire.name:<14} {wire.kind:<10} {ends}{_details(wire)}")
        return "\n".join(lines)


def _title(role: Callable[..., Any]) -> str:
    text = role.__doc__ or (role.__name__ if isinstance(role, type | FunctionType) else repr(role))
    return text.strip().splitlines()[0]


def _details(wire: Wire) -> str:
    if isinstance(wire, StreamWire):
        return f"   {wire.depth} slots of {wire.layout.nbytes:,} bytes per pair, when full: {wire.full}"
    if isinstance(wire, BroadcastWire):
        return f"   {wire.layout.nbytes:,} bytes"
    return ""
