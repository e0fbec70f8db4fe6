"""The group wire on a cluster: torch.distributed (gloo), formed again whenever the supervisor names other members.

The supervisor decides the epoch and the ranks, by seniority. Rank 0 opens a store and sends its address to the other members;
all of them join a process group (`runtime/process_group.py`) that lives as long as the epoch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.core import GroupMember, Wait
from shoal.errors import GroupChanged, WireError
from shoal.runtime.process_group import (
    SUPERVISOR_SECONDS,
    Operation,
    ProcessGroup,
    connect_store,
    create_process_group,
    create_store,
)
from shoal.runtime.ray.links.link import LinkContext
from shoal.runtime.wires.group import GroupWire, RankedMember

__all__ = ["GroupLink", "ProcessGroupMember"]


class ProcessGroupMember(RankedMember):
    """One member's end, on a cluster."""

    def __init__(self, link: GroupLink, member: int) -> None:
        super().__init__(link.wire.name, member)
        self._link = link
        self._process_group: ProcessGroup | None = None

    @property
    def address(self) -> str:
        return self._link.context.address

    def changed(self) -> bool:
        return self._link.epoch != self._epoch

    async def sync(self, state: np.ndarray) -> None:
        """Enter the newest epoch and take over rank 0's state, in place. Retries until an epoch lasts that long."""
        while True:
            await Wait(lambda: self._me in self._link.ranks, self.name, f"admission to the group {self.name}")
            self._leave()
            self._epoch, self._ranks = self._link.epoch, self._present()
            if self.changed() or self._me not in self._ranks:
                continue
            if self.size == 1:
                return
            places = [self._link.context.place_of(self._link.wire, "member", rank) for rank in self._ranks]
            form = self._link.forming(self._epoch, self.rank, places)
            self._process_group = ProcessGroup(f"group-{self._epoch}", form, self._link.context.wake)
            try:
                senior = await self._operate("broadcast", state)
            except GroupChanged:
                continue
            if not self.leader:
                state[...] = senior
            return

    def _present(self) -> list[int]:
        return list(self._link.ranks)

    def _leave(self) -> None:
        if self._process_group is not None:
            self._process_group.leave()
            self._process_group = None

    async def _operate(self, kind: str, vector: np.ndarray) -> np.ndarray:
        """The sum, or the first member's vector; it has the same bits at every member."""
        if vector.nbytes > self._link.wire.nbytes:
            raise WireError(f"{self.name}: a vector of {vector.nbytes} bytes does not fit into {self._link.wire.nbytes}")
        import torch

        self._check()
        result = np.ascontiguousarray(vector).copy()
        operation = Operation(kind, torch.from_numpy(result))
        assert self._process_group is not None
        self._process_group.start(operation)
        await Wait(lambda: operation.done or self.changed(), self.name, f"the others of the group {self.name}")
        self._check()
        if operation.error:  # a member died or could not be reached: the supervisor will name the new members
            until = time.monotonic() + SUPERVISOR_SECONDS
            if not await Wait(self.changed, self.name, f"the new members of {self.name}", deadline=until):
                raise WireError(f"{self.name}: the members could not exchange their vectors: {operation.error}")
            self._check()
        self._link.moved += vector.nbytes * (self.size - 1)
        return result

    def _check(self) -> None:
        if self.changed():
            raise GroupChanged(f"{self.name}: the members changed; call sync() and continue")

    async def _add_up(self, vector: np.ndarray) -> np.ndarray:
        return await self._operate("sum", vector)

    def _count_discarded(self) -> None:
        self._link.discarded += 1


class GroupLink:
    """What a place knows of a group: its members, as the supervisor named them, and the address of an epoch's store."""

    def __init__(self, wire: GroupWire, context: LinkContext) -> None:
        self.wire, self.context = wire, context
        self.epoch, self.ranks = 0, []  # type: tuple[int, list[int]]
        self.stores: dict[int, tuple[str, int]] = {}
        self.told = threading.Event()
        self.discarded = self.moved = 0

    def formed(self, epoch: int, ranks: list[int]) -> None:
        """The supervisor names the members of a new epoch."""
        if epoch > self.epoch:
            self.ranks, self.epoch = [], epoch
            self.ranks = ranks
            self.context.wake()

    def forming(self, epoch: int, rank: int, places: list[str]) -> Callable[[threading.Event], Any]:
        """A function that joins the epoch's process group; it runs in the thread of that group."""

        def form(left: threading.Event) -> Any:
            address = self.context.address
            if rank == 0:
                store = create_store(address)
                for place in places[1:]:
                    self.context.send(place, (self.wire.name, "store", epoch, address, store.port))
            else:
                store = connect_store(*self._await_store(epoch, left))
            return create_process_group(store, rank, len(places), address)

        return form

    def _await_store(self, epoch: int, left: threading.Event) -> tuple[str, int]:
        while not left.is_set():
            if (found := self.stores.get(epoch)) is not None:
                return found
            self.told.wait(0.05)
            self.told.clear()
        raise RuntimeError("the group changed before its first member had opened a store")

    def endpoint(self, end: str, member: int, incarnation: int) -> GroupMember:
        return ProcessGroupMember(self, member)

    def renewed(self, end: str, member: int) -> None:
        """Nothing to do: a new epoch says so."""

    def receive(self, kind: str, numbers: tuple[Any, ...], payload: Any) -> None:
        epoch, address, port = numbers
        self.stores = {epoch: (address, port)} if epoch >= max(self.stores, default=0) else self.stores
        self.told.set()

    def numbers(self) -> dict[str, float]:
        return {"discarded": self.discarded, "bytes_moved": self.moved}
