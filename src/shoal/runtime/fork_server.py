"""The fork server: it has imported all modules and run nothing, so that starting a place takes no longer than a fork.

The supervisor starts it. It forks places on request, reaps them and reports how they ended. It exits with the supervisor: on
the end of its socket, whose other end only the supervisor holds, and on PDEATHSIG.

A process that an environment leaves behind dies with its place. A place reaps its own orphans, and the fork server those of
places: so a process that becomes the fork server's child belonged to a dead place, whatever session or process group it is
in, and is killed. If the fork server itself is killed, its own parent does the same (`cleanup.py`, the guard).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from shoal.runtime.cleanup import PR_SET_PDEATHSIG, become_subreaper, prctl

__all__ = ["MARK", "main", "raise_file_limit"]

MARK = "SHOAL_FORK_SERVER"  # an environment variable by which processes that outlived their fork server are found
FILES = 65536
SWEEP_SECONDS = 2.0
GIVE_WAY = 10  # niceness of a process that is kept on one core


def keep_to_core(number: int | None) -> None:
    """Let this process, and the threads that it starts, run only on one of its cores; None: on any. There it gives way to processes
    that may run anywhere: a server that waits its turn behind one client holds up all the other clients."""
    if number is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
        os.nice(GIVE_WAY)


def raise_file_limit() -> None:
    """Allow as many open files as possible: every place holds the descriptors of all wires."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ForkServer:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._blob = b""
        self._children: dict[int, str] = {}  # pid -> place
        self._orphaned = False
        self._pid = os.getpid()

    def serve(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake up; one signal may stand for several deaths
        signal.signal(signal.SIGTERM, self._orphan)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        self._say({"kind": "up"})
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if wake_read in ready:
                os.read(wake_read, 4096)
            self._reap()
            if self._orphaned or (self._socket.fileno() in ready and not self._obey()):
                return

    def _orphan(self, *_: object) -> None:
        self._orphaned = True  # no exception: it could end `finish` half-way

    def finish(self) -> None:
        """Kill all places and what they left behind."""
        deadline = time.monotonic() + SWEEP_SECONDS
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._children.clear()
        while self._sweep() and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.005)

    # ------------------------------------------------------------------ deaths
    def _reap(self) -> None:
        ended = []
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                ended.append((pid, os.waitstatus_to_exitcode(status)))
        for pid, _ in ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if ended:
            self._sweep()  # also after an orphan's death: its own children have become ours
        for pid, code in ended:
            place = self._children.pop(pid, None)
            if place is not None:
                self._say({"kind": "exit", "place": place, "pid": pid, "code": code})

    def _sweep(self) -> int:
        """Kill the children that are not places; returns how many children there are."""
        pids = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
        for pid in pids:
            if pid not in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return len(pids)

    def _say(self, message: dict[str, Any]) -> None:
        self._socket.send(json.dumps(message).encode())

    # ------------------------------------------------------------------ orders
    def _obey(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 20, 253)
        except ConnectionResetError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)  # not for what an environment executes (recv_fds ignores MSG_CMSG_CLOEXEC)
        if not data:
            return False

        from shoal.slots import memory

        message = json.loads(data)
        if message["op"] == "beat":
            self._say({"kind": "beat"})
        elif message["op"] == "forget":  # the end of a run: the next one brings its own wires
            for fd in memory.FD_NUMBERS.values():
                os.close(fd)
            memory.FD_NUMBERS.clear()
            self._blob = b""
        elif message["op"] == "descriptors":
            memory.FD_NUMBERS.update(zip(message["numbers"], fds, strict=True))
        elif message["op"] == "program":
            self._blob = os.pread(fds[0], message["size"], 0)
            os.close(fds[0])
        elif message["op"] == "spawn":
            self._spawn(message, fds[0])
            os.close(fds[0])
        return True

    def _spawn(self, message: dict[str, Any], connection: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # no process or no memory is left; running places continue
            self._say({"kind": "failed", "place": message["place"], "why": str(error)})
            return
        if pid == 0:
            code = 1
            try:
                code = self._child(message, connection)
            finally:
                os._exit(code)
        self._children[pid] = message["place"]
        self._say({"kind": "spawned", "place": message["place"], "pid": pid})

    def _child(self, message: dict[str, Any], connection: int) -> int:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        become_subreaper()
        if os.getppid() != self._pid:
            return 1  # it died before PDEATHSIG was set
        self._socket.close()
        from shoal.runtime.place import InstanceStart, PlaceProcess, SupervisorSocket, report, run_place

        line = SupervisorSocket(socket.socket(fileno=connection))
        starts = [InstanceStart(**start) for start in message["starts"]]
        try:
            self._redirect(message["log"])
            import cloudpickle
            import setproctitle
            import torch

            setproctitle.setproctitle(message["title"])
            torch.set_num_threads(message["threads"])
            paths, blob = cloudpickle.loads(self._blob)  # the program's modules may be found only where its writer finds them
            sys.path.extend(path for path in paths if path not in sys.path)
            program = cloudpickle.loads(blob)
            keep_to_core(program.places[message["place"]].core)
        except BaseException as failure:
            report(line, f"{starts[0].node}-{starts[0].index}", failure)
            return 1
        code = run_place(PlaceProcess(program, message["place"], line), line, starts)
        with contextlib.suppress(OSError):  # a full disk
            sys.stdout.flush()
            sys.stderr.flush()
        return code

    @staticmethod
    def _redirect(log: str) -> None:
        """Write what a role prints to its log, line by line, so that it is there even after a kill -9. Its input is empty."""
        for path, flags, targets in (("/dev/null", os.O_RDONLY, (0,)), (log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, (1, 2))):
            fd = os.open(path, flags, 0o644)
            for target in targets:
                os.dup2(fd, target)
            os.close(fd)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        faulthandler.enable()  # a crash in native code leaves its stack there


def main() -> None:
    supervisor, control, preload = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends it at once while it imports; `serve` kills what places leave behind first
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    become_subreaper()
    if os.getppid() != supervisor:
        return
    raise_file_limit()
    import setproctitle

    setproctitle.setproctitle("shoal: fork server")
    connection = socket.socket(fileno=control)
    connection.set_inheritable(False)
    for module in preload:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what has been imported is never collected, so its pages stay shared with the children
    server = ForkServer(connection)
    try:
        server.serve()
    except BrokenPipeError:
        pass  # the supervisor is gone
    finally:
        server.finish()


if __name__ == "__main__":
    main()
