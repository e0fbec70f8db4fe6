"""The supervisor's end of the fork server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from shoal.runtime.forkserver import MARK
from shoal.runtime.program import Program
from shoal.slots import Local

__all__ = ["PRELOAD", "Nursery"]

PRELOAD = ("numpy", "cloudpickle", "setproctitle", "gymnasium", "torch", "shoal.envs", "shoal.runtime.place",
           "shoal.algorithms.learner", "shoal.algorithms.policy", "shoal.nets", "shoal.architectures.roles",
           "shoal.experiment.checkpoints")  # whatever is not here, every place imports and holds for itself
START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from shoal.runtime.forkserver import main; main()"
DESCRIPTORS = 200  # per message; the kernel allows 253
CLOSE_SECONDS = 3.0


class Nursery:
    """Starts the fork server. Starting one early hides the time of its imports; one serves many runs in turn.

    with Nursery() as nursery:
        run(program, session, "local", logs, nursery=nursery)
    """

    def __init__(self, preload: Sequence[str] | None = None) -> None:
        self._preload = list(PRELOAD if preload is None else preload)
        self._start()

    def _start(self) -> None:
        self.up = False  # whether it has imported everything
        self.mark = uuid.uuid4().hex
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", START, str(os.getpid()), str(theirs.fileno()), json.dumps(self._preload),
                   json.dumps(import_paths())]
        with theirs:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                                            start_new_session=True, env={**os.environ, MARK: self.mark})

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Raises BrokenPipeError (or ConnectionResetError) when the fork server is dead."""
        socket.send_fds(self.socket, [json.dumps(message).encode()], list(fds))

    def give(self, program: Program, medium: Local) -> None:
        """Pass on the descriptors of all wires, and the program itself."""
        self.send({"op": "forget"})
        numbers = medium.fds
        for start in range(0, len(numbers), DESCRIPTORS):
            part = numbers[start : start + DESCRIPTORS]
            self.send({"op": "descriptors", "numbers": part}, part)
        blob = cloudpickle.dumps(program)
        with open(os.memfd_create("shoal-program"), "wb", buffering=0) as file:
            view = memoryview(blob)
            while view:
                view = view[file.write(view) :]
            self.send({"op": "program", "size": len(blob), "paths": import_paths()}, [file.fileno()])

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
        for pid in survivors(self.mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._start()

    def close(self) -> None:
        """It exits when its socket ends, and takes along what its places left behind."""
        self.socket.close()
        if not self.up:
            self.process.kill()  # it is still importing; nobody depends on it
        self.code()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def import_paths() -> list[str]:
    return [path or os.getcwd() for path in sys.path]


def survivors(mark: str) -> list[int]:
    """Processes that environments started and that outlived a fork server that was killed."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # gone, or somebody else's
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
