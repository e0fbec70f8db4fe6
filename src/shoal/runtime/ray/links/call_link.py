"""Carries requests and replies of a call; a restarted server is asked again, the request of a dead client is void."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shoal.runtime.ray.links.link import LinkContext
from shoal.runtime.ray.place_memory import connect_remote
from shoal.runtime.wires.call import IDENTITY, INCARNATION_SHIFT, OPEN, REPLY, SERVER, CallWire
from shoal.slots import fence

__all__ = ["CallLink"]


class Forward:
    """A channel of a call whose reader is in another place."""

    def __init__(self, carry: Callable[[int, int], None]) -> None:
        self._carry = carry

    def put(self, number: int, identity: int) -> None:
        self._carry(number, identity)

    def pop(self) -> None:
        """A request is never taken back."""


class CallLink:
    def __init__(self, wire: CallWire, context: LinkContext) -> None:
        self.wire, self.context = wire, context
        self._clients = [m for m in range(wire.members("client")) if context.here(wire, "client", m)]
        self._servers = [m for m in range(wire.members("server")) if context.here(wire, "server", m)]
        for server in range(wire.members("server")):
            if server not in self._servers and self._clients:
                connect_remote(wire.asked[server], Forward(self._ask))
        for client in range(wire.members("client")):
            if client not in self._clients and self._servers:
                connect_remote(wire.answered[client], Forward(partial(self._answer, client)))
        self._memory = wire.array()

    def _slot(self, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Header, request and reply of a slot, as they lie in memory."""
        start, request, reply = self.wire.slot_offsets(place)
        return (self._memory[start : start + 64].view(np.int64), self._memory[request : request + self.wire.request.nbytes],
                self._memory[reply : reply + self.wire.reply.nbytes])

    def endpoint(self, end: str, member: int, incarnation: int) -> Any:
        return self.wire.attach(end, member, incarnation)

    def renewed(self, end: str, member: int) -> None:
        if end == "server":
            for client in self._clients:
                for place in range(client * self.wire.depth, (client + 1) * self.wire.depth):
                    words = self._slot(place)[0]
                    if words[OPEN] and words[SERVER] == member and words[REPLY] != words[IDENTITY]:
                        self._ask(place, int(words[IDENTITY]))
        elif self._servers and member not in self._clients:
            incarnation = self.context.incarnation(self.wire, "client", member)
            for place in range(member * self.wire.depth, (member + 1) * self.wire.depth):
                words = self._slot(place)[0]
                if int(words[IDENTITY]) >> INCARNATION_SHIFT < incarnation:  # the request of a predecessor is void
                    words[OPEN] = 0

    def _ask(self, place: int, identity: int) -> None:
        if place // self.wire.depth not in self._clients:
            return  # another place's request: that place sends it again
        words, request, _ = self._slot(place)
        server = int(words[SERVER])
        if server in self._servers:
            self.wire.asked[server].put(place, identity)
        else:
            self.context.send(self.context.place_of(self.wire, "server", server),
                             (self.wire.name, "ask", place, identity, server), request)

    def _answer(self, client: int, number: int, identity: int) -> None:
        place = client * self.wire.depth + number
        self.context.send(self.context.place_of(self.wire, "client", client), (self.wire.name, "answer", place, identity),
                         self._slot(place)[2])

    def receive(self, kind: str, numbers: tuple[Any, ...], payload: Any) -> None:
        place, identity = numbers[:2]
        words, request, reply = self._slot(place)
        client = place // self.wire.depth
        if kind == "answer":
            if words[OPEN] and int(words[IDENTITY]) == identity and int(words[REPLY]) != identity:
                reply[...] = payload
                fence()
                words[REPLY] = identity
                self.wire.answered[client].put(place % self.wire.depth, identity)
        elif words[OPEN] and int(words[IDENTITY]) == identity:
            words[SERVER] = numbers[2]  # it was sent to us instead of another server, or twice
            if int(words[REPLY]) == identity:
                self._answer(client, place % self.wire.depth, identity)
            else:
                self.wire.asked[numbers[2]].put(place, identity)
        elif int(words[IDENTITY]) < identity:
            request[...] = payload
            words[IDENTITY], words[SERVER] = identity, numbers[2]
            fence()
            words[OPEN] = 1
            self.wire.asked[numbers[2]].put(place, identity)

    def numbers(self) -> dict[str, float]:
        return self.wire.numbers()
