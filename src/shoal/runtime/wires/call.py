"""**call**: many -> one, request and reply, `depth` requests in flight per client.

    IDLE --client--> ASKED --server--> ANSWERED --client--> IDLE

Each slot holds a request and a reply; both carry the request's id and the client's incarnation, so that a reply meant
for a client that died, or for a request that timed out, is recognised and dropped. A server may keep a request and
answer later, in any order; a server's successor finds unanswered requests in the headers and answers them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from shoal.core import Wait
from shoal.errors import ProgramError, Timeout, WireError
from shoal.runtime.wires.base import Wire, int64_words
from shoal.slots import Channel, Layout, Medium, map_tree

__all__ = ["Call"]

IDLE, ASKED, ANSWERED = range(3)
STATE, IDENTITY, INCARNATION, REPLY_IDENTITY, REPLY_INCARNATION = range(5)
HEADER = 64


class Call(Wire):
    kind, ends = "call", ("client", "server")

    def __init__(self, name: str, request: Layout, reply: Layout, depth: int = 2) -> None:
        super().__init__(name)
        if depth < 1:
            raise ProgramError(f"call {name}: depth is at least 1, not {depth}")
        self.request, self.reply, self.depth = request, reply, depth
        self.asked: list[Channel] = []
        self.answered: list[Channel] = []

    @property
    def client(self) -> Any:
        return self.port("client")

    @property
    def server(self) -> Any:
        return self.port("server")

    def build(self, medium: Medium) -> None:
        self.check_ends(client=1, server=1)
        clients, servers = self.members("client"), self.members("server")
        self.slot_bytes = HEADER + self.request.nbytes + self.reply.nbytes
        self.memory = medium.memory(clients * self.depth * self.slot_bytes + HEADER * (clients + servers))
        self.asked = [medium.channel(clients * self.depth) for _ in range(servers)]
        self.answered = [medium.channel(self.depth) for _ in range(clients)]

    def slot(self, client: int, number: int) -> tuple[np.ndarray, Any, Any]:
        assert self.memory is not None
        memory, offset = self.memory.array(), (client * self.depth + number) * self.slot_bytes
        request = self.request.views(memory, offset + HEADER)
        return int64_words(memory, offset, 8), request, self.reply.views(memory, offset + HEADER + self.request.nbytes)

    def counter(self, member: int) -> np.ndarray:
        assert self.memory is not None
        base = self.members("client") * self.depth * self.slot_bytes
        return int64_words(self.memory.array(), base + HEADER * member, 8)

    def attach(self, end: str, member: int, incarnation: int) -> Client | Server:
        return Client(self, member, incarnation) if end == "client" else Server(self, member)

    def numbers(self) -> dict[str, float]:
        clients, servers = self.members("client"), self.members("server")
        asked, late = np.sum([self.counter(m)[:2] for m in range(clients)], axis=0)
        batches, answered = np.sum([self.counter(clients + m)[:2] for m in range(servers)], axis=0)
        return {"asked": int(asked), "late": int(late), "batches": int(batches), "answered": int(answered)}


class Pending:
    """A request that is on its way."""

    def __init__(self, client: Client, number: int, identity: int) -> None:
        self._client, self._number, self._identity = client, number, identity

    async def result(self, timeout: float | None = None) -> Any:
        return await self._client._result(self._number, self._identity, timeout)


class Draft:
    """A free slot whose request is written in place."""

    def __init__(self, client: Client, number: int) -> None:
        self.data = client._slots[number][1]
        self._client, self._number = client, number

    def send(self) -> Pending:
        return self._client._send(self._number)


class Client:
    """The asking end."""

    def __init__(self, wire: Call, member: int, incarnation: int) -> None:
        self.name, self._member, self._incarnation, self._wire = wire.name, member, incarnation, wire
        self._asked = wire.asked[member % len(wire.asked)]
        self._answered = wire.answered[member]
        self._slots = [wire.slot(member, number) for number in range(wire.depth)]
        self._counter = wire.counter(member)
        self._identity = max(int(words[IDENTITY]) for words, _, _ in self._slots)
        self._free = deque(range(wire.depth))
        self._lost: set[int] = set()  # slots whose request timed out: free again once the late reply is in
        self._replies: dict[int, int] = {}  # slot -> identity of the reply that is in
        for words, _, _ in self._slots:  # a predecessor's questions are void
            words[STATE] = IDLE

    def _collect(self) -> None:
        for number, identity in self._answered.get():
            words = self._slots[number][0]
            if words[STATE] != ANSWERED or words[REPLY_IDENTITY] != identity or words[REPLY_INCARNATION] != self._incarnation:
                continue  # for a predecessor
            if number in self._lost:
                self._lost.discard(number)
                self._counter[1] += 1
                words[STATE] = IDLE
                self._free.append(number)
            else:
                self._replies[number] = identity

    def _has_free(self) -> bool:
        self._collect()
        return bool(self._free)

    async def slot(self) -> Draft:
        await Wait(self._has_free, self.name, f"a free request slot of {self.name}", self._answered.fds)
        return Draft(self, self._free.popleft())

    def _send(self, number: int) -> Pending:
        self._identity += 1
        words = self._slots[number][0]
        words[IDENTITY], words[INCARNATION] = self._identity, self._incarnation
        words[STATE] = ASKED
        self._counter[0] += 1
        self._asked.put(self._member * self._wire.depth + number, self._identity)
        return Pending(self, number, self._identity)

    async def _result(self, number: int, identity: int, timeout: float | None) -> Any:
        def ready() -> bool:
            self._collect()
            return self._replies.get(number) == identity

        deadline = None if timeout is None else time.monotonic() + timeout
        if not await Wait(ready, self.name, f"the reply to request {identity} on {self.name}", self._answered.fds, deadline):
            self._lost.add(number)
            raise Timeout(f"{self.name}: no reply to request {identity} within {timeout} s")
        words, _, reply = self._slots[number]
        del self._replies[number]
        result = map_tree(np.copy, reply)
        words[STATE] = IDLE
        self._free.append(number)
        return result

    async def ask(self, request: Any, timeout: float | None = None) -> Any:
        draft = await self.slot()
        self._wire.request.copy(draft.data, request)
        return await draft.send().result(timeout)


class Request:
    """One question in the server's hands."""

    def __init__(self, server: Server, client: int, number: int, words: np.ndarray, data: Any, reply: Any) -> None:
        self.client, self.data = client, data
        self._server, self._number, self._words, self._reply = server, number, words, reply
        self._identity, self._incarnation = int(words[IDENTITY]), int(words[INCARNATION])

    def reply(self, tree: Any) -> None:
        self._server._answer(self, tree)


