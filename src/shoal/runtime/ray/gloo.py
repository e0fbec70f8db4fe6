"""The group wire on a cluster: torch.distributed (gloo), formed anew whenever the supervisor names other members.

The supervisor decides epoch and ranks, by seniority. Rank 0 opens a store and sends its address to the others through the
post; everybody connects. An operation runs in a thread of the ring, so that the role's wait stays like any other and a change of
members is heard in the middle of it.

gloo notices a dead process within milliseconds (its sockets close) but cannot be interrupted: neither abort() nor deleting
the process group returns while an operation waits for a member that does not come. So a ring is never interrupted, it is left:
whoever hears of a new epoch lets go of the old ring in the ring's own thread, its sockets close, and what others still wait for
in that ring fails there.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np

from shoal.core import Wait
from shoal.errors import GroupChanged, WireError
from shoal.runtime.ray.ferries.base import Ground
from shoal.runtime.wires.group import Group, Ranks

__all__ = ["GroupFerry", "Member"]

OPERATION_SECONDS = 1800.0  # how long gloo waits for members that live and do not come; of deaths the supervisor tells
JUDGE_SECONDS = 60.0        # how long the supervisor may take to say what a failed operation meant


def distributed() -> Any:
    """torch.distributed, when it is needed; most of what is used of it has no types."""
    import torch.distributed

    return torch.distributed


class Operation:
    """One collective operation, in place on a tensor."""

    def __init__(self, kind: str, vector: np.ndarray) -> None:
        import torch

        self.kind, self.tensor = kind, torch.from_numpy(vector)
        self.done, self.error = False, ""


class Ring:
    """The process group of one epoch, driven by a thread of its own."""

    def __init__(self, ferry: GroupFerry, epoch: int, rank: int, places: list[str]) -> None:
        self._ferry, self._epoch, self._rank, self._places = ferry, epoch, rank, places
        self._work: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._left = threading.Event()
        threading.Thread(target=self._run, name=f"ring-{epoch}", daemon=True).start()

    def start(self, operation: Operation) -> None:
        self._work.put(operation)

    def leave(self) -> None:
        self._left.set()
        self._work.put(None)

    def _run(self) -> None:
        group, failed = None, ""
        while (operation := self._work.get()) is not None:
            try:
                if failed:
                    raise RuntimeError(failed)
                if group is None:
                    group = self._form()
                self._do(group, operation)
            except Exception as error:  # gloo raises RuntimeError for everything, the store other things
                operation.error = failed = str(error) or type(error).__name__
            operation.done = True
            self._ferry.ground.wake()

    def _form(self) -> Any:
        dist = distributed()
        address, size = self._ferry.ground.address, len(self._places)
        patience = timedelta(seconds=OPERATION_SECONDS)
        if self._rank == 0:
            store = dist.TCPStore(address, 0, None, True, patience, wait_for_workers=False)
            for place in self._places[1:]:
                self._ferry.ground.send(place, (self._ferry.wire.name, "store", self._epoch, address, store.port))
        else:
            store = dist.TCPStore(*self._await_store(), None, False, patience, wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = patience
        return dist.ProcessGroupGloo(dist.PrefixStore(str(self._epoch), store), self._rank, size, options)

    def _await_store(self) -> tuple[str, int]:
        while not self._left.is_set():
            if (found := self._ferry.stores.get(self._epoch)) is not None:
                return found
            self._ferry.told.wait(0.05)
            self._ferry.told.clear()
        raise RuntimeError("the group has changed before its first member had opened a store")

    def _do(self, group: Any, operation: Operation) -> None:
        dist = distributed()
        if operation.kind == "sum":
            how = dist.AllreduceOptions()
            how.reduceOp = dist.ReduceOp.SUM
            group.allreduce([operation.tensor], how).wait()
        else:
            whose = dist.BroadcastOptions()
            whose.rootRank = 0
            group.broadcast([operation.tensor], whose).wait()


class Member(Ranks):
    """One member's end (core.Group)."""

    def __init__(self, ferry: GroupFerry, member: int) -> None:
        super().__init__(ferry.wire.name, member)
        self._ferry = ferry
        self._ring: Ring | None = None

    def changed(self) -> bool:
        return self._ferry.epoch != self._epoch

    async def sync(self, state: np.ndarray) -> None:
        """Enter the newest epoch and take over rank 0's state, in place. Retries until an epoch lasts that long."""
        while True:
            await Wait(lambda: self._me in self._ferry.ranks, self.name, f"admission to the group {self.name}")
            self._leave()
            self._epoch, self._ranks = self._ferry.epoch, list(self._ferry.ranks)
            if self.changed() or self._me not in self._ranks:
                continue
            if self.size == 1:
                return
            places = [self._ferry.ground.place_of(self._ferry.wire, "member", rank) for rank in self._ranks]
            self._ring = Ring(self._ferry, self._epoch, self._ranks.index(self._me), places)
            try:
                senior = await self._operate("broadcast", state)
            except GroupChanged:
                continue
            if not self.leader:
                state[...] = senior
            return

    def _leave(self) -> None:
        if self._ring is not None:
            self._ring.leave()
            self._ring = None

    async def _operate(self, kind: str, vector: np.ndarray) -> np.ndarray:
        """What becomes of everybody's vector; it has the same bits at every member."""
        if vector.nbytes > self._ferry.wire.nbytes:
            raise WireError(f"{self.name}: a vector of {vector.nbytes} bytes does not fit into {self._ferry.wire.nbytes}")
        self._check()
        result = np.ascontiguousarray(vector).copy()
        operation = Operation(kind, result)
        assert self._ring is not None
        self._ring.start(operation)
        await Wait(lambda: operation.done or self.changed(), self.name, f"the others of the group {self.name}")
        self._check()
        if operation.error:  # a member died, or could not be reached: the supervisor will say so
            until = time.monotonic() + JUDGE_SECONDS
            if not await Wait(self.changed, self.name, f"the new members of {self.name}", deadline=until):
                raise WireError(f"{self.name}: the members could not exchange their vectors: {operation.error}")
            self._check()
        self._ferry.moved += vector.nbytes * (self.size - 1)
        return result

    def _check(self) -> None:
        if self.changed():
            raise GroupChanged(f"{self.name}: the members changed; call sync() and go on")

    async def sum(self, vector: np.ndarray) -> np.ndarray:
        if self.size == 1 and not self.changed():
            return vector
        try:
            return await self._operate("sum", vector)
        except GroupChanged:
            self._ferry.discarded += 1  # the update that this was part of
            raise

    async def mean(self, vector: np.ndarray) -> np.ndarray:
        total = await self.sum(vector)
        if self.size > 1:
            total /= self.size
        return total


class GroupFerry:
    """What a place knows of a group: the supervisor's word on its members, and where the store of an epoch is."""

    def __init__(self, wire: Group, ground: Ground) -> None:
        self.wire, self.ground = wire, ground
        self.epoch, self.ranks = 0, []  # type: tuple[int, list[int]]
        self.stores: dict[int, tuple[str, int]] = {}
        self.told = threading.Event()
        self.discarded = self.moved = 0

    def formed(self, epoch: int, ranks: list[int]) -> None:
        """The supervisor's word."""
        if epoch > self.epoch:
            self.ranks, self.epoch = [], epoch
            self.ranks = ranks
            self.ground.wake()

    def endpoint(self, end: str, member: int, incarnation: int) -> Member:
        return Member(self, member)

    def renewed(self, end: str, member: int) -> None:
        """The epoch says so."""

    def receive(self, kind: str, numbers: tuple[Any, ...], payload: Any) -> None:
        epoch, address, port = numbers
        self.stores = {epoch: (address, port)} if epoch >= max(self.stores, default=0) else self.stores
        self.told.set()

    def numbers(self) -> dict[str, float]:
        return {"discarded": self.discarded, "bytes_moved": self.moved}
