"""The supervisor's end of the fork server."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import cloudpickle

from shoal.errors import ShoalError
from shoal.runtime.forkserver import MARK
from shoal.runtime.guard import marked
from shoal.runtime.program import Program
from shoal.slots import Local

__all__ = ["PRELOAD", "Nursery"]

PRELOAD = ("numpy", "cloudpickle", "setproctitle", "gymnasium", "torch", "shoal.envs", "shoal.runtime.place",
           "shoal.algorithms.learner", "shoal.algorithms.policy", "shoal.nets", "shoal.architectures.roles",
           "shoal.experiment.checkpoints")  # whatever is not here, every place imports and holds for itself
START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from shoal.runtime.forkserver import main; main()"
DESCRIPTORS = 200  # per message; the kernel allows 253
CLOSE_SECONDS = 3.0
NO_ROOM = (errno.EAGAIN, errno.ENOMEM)  # for another process, perhaps only for a moment
START_PAUSES = (0.2, 1.0, 3.0)  # between attempts then


class Nursery:
    """Starts the fork server. Starting one early hides the time of its imports; one serves many runs in turn.

    with Nursery() as nursery:
        run(program, session, "local", logs, nursery=nursery)
    """

    def __init__(self, preload: Sequence[str] | None = None) -> None:
        self._preload = list(PRELOAD if preload is None else preload)
        self._queue: deque[tuple[bytes, list[int]]] = deque()  # messages, and descriptors that are the queue's own
        self._start()

    def _start(self) -> None:
        self.up = False  # whether it has imported everything
        self.mark = uuid.uuid4().hex
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        command = [sys.executable, "-c", START, str(os.getpid()), str(theirs.fileno()), json.dumps(self._preload),
                   json.dumps(import_paths())]
        with theirs:
            self.process = self._popen(command, theirs.fileno())

    def _popen(self, command: list[str], control: int) -> subprocess.Popen[bytes]:
        pauses = iter(START_PAUSES)
        while True:
            try:
                return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[control], start_new_session=True,
                                        env={**os.environ, MARK: self.mark})
            except OSError as error:
                pause = next(pauses, None) if error.errno in NO_ROOM else None
                if pause is None:
                    self.socket.close()
                    raise ShoalError(f"the fork server cannot start: {error}; is there enough memory, and room for another process "
                                     "(ulimit -u)?") from error
                time.sleep(pause)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Never waits: a fork server that is busy, or stopped, may itself be waiting until its answers are read. What it has no
        room for is sent by `flush`. Raises BrokenPipeError (or ConnectionResetError) when it is dead."""
        data = json.dumps(message).encode()
        self.flush()
        if self._queue or not self._fits(data, fds):
            self._queue.append((data, [os.dup(fd) for fd in fds]))

    def flush(self) -> None:
        """Send what has stood in the queue, as far as there is room now."""
        while self._queue and self._fits(*self._queue[0]):
            for fd in self._queue.popleft()[1]:
                os.close(fd)

    def drop(self) -> None:
        """What stands in the queue is not wanted any more."""
        while self._queue:
            for fd in self._queue.popleft()[1]:
                os.close(fd)

    def _fits(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            socket.send_fds(self.socket, [data], list(fds))
        except BlockingIOError:
            return False
        return True

    def give(self, program: Program, medium: Local) -> None:
        """Pass on the descriptors of all wires, and the program itself."""
        self.send({"op": "forget"})
        numbers = medium.fds
        for start in range(0, len(numbers), DESCRIPTORS):
            part = numbers[start : start + DESCRIPTORS]
            self.send({"op": "descriptors", "numbers": part}, part)
        blob = cloudpickle.dumps((import_paths(), cloudpickle.dumps(program)))
        with open(os.memfd_create("shoal-program"), "wb", buffering=0) as file:
            view = memoryview(blob)
            while view:
                view = view[file.write(view) :]
            self.send({"op": "program", "size": len(blob)}, [file.fileno()])  # however large: no message holds it

    def code(self) -> int:
        """How it died."""
        try:
            return self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # it has closed its socket, and hangs
            return self.process.wait()

    def forget(self) -> None:
        """The end of a run: the fork server lets its wires go."""
        with contextlib.suppress(OSError):
            self.send({"op": "forget"})

    def restart(self) -> None:
        """After its death."""
        self.close()
        for pid in marked(f"{MARK}={self.mark}".encode()):  # what environments started, and outlived a fork server that was killed
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._start()

    def close(self) -> None:
        """It exits when its socket ends, and takes along what its places left behind."""
        self.socket.close()
        self.drop()
        if not self.up:
            self.process.kill()  # it is still importing; nobody depends on it
        self.code()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def import_paths() -> list[str]:
    return list(dict.fromkeys(path or os.getcwd() for path in sys.path))
