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
from shoal.runtime.cleanup import guard_command, marked_processes
from shoal.runtime.core_use import waiting_threads
from shoal.runtime.fork_server import MARK
from shoal.runtime.program import Program
from shoal.slots import LocalAllocator

__all__ = ["ForkServerClient", "import_paths"]

START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from shoal.runtime.fork_server import main; main()"
DESCRIPTORS = 200  # per message; the kernel allows 253
CLOSE_SECONDS = 3.0
NO_ROOM = (errno.EAGAIN, errno.ENOMEM)  # for another process, perhaps only for a moment
START_PAUSES = (0.2, 1.0, 3.0)  # between attempts then


class ServerProcess:
    """The process of a fork server. Its parent is a guard, which ends as it did when all that it had started is gone."""

    def __init__(self, control: int, arguments: list[str], mark: str) -> None:
        read, told = os.pipe()
        with open(read, "rb") as file:
            try:
                self._guard = subprocess.Popen(guard_command(told, control, arguments), stdin=subprocess.DEVNULL,
                                               pass_fds=[control, told], start_new_session=True,
                                               env={**os.environ, **waiting_threads(), MARK: mark})
            finally:
                os.close(told)
            pid = file.read()
        if not pid:
            self._guard.wait()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # it has said why
        self.pid = int(pid)

    def kill(self) -> None:
        if self._guard.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        return self._guard.poll()

    def wait(self, seconds: float | None) -> int:
        return self._guard.wait(seconds)


class ForkServerClient:
    """Starts the fork server and sends it orders. One server can serve many runs in turn; starting it early hides the time
    that it takes to import the modules of `preload`, which its processes then share.

        with ForkServerClient(program.preload) as fork_server:
            run(program, session, "local", logs, fork_server=fork_server)
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = list(preload)
        self._queue: deque[tuple[bytes, list[int]]] = deque()  # messages, and descriptors that are the queue's own
        self._start()

    def _start(self) -> None:
        self.up = False  # whether it has imported everything
        self.mark = uuid.uuid4().hex
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        with theirs:
            self.process = self._start_process(theirs.fileno())

    def _start_process(self, control: int) -> ServerProcess:
        pauses = iter(START_PAUSES)
        while True:
            try:
                return ServerProcess(control, [START, json.dumps(self._preload), json.dumps(import_paths())], self.mark)
            except OSError as error:
                pause = next(pauses, None) if error.errno in NO_ROOM else None
                if pause is None:
                    self.socket.close()
                    raise ShoalError(f"the fork server cannot start: {error}; check that there is free memory and that another "
                                     "process may be started (ulimit -u)") from error
                time.sleep(pause)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Never waits: a fork server that is busy, or stopped, may itself wait until its replies are read. `flush` sends what the
        socket has no room for. Raises BrokenPipeError (or ConnectionResetError) when the server is dead."""
        data = json.dumps(message).encode()
        self.flush()
        if self._queue or not self._fits(data, fds):
            self._queue.append((data, [os.dup(fd) for fd in fds]))

    def flush(self) -> None:
        """Send what is queued, as far as the socket has room now."""
        while self._queue and self._fits(*self._queue[0]):
            for fd in self._queue.popleft()[1]:
                os.close(fd)

    def drop(self) -> None:
        """Forget what is queued."""
        while self._queue:
            for fd in self._queue.popleft()[1]:
                os.close(fd)

    def _fits(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            socket.send_fds(self.socket, [data], list(fds))
        except BlockingIOError:
            return False
        return True

    def give(self, program: Program, allocator: LocalAllocator) -> None:
        """Send the descriptors of all wires, and the program itself."""
        self.send({"op": "forget"})
        numbers = allocator.fds
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
        """The exit code of a server that has died or is dying."""
        try:
            return self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # it has closed its socket, and hangs
            return self.process.wait(None)

    def forget(self) -> None:
        """The run is over: the server closes the descriptors of its wires."""
        with contextlib.suppress(OSError):
            self.send({"op": "forget"})

    def restart(self) -> None:
        """Start another server in place of a dead one."""
        self.close()
        for pid in marked_processes(f"{MARK}={self.mark}".encode()):  # started by roles; they outlive a server that was killed
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._start()

    def close(self) -> None:
        """The server exits when its socket closes, and kills what its places left behind."""
        self.socket.close()
        self.drop()
        if not self.up:
            self.process.kill()  # it is still importing; nothing depends on it
        self.code()

    def __enter__(self) -> ForkServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def import_paths() -> list[str]:
    return list(dict.fromkeys(path or os.getcwd() for path in sys.path))