class Server:
    """The answering end. Clients are dealt to servers by number; each pending request is seen once."""

    def __init__(self, wire: Call, member: int) -> None:
        self.name, self._wire = wire.name, wire
        self._channel = wire.asked[member]
        self._counter = wire.counter(wire.members("client") + member)
        self._slots = {client * wire.depth + number: wire.slot(client, number)
                       for client in range(member, wire.members("client"), wire.members("server")) for number in range(wire.depth)}
        self._pending: deque[tuple[int, int]] = deque()
        self._channel.get()
        for place, (words, _, _) in self._slots.items():  # what a predecessor left unanswered
            if words[STATE] == ASKED:
                self._pending.append((place, int(words[IDENTITY])))

    def _any(self) -> bool:
        for place, identity in self._channel.get():
            if (place, identity) not in self._pending:
                self._pending.append((place, identity))
        return bool(self._pending)

    async def take(self, most: int) -> list[Request]:
        """Whatever is pending, at least one and at most `most` requests."""
        requests: list[Request] = []
        while not requests:
            await Wait(self._any, self.name, f"a request on {self.name}", self._channel.fds)
            while self._pending and len(requests) < most:
                place, identity = self._pending.popleft()
                words, data, reply = self._slots[place]
                if words[STATE] == ASKED and words[IDENTITY] == identity:
                    requests.append(Request(self, place // self._wire.depth, place % self._wire.depth, words, data, reply))
        self._counter[0] += 1
        return requests

    def _answer(self, request: Request, tree: Any) -> None:
        words = request._words
        if words[IDENTITY] != request._identity or words[INCARNATION] != request._incarnation or words[STATE] == IDLE:
            return  # the client was replaced in the meantime
        if words[STATE] == ANSWERED:
            raise WireError(f"{self.name}: request {request._identity} of client {request.client} was answered twice")
        self._wire.reply.copy(request._reply, tree)
        words[REPLY_IDENTITY], words[REPLY_INCARNATION] = request._identity, request._incarnation
        words[STATE] = ANSWERED
        self._counter[1] += 1
        self._wire.answered[request.client].put(request._number, request._identity)
