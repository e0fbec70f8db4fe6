"""The group wire on a cluster: torch.distributed (gloo), formed anew whenever the supervisor names other members.

The supervisor decides epoch and ranks, by seniority. Rank 0 opens a store and sends its address to the others through the
post; everybody connects, in a ring (`runtime/ring.py`) that lives as long as the epoch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.core import Wait
from shoal.errors import GroupChanged, WireError
from shoal.runtime.ray.ferries.base import Ground
from shoal.runtime.ring import JUDGE_SECONDS, Operation, Ring, join, open_store, reach_store
from shoal.runtime.wires.group import Group, Ranks

__all__ = ["GroupFerry", "Member"]


class Member(Ranks):
    """One member's end (core.Group)."""

    def __init__(self, ferry: GroupFerry, member: int) -> None:
        super().__init__(ferry.wire.name, member)
        self._ferry = ferry
        self._ring: Ring | None = None

    @property
    def address(self) -> str:
        return self._ferry.ground.address

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
            form = self._ferry.forming(self._epoch, self.rank, places)
            self._ring = Ring(f"ring-{self._epoch}", form, self._ferry.ground.wake)
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
        import torch

        self._check()
        result = np.ascontiguousarray(vector).copy()
        operation = Operation(kind, torch.from_numpy(result))
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

    def forming(self, epoch: int, rank: int, places: list[str]) -> Callable[[threading.Event], Any]:
        """How a ring's thread becomes a member of the epoch's process group."""

        def form(left: threading.Event) -> Any:
            address = self.ground.address
            if rank == 0:
                store = open_store(address)
                for place in places[1:]:
                    self.ground.send(place, (self.wire.name, "store", epoch, address, store.port))
            else:
                store = reach_store(*self._await_store(epoch, left))
            return join(store, rank, len(places), address)

        return form

    def _await_store(self, epoch: int, left: threading.Event) -> tuple[str, int]:
        while not left.is_set():
            if (found := self.stores.get(epoch)) is not None:
                return found
            self.told.wait(0.05)
            self.told.clear()
        raise RuntimeError("the group has changed before its first member had opened a store")

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
