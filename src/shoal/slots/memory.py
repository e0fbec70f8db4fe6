"""Memory and channels: in one process (InlineAllocator), or in anonymous shared memory and pipes (LocalAllocator).

The wires are written once against these two things: a block of memory, and a channel that carries small numbers from the
process that changed the memory to the one that waits for it. Processes share no lock, so a process that is killed holds
nothing; a pipe's writes are atomic below PIPE_BUF.

Memory order. A 64-bit aligned word is read and written whole. Writing to a pipe and reading from it order everything
before and after them, so a process that acts on a number from a channel sees the data written before the number was sent. A
process that looks at memory without such a number (a version, a state found at a restart) calls `fence()` between the word
and the data: nothing on x86, where stores are seen in program order; a real barrier elsewhere.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import struct
import threading
from collections import deque
from typing import Protocol

import numpy as np

__all__ = ["Allocator", "Channel", "InlineAllocator", "LocalAllocator", "MemoryBlock", "fence"]

FD_NUMBERS: dict[int, int] = {}  # the supervisor's descriptor numbers -> this process's, after they were passed on
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
TOKEN = struct.Struct("<qq")
PIPE_TOKENS = 65536 // TOKEN.size  # what a pipe holds by default
X86 = os.uname().machine in ("x86_64", "i686")
_BARRIER = threading.Lock()  # of this process only


def fence() -> None:
    """Keep reads and writes before this call before those after it."""
    if not X86:
        with _BARRIER:
            pass  # nothing from before moves behind this release ...
        with _BARRIER:
            pass  # ... and nothing from after before this acquire


def own_number(fd: int) -> int:
    """This process's number of one of the supervisor's descriptors."""
    if not FD_NUMBERS:
        return fd  # inherited by a plain fork
    if fd not in FD_NUMBERS:
        raise OSError(f"descriptor {fd} was not passed to this process")
    return FD_NUMBERS[fd]


class Channel(Protocol):
    """Carries pairs of integers; `put` never blocks, `get` returns what is there."""

    fds: tuple[int, ...]  # readable when there is something to get

    def put(self, a: int, b: int = 0) -> bool: ...
    def get(self) -> list[tuple[int, int]]: ...
    def pop(self) -> tuple[int, int] | None: ...
    def waiting(self) -> bool: ...


class MemoryBlock(Protocol):
    """A block of zeroed bytes."""

    nbytes: int

    def array(self) -> np.ndarray: ...


class Allocator(Protocol):
    """Creates the memory and the channels of one program."""

    shared: bool

    def memory(self, nbytes: int) -> MemoryBlock: ...
    def channel(self, tokens: int) -> Channel: ...
    def close(self) -> None: ...


# ---------------------------------------------------------------------------------------------- one process
class InlineMemory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._array = np.zeros(nbytes, np.uint8)

    def array(self) -> np.ndarray:
        return self._array


class InlineChannel:
    fds: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._tokens: deque[tuple[int, int]] = deque(maxlen=PIPE_TOKENS)

    def put(self, a: int, b: int = 0) -> bool:
        if len(self._tokens) == PIPE_TOKENS:
            return False
        self._tokens.append((a, b))
        return True

    def get(self) -> list[tuple[int, int]]:
        tokens = list(self._tokens)
        self._tokens.clear()
        return tokens

    def pop(self) -> tuple[int, int] | None:
        return self._tokens.popleft() if self._tokens else None

    def waiting(self) -> bool:
        return bool(self._tokens)


class InlineAllocator:
    """One process, one thread."""

    shared = False

    def memory(self, nbytes: int) -> InlineMemory:
        return InlineMemory(nbytes)

    def channel(self, tokens: int) -> InlineChannel:
        return InlineChannel()

    def close(self) -> None:
        """There is nothing to release."""


# ---------------------------------------------------------------------------------------------- many processes
class LocalMemory:
    """Anonymous shared memory: a memfd, inherited by number; freed with the last process that holds it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("shoal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)  # no process can take mapped pages away from another
        self._map: mmap.mmap | None = None

    def array(self) -> np.ndarray:
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.nbytes)
        return np.frombuffer(self._map, np.uint8)

    def __getstate__(self) -> dict[str, int]:
        return {"nbytes": self.nbytes, "fd": self.fd}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.nbytes, self.fd, self._map = state["nbytes"], own_number(state["fd"]), None


class LocalChannel:
    """A pipe whose ends are open in all processes and non-blocking: no death closes it."""

    def __init__(self, tokens: int) -> None:
        self._open(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        if tokens > PIPE_TOKENS:
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, tokens * TOKEN.size)

    def _open(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self.fds: tuple[int, ...] = (read,)
        self._poll = select.poll()  # select() knows no number above 1023
        self._poll.register(read, select.POLLIN)

    def __getstate__(self) -> tuple[int, int]:
        return self._read, self._write

    def __setstate__(self, state: tuple[int, int]) -> None:
        self._open(*(own_number(fd) for fd in state))

    def put(self, a: int, b: int = 0) -> bool:
        try:
            os.write(self._write, TOKEN.pack(a, b))
        except BlockingIOError:
            return False  # full: the reader has thousands of numbers to look at already
        return True

    def get(self) -> list[tuple[int, int]]:
        try:
            data = os.read(self._read, 65536)
        except BlockingIOError:
            return []
        return list(TOKEN.iter_unpack(data))

    def pop(self) -> tuple[int, int] | None:
        try:
            data = os.read(self._read, TOKEN.size)
        except BlockingIOError:
            return None
        a, b = TOKEN.unpack(data)
        return a, b

    def waiting(self) -> bool:
        return bool(self._poll.poll(0))


class LocalAllocator:
    """Shared memory and pipes; the supervisor creates them before any other process exists, and these inherit them by number."""

    shared = True

    def __init__(self) -> None:
        self._memories: list[LocalMemory] = []
        self._channels: list[LocalChannel] = []

    def memory(self, nbytes: int) -> LocalMemory:
        self._memories.append(LocalMemory(nbytes))
        return self._memories[-1]

    def channel(self, tokens: int) -> LocalChannel:
        self._channels.append(LocalChannel(tokens))
        return self._channels[-1]

    @property
    def fds(self) -> list[int]:
        return [m.fd for m in self._memories] + [fd for c in self._channels for fd in (c._read, c._write)]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self._memories.clear()
        self._channels.clear()
