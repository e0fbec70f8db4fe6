"""Cleans up after processes that a run has started, even if the run is killed (kill -9, a second Ctrl-C).

Two small processes, each of which runs this file alone:

    guard     the parent of a fork server, and the sub-reaper of all that it leaves behind. When the fork server has ended, however
              it did, whatever it or an environment had started is a child of the guard, and is killed
    watcher   beside a Ray cluster that the driver started. Twice a second it records the processes below the cluster's servers. At
              the end of a pipe that only the driver holds it kills them, and removes the folders that it was told about

A process cannot escape by a session, a process group, an empty environment or another name: the guard asks the kernel for its
children, and the watcher knows a process by its pid and the time at which it was started. What is started below a Ray worker stays
below it, because each worker with a place is a sub-reaper too. Marks in the environment help only where both failed: a process may
overwrite them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["PR_SET_PDEATHSIG", "CleanupProcess", "ProcessRecord", "become_subreaper", "end_descendants", "guard_command",
           "marked_processes", "prctl"]

NAME = "SHOAL_CLUSTER"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
RECORD_SECONDS = 0.5
KILL_SECONDS = 10.0
LOOK_SECONDS = 0.1
LOOKS = 4  # in a row that find no process: one that is just being started has no environment yet
SWEEP_SECONDS = 2.0


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """Make this process the parent of all below it whose own parents die."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


# ---------------------------------------------------------------------------------------------- which processes there are
def parents_and_starts() -> dict[int, tuple[int, int]]:
    """Of every process: its parent, and when it was started (in ticks since the boot)."""
    found = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # just gone
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] != b"Z":
                    found[int(name)] = int(fields[1]), int(fields[19])
    return found


class ProcessRecord:
    """Some processes and all that were ever seen below them, by pid and start time: a pid may be used again."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def add(self, pids: Iterable[int]) -> None:
        there = parents_and_starts()
        self._known.update({pid: there[pid][1] for pid in pids if pid in there})

    def look(self) -> set[int]:
        """Record what is new, and forget what has ended; returns those that are alive."""
        there = parents_and_starts()
        self._known = {pid: start for pid, start in self._known.items() if pid in there and there[pid][1] == start}
        children: dict[int, list[int]] = {}
        for pid, (parent, _) in there.items():
            children.setdefault(parent, []).append(pid)
        left = list(self._known)
        while left:
            for pid in children.get(left.pop(), ()):
                if pid not in self._known and pid != os.getpid():
                    self._known[pid] = there[pid][1]
                    left.append(pid)
        return set(self._known)

    def end(self) -> bool:
        """Stop them all, so that none starts another one meanwhile, then kill them; returns whether there was any."""
        stopped: set[int] = set()
        while new := self.look() - stopped:
            for pid in new:
                send(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            send(pid, signal.SIGKILL)
        return bool(stopped)


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # just gone, or another user's
        os.kill(pid, number)


def marked_processes(mark: bytes) -> list[int]:
    """The processes that have a mark in their environment."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):  # another user's, or just gone
            if name.isdigit() and mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def end_descendants() -> None:
    """Kill all processes below this one."""
    record = ProcessRecord()
    record.add([os.getpid()])
    below = record.look() - {os.getpid()}
    while below:
        for pid in below:
            send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        below = record.look() - {os.getpid()}


# ---------------------------------------------------------------------------------------------- beside a Ray cluster
class CleanupProcess:
    """The driver's end of a watcher. Create it before the cluster, close it after the cluster has stopped."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        read, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, "watch", str(read), f"{NAME}={self._mark}"], pass_fds=[read], cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(read)

    @contextlib.contextmanager
    def marking_children(self) -> Iterator[None]:
        """Processes that are started meanwhile, and all that these start, belong to the cluster."""
        os.environ[NAME] = self._mark
        try:
            yield
        finally:
            del os.environ[NAME]
            for pid in marked_processes(f"{NAME}={self._mark}".encode()):
                self._tell(f"pid {pid}")

    def remember(self, folder: Path) -> None:
        """Remove this folder when the cluster has stopped."""
        self._tell(f"folder {folder}")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the process was killed: nothing is left to tell
            os.write(self._pipe, f"{line}\n".encode())

    def close(self) -> None:
        """The cluster has stopped: kill what is still left of it."""
        os.close(self._pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * KILL_SECONDS)


def watch(pipe: int, mark: bytes) -> None:
    record, told, folders = ProcessRecord(), b"", []
    while True:
        if select.select([pipe], [], [], RECORD_SECONDS)[0]:
            part = os.read(pipe, 1 << 16)
            if not part:
                break
            *lines, told = (told + part).split(b"\n")
            record.add(int(line[4:]) for line in lines if line.startswith(b"pid "))
            folders += [line[7:].decode() for line in lines if line.startswith(b"folder ")]
        record.look()
    deadline, quiet = time.monotonic() + KILL_SECONDS, 0
    while quiet < LOOKS and time.monotonic() < deadline:
        record.add(marked_processes(mark))
        quiet = 0 if record.end() else quiet + 1
        time.sleep(LOOK_SECONDS)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------------------------------------- the parent of a fork server
def guard_command(told: int, control: int, arguments: list[str]) -> list[str]:
    """What starts a guard, which starts `python -c CODE PARENT CONTROL ...` (`arguments` without the two numbers, CODE first) and
    writes its pid to the descriptor `told`. Both descriptors must be passed on."""
    return [sys.executable, "-I", "-S", __file__, "guard", str(os.getpid()), str(told), str(control), *arguments]


def guard(parent: int, told: int, control: int, code: str, arguments: list[str]) -> None:
    """Ends as the fork server did, when nothing that it started is left."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    ended = [False]
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    become_subreaper()
    if os.getppid() != parent:
        return
    server = subprocess.Popen([sys.executable, "-c", code, str(os.getpid()), str(control), *arguments], pass_fds=[control],
                              stdin=subprocess.DEVNULL)
    os.close(control)
    os.write(told, f"{server.pid}\n".encode())
    os.close(told)
    signal.signal(signal.SIGTERM, lambda *_: server.send_signal(signal.SIGTERM))
    if len(ended) > 1:  # the parent died meanwhile
        server.send_signal(signal.SIGTERM)
    status = server.wait()
    deadline = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < deadline and (left := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        for pid in left:
            send(int(pid), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)
    if status < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch(int(sys.argv[2]), sys.argv[3].encode())
    else:
        guard(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6:])
