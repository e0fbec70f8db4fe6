"""**group**: synchronous all-reduce among members, re-formed when one dies or joins.

Each member has two buffers, used in turn. In round r a member writes its vector, announces r, waits until every member
has announced r, and adds the vectors up in the order of rank: every member computes the same bits. A buffer is written
again two rounds later, which a member reaches only after all others have finished reading it.

The supervisor alone writes the epoch and the ranks (by seniority: survivors before newcomers). A member that finds the
epoch changed raises GroupChanged: the interrupted update is discarded and `sync` makes everyone load rank 0's state.
Others may already write for the new epoch while a member still adds up the old one; it looks at the epoch once more
when it has read everything, so what it returns was never torn.

On one machine this replaces torch.distributed: a death is noticed at once instead of after a socket's timeout, a wait is
pollable like all others, and the result is the same on every member and from run to run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from shoal.core import GroupMember, Wait
from shoal.errors import GroupChanged, WireError
from shoal.runtime.wires.wire import Port, Wire, int64_words
from shoal.slots import Allocator, Channel, fence

__all__ = ["GroupWire", "RankedMember"]

EPOCH, SIZE = range(2)                           # the group's header, followed by the ranks
MEMBER_ROUND, MEMBER_DISCARDED, MEMBER_BYTES = range(3)  # the round holds its epoch; a size for each of the two buffers
MEMBER_MOVED = MEMBER_BYTES + 2                  # bytes that it has read of the others'
HEADER = 64
ROUND_BITS = 40


class GroupWire(Wire):
    kind, ends = "group", ("member",)

    def __init__(self, name: str, nbytes: int) -> None:
        super().__init__(name)
        self.nbytes = -(-nbytes // 64) * 64
        self.channels: list[Channel] = []

    def lay_out(self, allocator: Allocator) -> None:
        self.check_ends(member=1)
        most = self.members("member")
        self.ranks_bytes = -(-8 * (2 + most) // 64) * 64
        self.memory = allocator.memory(self.ranks_bytes + most * (HEADER + 2 * self.nbytes))
        self.channels = [allocator.channel(1) for _ in range(most)]

    @property
    def member(self) -> Port:
        return self.port("member")

    def header(self) -> np.ndarray:
        return int64_words(self.array(), 0, 2 + self.members("member"))

    def words(self, member: int) -> np.ndarray:
        return int64_words(self.array(), self.ranks_bytes + member * (HEADER + 2 * self.nbytes), 8)

    def buffers(self, member: int) -> list[np.ndarray]:
        start = self.ranks_bytes + member * (HEADER + 2 * self.nbytes) + HEADER
        memory = self.array()
        return [memory[start + k * self.nbytes : start + (k + 1) * self.nbytes] for k in range(2)]

    def membership(self, end: str, member: int, alive: bool) -> None:
        """The supervisor re-forms the group. SIZE is set to 0 first, so that no reader sees half a list of ranks."""
        header = self.header()
        ranks = [int(rank) for rank in header[2 : 2 + int(header[SIZE])] if rank != member] + [member] * alive
        header[SIZE] = 0
        fence()
        header[EPOCH] += 1
        fence()
        header[2 : 2 + len(ranks)] = ranks
        fence()
        header[SIZE] = len(ranks)
        for channel in self.channels:
            channel.put(-1)

    def attach(self, end: str, member: int, incarnation: int) -> GroupMember:
        return MemoryGroupMember(self, member)

    def numbers(self) -> dict[str, float]:
        if not self._kept:
            self._kept.update(header=self.header(), words=[self.words(member) for member in range(self.members("member"))])
        header = self._kept["header"]
        discarded = sum(int(words[MEMBER_DISCARDED]) for words in self._kept["words"])
        moved = sum(int(words[MEMBER_MOVED]) for words in self._kept["words"])
        return {"epoch": int(header[EPOCH]), "members": int(header[SIZE]), "discarded": discarded, "bytes_moved": moved}


class RankedMember(ABC):
    """What the members of all kinds of groups have in common: they know the members in the order of seniority."""

    def __init__(self, name: str, member: int) -> None:
        self.name, self._me = name, member
        self._epoch = -1  # not in the group before the first sync
        self._ranks: list[int] = []

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def rank(self) -> int:
        return self._ranks.index(self._me)

    @property
    def leader(self) -> bool:
        """Whether this member's state is the one that counts (it publishes and is checkpointed).

        Before its first `sync` that is the senior of those who are there now: its state is what the others will take over.
        """
        return (self._ranks or self._present())[:1] == [self._me]

    @abstractmethod
    def _present(self) -> list[int]:
        """The members that the supervisor names now, in the order of seniority."""

    @abstractmethod
    def changed(self) -> bool:
        """Whether members died or joined since the last `sync`."""

    @abstractmethod
    async def _add_up(self, vector: np.ndarray) -> np.ndarray:
        """The sum over all members."""

    @abstractmethod
    def _count_discarded(self) -> None:
        """The update that a sum was part of is lost."""

    async def sum(self, vector: np.ndarray) -> np.ndarray:
        if self.size == 1 and not self.changed():
            return vector
        try:
            return await self._add_up(vector)
        except GroupChanged:
            self._count_discarded()
            raise

    async def mean(self, vector: np.ndarray) -> np.ndarray:
        total = await self.sum(vector)
        if self.size > 1:
            total /= self.size
        return total


class MemoryGroupMember(RankedMember):
    """One member's end, in shared memory."""

    address = "127.0.0.1"  # the other members are on this machine

    def __init__(self, wire: GroupWire, member: int) -> None:
        super().__init__(wire.name, member)
        self._wire = wire
        self._header = wire.header()
        self._words = [wire.words(k) for k in range(wire.members("member"))]
        self._buffers = [wire.buffers(k) for k in range(wire.members("member"))]
        self._channel = wire.channels[member]
        self._round = 0

    def changed(self) -> bool:
        return int(self._header[EPOCH]) != self._epoch

    async def sync(self, state: np.ndarray) -> None:
        """Enter the newest epoch and take over rank 0's state, in place. Retries until an epoch lasts that long."""
        while True:
            await Wait(self._admitted, self.name, f"admission to the group {self.name}", self._channel.fds)
            self._epoch = int(self._header[EPOCH])
            fence()
            self._ranks = self._present()
            self._round = 0
            fence()
            if self._me not in self._ranks or self.changed():
                continue
            try:
                senior = await self._exchange(state, lambda vectors: vectors[0].copy())
            except GroupChanged:
                continue
            if not self.leader:
                state[...] = senior
            return

    def _admitted(self) -> bool:
        self._channel.get()
        return self._me in self._present()

    def _present(self) -> list[int]:
        return [int(rank) for rank in self._header[2 : 2 + int(self._header[SIZE])]]

    async def _exchange(self, vector: np.ndarray, combine: Callable[[list[np.ndarray]], np.ndarray]) -> np.ndarray:
        """What `combine` makes of all members' vectors of this round, in the order of rank."""
        if vector.nbytes > self._wire.nbytes:
            raise WireError(f"{self.name}: a vector of {vector.nbytes} bytes does not fit into {self._wire.nbytes}")
        self._check("before")
        self._round += 1
        flat = np.ascontiguousarray(vector).reshape(-1)
        half = self._round % 2
        self._buffers[self._me][half][: flat.nbytes] = flat.view(np.uint8)
        mine = self._words[self._me]
        mine[MEMBER_BYTES + half] = flat.nbytes
        fence()
        mine[MEMBER_ROUND] = (self._epoch << ROUND_BITS) + self._round
        for rank in self._ranks:
            if rank != self._me:
                self._wire.channels[rank].put(self._round)
        await Wait(self._arrived, self.name, f"round {self._round} of the group {self.name}", self._channel.fds)
        fence()
        self._check("in")
        if any(int(self._words[rank][MEMBER_BYTES + half]) != flat.nbytes for rank in self._ranks):
            self._check("in")
            raise WireError(f"{self.name}: members sent vectors of different sizes")
        shape = vector.shape
        result = combine([self._buffers[rank][half][: flat.nbytes].view(flat.dtype).reshape(shape) for rank in self._ranks])
        mine[MEMBER_MOVED] += flat.nbytes * (len(self._ranks) - 1)
        fence()
        self._check("after")
        return result

    def _check(self, when: str) -> None:
        if self.changed():
            raise GroupChanged(f"{self.name}: the members changed {when} round {self._round}; call sync() and continue")

    def _arrived(self) -> bool:
        self._channel.get()
        reached = (self._epoch << ROUND_BITS) + self._round
        return self.changed() or all(int(self._words[rank][MEMBER_ROUND]) >= reached for rank in self._ranks)

    async def _add_up(self, vector: np.ndarray) -> np.ndarray:
        return await self._exchange(vector, added)

    def _count_discarded(self) -> None:
        self._words[self._me][MEMBER_DISCARDED] += 1


def added(vectors: list[np.ndarray]) -> np.ndarray:
    total = vectors[0].copy()
    for other in vectors[1:]:
        total += other
    return total
