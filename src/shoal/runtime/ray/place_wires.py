"""A place's part of the graph on a cluster: its own copy of every wire, and the links to the copies of other places."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shoal.runtime.program import Program
from shoal.runtime.ray.links import BroadcastLink, CallLink, Link, StreamLink
from shoal.runtime.ray.links.group_link import GroupLink
from shoal.runtime.ray.messenger import Message
from shoal.runtime.ray.place_memory import PlaceAllocator
from shoal.runtime.wires import BroadcastWire, CallWire, GroupWire, Port, StreamWire, Wire

__all__ = ["GroupStatus", "MemberStatus", "PlaceWires"]

GREETING_SECONDS = 5.0
LINKS: dict[type[Wire], Callable[..., Link]] = {
    StreamWire: StreamLink, BroadcastWire: BroadcastLink, CallWire: CallLink, GroupWire: GroupLink}


class MemberStatus(NamedTuple):
    """What the supervisor says about one member of a wire."""

    wire: str
    end: str
    member: int
    incarnation: int
    alive: bool
    here: bool


class GroupStatus(NamedTuple):
    """What the supervisor says about the members of a group."""

    wire: str
    epoch: int
    ranks: list[int]


class PlaceWires:
    """Creates the ends of wires in a place, passes messages to the links, and the status of members to wires and links."""

    def __init__(self, program: Program, place: str, address: str, send: Callable[[str, Message, Any], None]) -> None:
        self.place, self.address, self.program, self._send = place, address, program, send
        self.allocator = PlaceAllocator()
        program.build(self.allocator)
        self._statuses: dict[tuple[str, str, int], MemberStatus] = {}
        self._own: dict[tuple[str, str, int], int] = {}  # incarnations of the members that live here
        self._place_names = {(wire.name, end): [program.place_of(*user).name for user in wire.users(end)]
                       for wire in program.wires.values() for end in wire.ends}
        self._links = {name: LINKS[type(wire)](wire, self) for name, wire in program.wires.items() if type(wire) in LINKS}
        program.endpoint_factory = self

    # ------------------------------------------------------------------ for the links
    def place_of(self, wire: Wire, end: str, member: int) -> str:
        return self._place_names[wire.name, end][member]

    def here(self, wire: Wire, end: str, member: int) -> bool:
        return self.place_of(wire, end, member) == self.place

    def incarnation(self, wire: Wire, end: str, member: int) -> int:
        key = (wire.name, end, member)
        if key in self._own:
            return self._own[key]
        return self._statuses[key].incarnation if key in self._statuses else -1

    def send(self, place: str, message: Message, payload: Any = None) -> None:
        self._send(place, message, payload)

    def wake(self) -> None:
        self.allocator.wake()

    # ------------------------------------------------------------------ for the instances
    def endpoint(self, port: Port, member: int, incarnation: int) -> Any:
        wire, end = port.wire, port.end
        self._own[wire.name, end, member] = incarnation
        link = self._links.get(wire.name)
        if link is None:
            return wire.attach(end, member, incarnation)
        return link.endpoint(end, member, incarnation)

    # ------------------------------------------------------------------ for the host
    def receive(self, message: Message, payload: Any) -> None:
        wire, kind, *numbers = message
        self._links[wire].receive(kind, tuple(numbers), payload)

    def told(self, statuses: Iterable[MemberStatus | GroupStatus]) -> None:
        """The supervisor reports the status of members."""
        for status in statuses:
            if isinstance(status, GroupStatus):
                link = self._links[status.wire]
                assert isinstance(link, GroupLink)
                link.formed(status.epoch, status.ranks)
                continue
            key = (status.wire, status.end, status.member)
            before = self._statuses.get(key, MemberStatus(*key, -1, False, False))
            if status.incarnation < before.incarnation:
                continue
            self._statuses[key] = status
            wire = self.program.wires[status.wire]
            if status.here != before.here:
                wire.enlist(status.end, status.member, status.here)
            if status.alive != before.alive and not isinstance(wire, GroupWire):
                wire.membership(status.end, status.member, status.alive)
            if status.incarnation > before.incarnation and status.wire in self._links:
                self._links[status.wire].renewed(status.end, status.member)

    def await_greetings(self) -> None:
        """A restarted publisher waits until all living readers, who were told about it, have sent their version."""
        deadline = time.monotonic() + GREETING_SECONDS
        publishing = [link for link in self._links.values() if isinstance(link, BroadcastLink) and link.publishes]
        for link in publishing:
            living = {self._place_names[key[:2]][key[2]] for key, status in self._statuses.items()
                      if key[:2] == (link.wire.name, "reader") and status.alive} - {self.place}
            while not living <= link.greeted and time.monotonic() < deadline:
                time.sleep(0.01)

    def numbers(self) -> dict[str, dict[str, float]]:
        """The numbers of this place's part of every wire."""
        return {name: {**link.numbers(), "conserved": float(self.program.wires[name].conserved())}
                for name, link in self._links.items()}
