"""Payloads of ipc clients in shared memory: the client makes anonymous blocks (slots/), the server maps them.

Only the number of a block and offsets travel through the socket. A block belongs to the client and goes with its process,
even after kill -9.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from shoal.replay.errors import Refused

__all__ = ["SharedBlocks"]

MOST_BLOCKS = 4096


class SharedBlocks:
    """The blocks of all clients, as the server sees them."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}  # number -> pid of the owner, memory

    def attach(self, number: int, pid: int, fd: int, nbytes: int) -> None:
        """Map a client's memory. Only anonymous memory of a process of this user is accepted, and only if it cannot shrink:
        touching a page that its owner has cut off would end the server (SIGBUS)."""
        if len(self._blocks) >= MOST_BLOCKS:
            raise Refused(f"at most {MOST_BLOCKS} shared blocks")
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if not os.readlink(path).startswith("/memfd:"):
                raise Refused("the shared block is not anonymous memory")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Refused(f"the shared block cannot be opened: {error.strerror}") from error
        try:
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise Refused("the shared block could be shortened by its owner: seal it with F_SEAL_SHRINK before offering it")
            if os.fstat(descriptor).st_size < nbytes:
                raise Refused("the shared block is smaller than announced")
            memory = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self._blocks[number] = (pid, np.frombuffer(memory, np.uint8))

    def detach(self, number: int) -> None:
        self._blocks.pop(number, None)

    def block(self, number: int) -> npt.NDArray[np.uint8] | None:
        found = self._blocks.get(number)
        return None if found is None else found[1]

    def piece(self, number: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """`nbytes` bytes of a block from an offset on."""
        block = self.block(number)
        if block is None:
            raise Refused(f"no shared block {number}")
        if not 0 <= offset <= offset + nbytes <= block.nbytes:
            raise Refused("a piece lies outside its shared block")
        return block[offset : offset + nbytes]

    def sweep(self) -> None:
        """Unmap the blocks of dead processes."""
        for number, (pid, _) in list(self._blocks.items()):
            if not os.path.exists(f"/proc/{pid}"):
                del self._blocks[number]
