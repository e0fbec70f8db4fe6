"""A place's part of the graph on a cluster: its own copy of every wire, and the ferries between it and the copies of others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shoal.runtime.program import Program
from shoal.runtime.ray.ferries import BroadcastFerry, CallFerry, StreamFerry
from shoal.runtime.ray.gloo import GroupFerry
from shoal.runtime.ray.medium import PlaceMedium
from shoal.runtime.ray.post import Message
from shoal.runtime.wires import Broadcast, Call, Group, Port, Stream, Wire

__all__ = ["Fabric", "GroupWord", "Word"]

GREETING_SECONDS = 5.0
FERRIES: dict[type[Wire], Callable[..., Any]] = {Stream: StreamFerry, Broadcast: BroadcastFerry, Call: CallFerry, Group: GroupFerry}


class Word(NamedTuple):
    """What the supervisor says of one member of a wire."""

    wire: str
    end: str
    member: int
    incarnation: int
    alive: bool
    here: bool


class GroupWord(NamedTuple):
    """What it says of the members of a group."""

    wire: str
    epoch: int
    ranks: list[int]


class Fabric:
    """Makes endpoints in a place, passes messages to the ferries, and the supervisor's words to the wires."""

    def __init__(self, program: Program, place: str, address: str, send: Callable[[str, Message, Any], None]) -> None:
        self.place, self.address, self.program, self._send = place, address, program, send
        self.medium = PlaceMedium()
        program.build(self.medium)
        self._words: dict[tuple[str, str, int], Word] = {}
        self._own: dict[tuple[str, str, int], int] = {}  # incarnations of the members that live here
        self._homes = {(wire.name, end): [program.place_of(*user).name for user in wire.users(end)]
                       for wire in program.wires.values() for end in wire.ends}
        self._ferries = {name: FERRIES[type(wire)](wire, self) for name, wire in program.wires.items() if type(wire) in FERRIES}
        program.fabric = self

    # ------------------------------------------------------------------ for the ferries
    def place_of(self, wire: Wire, end: str, member: int) -> str:
        return self._homes[wire.name, end][member]

    def here(self, wire: Wire, end: str, member: int) -> bool:
        return self.place_of(wire, end, member) == self.place

    def incarnation(self, wire: Wire, end: str, member: int) -> int:
        key = (wire.name, end, member)
        if key in self._own:
            return self._own[key]
        return self._words[key].incarnation if key in self._words else -1

    def send(self, place: str, message: Message, payload: Any = None) -> None:
        self._send(place, message, payload)

    def wake(self) -> None:
        self.medium.wake()

    # ------------------------------------------------------------------ for the instances
    def endpoint(self, port: Port, member: int, incarnation: int) -> Any:
        wire, end = port.wire, port.end
        self._own[wire.name, end, member] = incarnation
        ferry = self._ferries.get(wire.name)
        if ferry is None:
            return wire.attach(end, member, incarnation)
        return ferry.endpoint(end, member, incarnation)

    # ------------------------------------------------------------------ for the host
    def receive(self, message: Message, payload: Any) -> None:
        wire, kind, *numbers = message
        self._ferries[wire].receive(kind, tuple(numbers), payload)

    def told(self, words: Iterable[Word | GroupWord]) -> None:
        """The supervisor's words."""
        for word in words:
            if isinstance(word, GroupWord):
                self._ferries[word.wire].formed(word.epoch, word.ranks)
                continue
            key = (word.wire, word.end, word.member)
            before = self._words.get(key, Word(*key, -1, False, False))
            if word.incarnation < before.incarnation:
                continue
            self._words[key] = word
            wire = self.program.wires[word.wire]
            if word.here != before.here:
                wire.enlist(word.end, word.member, word.here)
            if word.alive != before.alive and not isinstance(wire, Group):
                wire.membership(word.end, word.member, word.alive)
            if word.incarnation > before.incarnation and word.wire in self._ferries:
                self._ferries[word.wire].renewed(word.end, word.member)

    def await_greetings(self) -> None:
        """A successor begins when everybody has told it what they know: whoever lives was told of it before it was started."""
        deadline = time.monotonic() + GREETING_SECONDS
        publishing = [ferry for ferry in self._ferries.values() if isinstance(ferry, BroadcastFerry) and ferry.publishes]
        for ferry in publishing:
            living = {self._homes[key[:2]][key[2]] for key, word in self._words.items()
                      if key[:2] == (ferry.wire.name, "reader") and word.alive} - {self.place}
            while not living <= ferry.greeted and time.monotonic() < deadline:
                time.sleep(0.01)

    def numbers(self) -> dict[str, dict[str, float]]:
        """What this place's part of every wire has counted."""
        return {name: {**ferry.numbers(), "conserved": float(self.program.wires[name].conserved())}
                for name, ferry in self._ferries.items()}
