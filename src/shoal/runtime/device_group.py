"""A group whose members compute on GPUs: if each has a GPU of its own, vectors never pass through host memory.

    member 0, GPU 0 ──┐
    member 1, GPU 1 ──┼── mean of tensors: nccl          members, agreement on a state, small sums: the group wire
    member 2, GPU 2 ──┘

The group wire says who is a member and when that changes. Each time the group has formed again, the members also tell each other
over it which device they have and where the first member's store is. nccl needs a GPU for each member: where two have the same
one, the tensors go through the wire. On CPUs the same code uses gloo (the tests do).
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

__all__ = ["DeviceGroup"]

LOOK_SECONDS = 0.2  # how often to look for a change of members
PORT, ADDRESS, DEVICE = 2, 64, 16  # bytes


class DeviceGroup:
    """A core.Group whose `mean` takes tensors."""

    def __init__(self, group: GroupMember, device: torch.device, note: Callable[[str], None]) -> None:
        self._group, self._device, self._note = group, device, note
        self._process_group: ProcessGroup | None = None
        self._told = False
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def leader(self) -> bool:
        return self._group.leader

    async def sync(self, state: np.ndarray) -> None:
        """Enter the group with its senior member's state, and exchange devices."""
        while True:
            await self._group.sync(state)
            try:
                await self._exchange_devices()
            except GroupChanged:
                continue
            return

    async def sum(self, vector: np.ndarray) -> np.ndarray:
        return await self._group.sum(vector)

    async def mean(self, vector: torch.Tensor) -> np.ndarray | torch.Tensor:
        """The mean of a tensor, which is not changed."""
        if self.size == 1:
            self._check()
            return vector
        if self._process_group is None:
            averaged: np.ndarray = await self._group.mean(vector.cpu().numpy())
            return averaged
        total = vector.clone()  # a process group that was left may still write
        await self._operate(Operation("sum", total))
        return total.div_(self.size)

    async def _exchange_devices(self) -> None:
        """Tell the others this member's device, and its store if it is the first; join a process group if all devices differ."""
        if self._process_group is not None:
            self._process_group.leave()
            self._process_group = None
        if self.size == 1:
            return
        size, rank = self.size, self._group.rank
        words = np.zeros(PORT + ADDRESS + DEVICE * size, np.uint8)
        devices = words[PORT + ADDRESS :].reshape(size, DEVICE)
        devices[rank] = list(identity(self._device))
        mine: Any = None
        if rank == 0:
            mine, where = create_store(self._group.address), self._group.address.encode()
            words[:PORT] = list(mine.port.to_bytes(PORT, "big"))
            words[PORT : PORT + len(where)] = list(where)
        words = await self._group.sum(words)
        devices = words[PORT + ADDRESS :].reshape(size, DEVICE)
        if len({bytes(device) for device in devices}) < size:
            if self.leader and not self._told:
                self._note(f"the {size} members of {self._group.name} share GPUs, and nccl needs one for each: vectors go through "
                           "host memory")
                self._told = True
            return
        port, address = int.from_bytes(bytes(words[:PORT]), "big"), bytes(words[PORT : PORT + ADDRESS]).rstrip(b"\0").decode()

        def form(left: threading.Event) -> Any:
            store = connect_store(address, port) if mine is None else mine
            return create_process_group(store, rank, size, self._group.address, self._device)

        self._process_group = ProcessGroup("device-group", form, self._wake)

    async def _operate(self, operation: Operation) -> None:
        """Wait until the tensors of all members are in it."""
        assert self._process_group is not None
        self._check()
        self._process_group.start(operation)
        name, why = self._group.name, f"the others of the group {self._group.name}"
        while not await self._until(lambda: operation.done or self._group.changed(), name, why):
            pass
        self._check()
        if operation.error:  # a member died or could not be reached: the supervisor will name the new members
            limit = time.monotonic() + SUPERVISOR_SECONDS
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
            raise GroupChanged(f"{self._group.name}: the members changed; call sync() and continue")


def identity(device: torch.device) -> bytes:
    """Equal for two processes only if they have the same GPU."""
    if device.type != "cuda":
        return os.urandom(DEVICE)
    return hashlib.md5(str(torch.cuda.get_device_properties(device).uuid).encode(), usedforsecurity=False).digest()
