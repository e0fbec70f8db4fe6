"""Starts members by a fork of a process that has imported everything: an interval begins in a tenth of the time of a new Python.

    client ── {"start": words, "log": path} ─▶ server ── fork ──▶ `shoal` with these words
           ◀──────────────────────── its pid ──
           ── {"poll": pid} ─▶  its exit code, or null    ── {"end": pid} ─▶

The server runs nothing itself, so a fork copies no threads. It ends with its client, and members end with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from shoal.bench.parent_death import end_with_parent, tied_to_parent
from shoal.errors import RoleFailed
from shoal.experiment.preload import PRELOAD

__all__ = ["MemberServer", "ServedMember", "member_environment"]

MODULES = (*PRELOAD, "shoal.experiment.run_commands", "shoal.experiment.session", "shoal.roles.evaluator",
           "shoal.envs.builtin.compiled")
LOST = -int(signal.SIGKILL)  # exit code of a member whose server was killed


def member_environment() -> dict[str, str]:
    """Variables of a member's process: it finds the modules that this one finds."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


class MemberServer:
    """The client's side; a server that was killed is started again with the next member."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, words: list[str], log: Path) -> ServedMember:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(tied_to_parent([sys.executable, "-m", __name__]), stdin=subprocess.PIPE, text=True,
                                             stdout=subprocess.PIPE, env=member_environment(),
                                             start_new_session=True)  # Ctrl-C is for the study: a second one would end members
        try:
            pid = int(ask(self._process, {"start": words, "log": str(log)}))
        except (OSError, ValueError):
            raise RoleFailed(f"members cannot be started: the process that forks them has ended (exit code {self._process.wait()})"
                             "; what it printed is above") from None
        return ServedMember(self._process, pid)

    def close(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process.wait()


class ServedMember:
    """A slices.RunningSlice."""

    def __init__(self, server: subprocess.Popen[str], pid: int) -> None:
        self._server, self.pid = server, pid

    def poll(self) -> int | None:
        try:
            code = ask(self._server, {"poll": self.pid})
        except (OSError, ValueError):  # its server was killed, and it ends
            return LOST
        return None if code is None else int(code)

    def terminate(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            ask(self._server, {"end": self.pid})


def ask(server: subprocess.Popen[str], order: dict[str, Any]) -> Any:
    """ValueError where the server has gone."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


# ---------------------------------------------------------------------------------------------- the server's side
def serve() -> None:
    """Returns when the client has gone. Members leave it by SystemExit, as every command does."""
    for name in MODULES:
        importlib.import_module(name)
    me = os.getpid()
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if "start" in order:
            pid = os.fork()
            if pid == 0:
                member(me, order["start"], order["log"])
            answer: int | None = pid
        elif "poll" in order:
            found, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            os.kill(order["end"], signal.SIGTERM)
            answer = 0
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


def member(server: int, words: list[str], log: str) -> None:
    """In the forked process: `python -m shoal.cli` with these words."""
    end_with_parent(server)
    for target, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, target)
        os.close(opened)
    os.dup2(1, 2)
    sys.argv = ["shoal", *words]
    runpy.run_module("shoal.cli", run_name="__main__")


if __name__ == "__main__":
    serve()
