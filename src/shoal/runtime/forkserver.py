"""The fork server: has imported everything and run nothing, so that each place starts in the time of a fork.

It is started by the supervisor, exits when the supervisor does (EOF of a pipe that only the supervisor holds, and
PDEATHSIG), forks places on request, reaps them and reports how they ended. Whatever process an environment leaves
behind when its place dies becomes the fork server's child, and is killed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PRELOAD = ("numpy", "cloudpickle", "setproctitle", "gymnasium", "torch", "shoal.envs", "shoal.runtime.place", "shoal.algorithms",
           "shoal.nets", "shoal.architectures")


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class ForkServer:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._blob = b""
        self._children: dict[int, str] = {}

    def serve(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        import select

        while True:
            ready, _, _ = select.select([self._socket, wake_read], [], [])
            if wake_read in ready:
                os.read(wake_read, 4096)
            self._reap()
            if self._socket in ready and not self._obey():
                return

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            place = self._children.pop(pid, None)
            if place is not None:
                self._sweep(pid)
                self._say({"kind": "exit", "place": place, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _sweep(self, dead: int) -> None:
        """Kill what the dead place started: its process group, and orphans that were handed to us."""
        try:
            os.killpg(dead, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # nobody is left in it
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        for pid in map(int, children.read_text().split()):
            if pid not in self._children:
                os.kill(pid, signal.SIGKILL)

    def _say(self, message: dict[str, Any]) -> None:
        self._socket.send(json.dumps(message).encode())

    def _obey(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._socket, 1 << 20, 253)
        if not data:
            return False
        message = json.loads(data)
        if message["op"] == "descriptors":
            from shoal.slots import medium

            medium.FD_NUMBERS.update(zip(message["numbers"], fds, strict=True))
        elif message["op"] == "program":
            self._blob = os.pread(fds[0], message["size"], 0)
            os.close(fds[0])
        elif message["op"] == "spawn":
            self._spawn(message, fds[0])
            os.close(fds[0])
        return True

    def _spawn(self, message: dict[str, Any], connection: int) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = self._child(message, connection)
            finally:
                os._exit(code)
        self._children[pid] = message["place"]
        self._say({"kind": "spawned", "place": message["place"], "pid": pid})

    def _child(self, message: dict[str, Any], connection: int) -> int:
        server = os.getppid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            return 1
        self._socket.close()
        log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import cloudpickle
        import setproctitle
        import torch

        from shoal.runtime.place import run_place

        setproctitle.setproctitle(message["title"])
        torch.set_num_threads(message["threads"])
        program = cloudpickle.loads(self._blob)
        newest = Path(message["newest"]) if message["newest"] else None
        return run_place(program, message["place"], message["incarnation"], newest, socket.socket(fileno=os.dup(connection)),
                         message["started"])


def main() -> None:
    supervisor, control = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != supervisor:
        return
    connection = socket.socket(fileno=control)
    length = struct.unpack("<q", os.read(0, 8))[0]
    sys.path[:0] = [path for path in json.loads(os.read(0, length)) if path not in sys.path]
    for module in PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what has been imported is never collected, so its pages stay shared with the children
    ForkServer(connection).serve()


if __name__ == "__main__":
    main()
