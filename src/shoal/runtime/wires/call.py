"""**call**: many -> one, request and reply, `depth` requests in flight per client.

Each slot holds a request and a reply. The client alone writes the request's identity and whether it is OPEN, the server
alone writes the identity of the REPLY, so no word has two writers:

    closed --client: identity, OPEN--> asked --server: REPLY = identity--> answered --client: not OPEN--> closed

An identity holds the client's incarnation and is never used again. So a reply to a client that died, or to a request that
timed out, is recognised and dropped. A server may keep a request and answer it later, in any order; a server's successor
finds in the headers what was asked and not answered, and answers that. Clients are distributed over the servers that the
graph has, unless they name one; when a server leaves, its open requests are distributed over the others.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from shoal.core import Call, Server, Wait
from shoal.errors import ProgramError, Timeout, WireError
from shoal.runtime.wires.wire import Port, Wire, int64_words
from shoal.slots import Allocator, Channel, Layout, fence, map_tree

__all__ = ["INCARNATION_SHIFT", "CallWire"]

IDENTITY, OPEN, SERVER, REPLY = range(4)             # a slot's header
ASKED, LATE, TIMEOUTS, UNUSED = range(4)             # a client's counters; UNUSED: bytes of its requests
BATCHES, ANSWERED, HERE = range(3)                   # a server's; HERE is the supervisor's
HEADER = 64
INCARNATION_SHIFT = 40


class CallWire(Wire):
    kind, ends = "call", ("client", "server")

    def __init__(self, name: str, request: Layout, reply: Layout, depth: int = 2) -> None:
        super().__init__(name)
        if depth < 1:
            raise ProgramError(f"call {name}: depth must be at least 1, not {depth}")
        self.request, self.reply, self.depth = request, reply, depth
        self.slot_bytes = HEADER + request.nbytes + reply.nbytes
        self.asked: list[Channel] = []
        self.answered: list[Channel] = []

    @property
    def client(self) -> Port:
        return self.port("client")

    @property
    def server(self) -> Port:
        return self.port("server")

    def lay_out(self, allocator: Allocator) -> None:
        self.check_ends(client=1, server=1)
        clients, servers = self.members("client"), self.members("server")
        self.memory = allocator.memory(clients * self.depth * self.slot_bytes + HEADER * (clients + servers))
        self.asked = [allocator.channel(2 * clients * self.depth) for _ in range(servers)]
        self.answered = [allocator.channel(2 * self.depth) for _ in range(clients)]

    def slots(self, client: int) -> list[tuple[np.ndarray, Any, Any]]:
        """A client's slots: header, request, reply."""
        memory, slots = self.array(), []
        for number in range(self.depth):
            start, request, reply = self.slot_offsets(client * self.depth + number)
            slots.append((int64_words(memory, start, 8), self.request.views(memory, request), self.reply.views(memory, reply)))
        return slots

    def slot_offsets(self, place: int) -> tuple[int, int, int]:
        """Where a slot's header, request and reply lie in memory; `place` counts the slots of all clients."""
        start = place * self.slot_bytes
        return start, start + HEADER, start + HEADER + self.request.nbytes

    def counters(self) -> tuple[np.ndarray, np.ndarray]:
        """[clients, 8] and [servers, 8]."""
        clients, servers = self.members("client"), self.members("server")
        words = int64_words(self.array(), clients * self.depth * self.slot_bytes, 8 * (clients + servers))
        return words[: 8 * clients].reshape(clients, 8), words[8 * clients :].reshape(servers, 8)

    def attach(self, end: str, member: int, incarnation: int) -> Call | Server:
        return CallClient(self, member, incarnation) if end == "client" else CallServer(self, member)

    # ------------------------------------------------------------------ the supervisor's
    def _views(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The counters, and the headers of all slots [clients * depth, words]."""
        if not self._kept:
            slots = self.members("client") * self.depth
            words = int64_words(self.array(), 0, slots * self.slot_bytes // 8)
            self._kept["views"] = (*self.counters(), words.reshape(slots, self.slot_bytes // 8))
        views: tuple[np.ndarray, np.ndarray, np.ndarray] = self._kept["views"]
        return views

    def enlist(self, end: str, member: int, here: bool) -> None:
        if end != "server":
            return
        _, servers, slots = self._views()
        servers[member, HERE] = here
        others = np.flatnonzero(servers[:, HERE])
        if here or not len(others):
            return
        for place, words in enumerate(slots):  # the requests that it leaves unanswered go to the others
            if words[OPEN] and words[SERVER] == member and words[REPLY] != words[IDENTITY]:
                words[SERVER] = others[place % len(others)]
                self.asked[int(words[SERVER])].put(place, int(words[IDENTITY]))

    def numbers(self) -> dict[str, float]:
        clients, servers, _ = self._views()
        batches, answered = (int(n) for n in servers[:, :2].sum(0))  # first: never more than were asked, though both keep counting
        asked, late, timeouts, unused = (int(n) for n in clients[:, :4].sum(0))
        moved = asked * self.request.nbytes - unused + answered * self.reply.nbytes
        return {"asked": asked, "late": late, "timeouts": timeouts, "batches": batches, "answered": answered, "bytes_moved": moved}


class CallPending:
    """A request that was sent."""

    def __init__(self, client: CallClient, number: int, identity: int) -> None:
        self._client, self._number, self._identity = client, number, identity

    def answered(self) -> Wait:
        """Ready when the reply is there: for a client that waits for other things as well."""
        return self._client._answer(self._number, self._identity)

    async def result(self, timeout: float | None = None) -> Any:
        """A copy of the reply; the slot is free again."""
        result = map_tree(np.copy, await self.look(timeout))
        self.done()
        return result

    async def look(self, timeout: float | None = None) -> Any:
        """The reply in its slot, valid until `done`."""
        return await self._client._reply(self._number, self._identity, timeout)

    def done(self) -> None:
        """Free the slot of a reply."""
        self._client._close(self._number)


class CallDraft:
    """A free slot whose request is written in place."""

    def __init__(self, client: CallClient, number: int) -> None:
        self.data = client._slots[number][1]
        self._client, self._number = client, number

    def send(self, to: int | None = None, unused: int = 0) -> CallPending:
        """Send it to this client's server, or to server number `to`; `unused` of its bytes do not count as moved."""
        return self._client._send(self._number, to, unused)


class CallClient:
    """The asking end."""

    def __init__(self, wire: CallWire, member: int, incarnation: int) -> None:
        self.name, self.depth, self._member, self._wire = wire.name, wire.depth, member, wire
        self._answered = wire.answered[member]
        self._slots = wire.slots(member)
        clients, self._servers = wire.counters()
        self._counter = clients[member]
        self._identity = max(incarnation << INCARNATION_SHIFT, *(int(words[IDENTITY]) for words, _, _ in self._slots))
        self._free = deque(range(wire.depth))
        self._lost: set[int] = set()  # slots whose request timed out: free again when the late reply comes
        self._replies: dict[int, int] = {}  # slot -> identity of the reply that has come
        for words, _, _ in self._slots:
            words[OPEN] = 0  # the requests of a predecessor are void

    def _collect(self) -> None:
        for number, identity in self._answered.get():
            words = self._slots[number][0]
            if not words[OPEN] or words[IDENTITY] != identity or words[REPLY] != identity:
                continue  # for a predecessor, or sent twice
            if number in self._lost:
                self._lost.discard(number)
                self._counter[LATE] += 1
                self._close(number)
            else:
                self._replies[number] = identity

    def _close(self, number: int) -> None:
        self._slots[number][0][OPEN] = 0
        self._free.append(number)

    def _has_free(self) -> bool:
        self._collect()
        return bool(self._free)

    async def slot(self, timeout: float | None = None) -> CallDraft:
        why = f"a free request slot of {self.name}"
        if not await Wait(self._has_free, self.name, why, self._answered.fds, _deadline(timeout)):
            self._counter[TIMEOUTS] += 1
            raise Timeout(f"{self.name}: no free request slot within {timeout} s; {self._wire.depth} requests are unanswered")
        return CallDraft(self, self._free.popleft())

    def _send(self, number: int, to: int | None = None, unused: int = 0) -> CallPending:
        self._identity += 1
        server = self._server() if to is None else to
        words = self._slots[number][0]
        words[IDENTITY], words[SERVER] = self._identity, server
        fence()
        words[OPEN] = 1
        self._counter[ASKED] += 1
        self._counter[UNUSED] += unused
        self._wire.asked[server].put(self._member * self._wire.depth + number, self._identity)
        return CallPending(self, number, self._identity)

    def _server(self) -> int:
        """This client's server: clients are distributed by number over the servers that the graph has."""
        here = [k for k, words in enumerate(self._servers) if words[HERE]] or range(len(self._servers))
        return here[self._member % len(here)]

    def _answer(self, number: int, identity: int, timeout: float | None = None) -> Wait:
        def ready() -> bool:
            self._collect()
            return self._replies.get(number) == identity

        why = f"the reply to request {identity & ((1 << INCARNATION_SHIFT) - 1)} on {self.name}"
        return Wait(ready, self.name, why, self._answered.fds, _deadline(timeout))

    async def _reply(self, number: int, identity: int, timeout: float | None) -> Any:
        if not await self._answer(number, identity, timeout):
            self._lost.add(number)
            self._counter[TIMEOUTS] += 1
            raise Timeout(f"{self.name}: no reply within {timeout} s")
        del self._replies[number]
        return self._slots[number][2]

    async def ask(self, request: Any, timeout: float | None = None) -> Any:
        """Send a request and wait for the reply; `timeout` covers both the free slot and the reply."""
        deadline = _deadline(timeout)
        draft = await self.slot(timeout)
        self._wire.request.copy(draft.data, request)
        return await draft.send().result(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


class CallRequest:
    """One request, at the server."""

    def __init__(self, server: CallServer, place: int, identity: int) -> None:
        self._words, self.data, self._reply = server._slots[place]
        self._server, self._place, self._identity = server, place, identity
        self.client, self._answered = place // server._wire.depth, False

    @property
    def void(self) -> bool:
        """Whether no client waits for the reply any more: the client was restarted, or another server has answered."""
        words = self._words
        return not words[OPEN] or int(words[IDENTITY]) != self._identity or int(words[REPLY]) == self._identity

    @property
    def answer(self) -> Any:
        """The memory that the reply is read from: fill it in place and pass it to `reply`, and nothing is copied."""
        return self._reply

    def reply(self, tree: Any) -> None:
        if self._answered:
            raise WireError(f"{self._server.name}: a request of client {self.client} was answered twice")
        self._answered = True
        self._server._answer(self, tree)


class CallServer:
    """The answering end. Each request is seen by one server, once."""

    def __init__(self, wire: CallWire, member: int) -> None:
        self.name, self._wire = wire.name, wire
        self._channel = wire.asked[member]
        self._counter = wire.counters()[1][member]
        self._slots = [slot for client in range(wire.members("client")) for slot in wire.slots(client)]
        self._seen = [0] * len(self._slots)  # per slot, the newest identity: identities only grow
        self._pending: deque[tuple[int, int]] = deque()
        for place, (words, _, _) in enumerate(self._slots):
            identity = int(words[IDENTITY])  # first: if it is open after that, it is not one whose client is about to send it
            fence()
            if words[OPEN] and words[SERVER] == member:
                if words[REPLY] == identity:  # answered, but perhaps the client was not told
                    wire.answered[place // wire.depth].put(place % wire.depth, identity)
                else:  # a predecessor left it unanswered
                    self._hear(place, identity)

    def _hear(self, place: int, identity: int) -> None:
        if identity > self._seen[place]:
            self._seen[place] = identity
            self._pending.append((place, identity))

    def _any(self) -> bool:
        for place, identity in self._channel.get():
            self._hear(place, identity)
        return bool(self._pending)

    async def take(self, most: int) -> list[CallRequest]:
        """The pending requests: at least one, at most `most`."""
        if most < 1:
            raise WireError(f"{self.name}: take at least 1 request, not {most}")
        wait = self.asked()
        requests: list[CallRequest] = []
        while not requests:
            await wait
            requests = self.pending(most)
        return requests

    def asked(self) -> Wait:
        """Ready when there is a request to take: for a server that waits for other things as well."""
        return Wait(self._any, self.name, f"a request on {self.name}", self._channel.fds)

    def pending(self, most: int) -> list[CallRequest]:
        """The requests that are pending now: perhaps none, at most `most`."""
        requests: list[CallRequest] = []
        while self._any() and len(requests) < most:
            request = CallRequest(self, *self._pending.popleft())
            if not request.void:
                requests.append(request)
        self._counter[BATCHES] += bool(requests)
        return requests

    def _answer(self, request: CallRequest, tree: Any) -> None:
        # A client may be replaced at any moment of this: then its successor's request in the same slot has another
        # identity, and this server writes its reply after this one.
        if request.void:
            return
        if tree is not request._reply:
            self._wire.reply.copy(request._reply, tree)
        fence()
        request._words[REPLY] = request._identity
        self._counter[ANSWERED] += 1
        self._wire.answered[request.client].put(request._place % self._wire.depth, request._identity)
