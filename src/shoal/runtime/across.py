"""A group of learners that compute on GPUs: their gradients never pass through host memory, where each has a GPU of its own.

    member 0, GPU 0 ──┐
    member 1, GPU 1 ──┼── mean of tensors: nccl          who is in the group, agreement on a state, small sums: the group wire
    member 2, GPU 2 ──┘

The group wire says who is a member and when that changes; over it the members also tell each other which device they have and where
the first one's store is, each time the group has formed anew. nccl wants a GPU for each of them: where two have the same one, the
tensors go through the wire. On CPUs the same code takes gloo (the tests do).
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from shoal.core import Group, Wait
from shoal.errors import GroupChanged, WireError
from shoal.runtime.ring import JUDGE_SECONDS, Operation, Ring, join, open_store, reach_store

__all__ = ["Across"]

LOOK_SECONDS = 0.2  # how often a change of members is looked for
PORT, ADDRESS, DEVICE = 2, 64, 16  # bytes


class Across:
    """A core.Group whose `mean` takes tensors."""

    def __init__(self, group: Group, device: torch.device, note: Callable[[str], None]) -> None:
        self._group: Any = group
        self._device, self._note = device, note
        self._ring: Ring | None = None
        self._told = False
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def size(self) -> int:
        return int(self._group.size)

    @property
    def leader(self) -> bool:
        return bool(self._group.leader)

    async def sync(self, state: np.ndarray) -> None:
        """Enter the group, with its senior member's state, and meet the others' devices."""
        while True:
            await self._group.sync(state)
            try:
                await self._meet()
            except GroupChanged:
                continue
            return

    async def sum(self, vector: np.ndarray) -> np.ndarray:
        summed: np.ndarray = await self._group.sum(vector)
        return summed

    async def mean(self, vector: torch.Tensor) -> np.ndarray | torch.Tensor:
        """Of a tensor, which is left alone."""
        if self.size == 1:
            self._check()
            return vector
        if self._ring is None:
            averaged: np.ndarray = await self._group.mean(vector.cpu().numpy())
            return averaged
        total = vector.clone()  # a ring that was left may still write
        await self._operate(Operation("sum", total))
        return total.div_(self.size)

    async def _meet(self) -> None:
        """Tell the others of my device, and of my store if I am the first; form a ring where all devices differ."""
        if self._ring is not None:
            self._ring.leave()
            self._ring = None
        if self.size == 1:
            return
        size, rank = self.size, int(self._group.rank)
        words = np.zeros(PORT + ADDRESS + DEVICE * size, np.uint8)
        devices = words[PORT + ADDRESS :].reshape(size, DEVICE)
        devices[rank] = list(identity(self._device))
        mine: Any = None
        if rank == 0:
            mine, where = open_store(self._group.address), self._group.address.encode()
            words[:PORT] = list(mine.port.to_bytes(PORT, "big"))
            words[PORT : PORT + len(where)] = list(where)
        words = await self._group.sum(words)
        devices = words[PORT + ADDRESS :].reshape(size, DEVICE)
        if len({bytes(device) for device in devices}) < size:
            if self.leader and not self._told:
                self._note(f"{size} learners have fewer GPUs, and nccl wants one for each: gradients go through host memory")
                self._told = True
            return
        port, address = int.from_bytes(bytes(words[:PORT]), "big"), bytes(words[PORT : PORT + ADDRESS]).rstrip(b"\0").decode()

        def form(left: threading.Event) -> Any:
            store = reach_store(address, port) if mine is None else mine
            return join(store, rank, size, self._group.address, self._device)

        self._ring = Ring("across", form, self._wake)

    async def _operate(self, operation: Operation) -> None:
        """Until everybody's tensor is in it."""
        assert self._ring is not None
        self._check()
        self._ring.start(operation)
        name, why = self._group.name, f"the others of the group {self._group.name}"
        while not await self._until(lambda: operation.done or self._group.changed(), name, why):
            pass
        self._check()
        if operation.error:  # a member died, or could not be reached: the supervisor will say so
            limit = time.monotonic() + JUDGE_SECONDS
            while not await self._until(self._group.changed, name, f"the new members of {name}"):
                if time.monotonic() > limit:
                    raise WireError(f"{name}: the members could not exchange their tensors: {operation.error}")
            self._check()

    def _until(self, ready: Callable[[], bool], name: str, why: str) -> Wait:
        def looked() -> bool:
            with suppress(BlockingIOError):
                os.eventfd_read(self._woken)
            return ready()

        return Wait(looked, name, why, (self._woken,), time.monotonic() + LOOK_SECONDS)

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _check(self) -> None:
        if self._group.changed():
            raise GroupChanged(f"{self._group.name}: the members changed; call sync() and go on")


def identity(device: torch.device) -> bytes:
    """The same for two processes only if they have the same GPU."""
    if device.type != "cuda":
        return os.urandom(DEVICE)
    return hashlib.md5(str(torch.cuda.get_device_properties(device).uuid).encode(), usedforsecurity=False).digest()
