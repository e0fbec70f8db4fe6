"""The local runtime: places are processes on this machine; the parent only supervises them.

It creates all shared memory and pipes before any place exists, tells the fork server to start places, talks to each place
through a socket, learns of deaths from the fork server, and restarts what died. It never touches the data.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.runtime.core_use import CoreUse
from shoal.runtime.fork_server import raise_file_limit
from shoal.runtime.fork_server_client import ForkServerClient
from shoal.runtime.place import json_numbers
from shoal.runtime.place_supervisor import TICK_SECONDS, PlaceState, PlaceSupervisor
from shoal.runtime.program import Program
from shoal.runtime.supervisor import Faults, NotRunning, Session, supervised
from shoal.slots import LocalAllocator

__all__ = ["run_local"]

STOP_SECONDS = 5.0            # that a place may take to end by itself
KILL_SECONDS = 5.0            # that it may take to be gone after SIGKILL
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # other signals come from a role's own crash
FORK_SERVER_ATTEMPTS = 3
ASK_SECONDS = 1.0             # between two checks whether the fork server is alive
ANSWER_SECONDS = 10.0         # that it may take to reply, at least: it forks and reaps for all places


@dataclass
class LocalPlace(PlaceState):
    """A place in a process."""

    pid: int | None = None
    pidfd: int | None = None
    connection: socket.socket | None = None  # from the order to start it until its death has been dealt with
    listening: bool = False

    @property
    def up(self) -> bool:
        return self.connection is not None

    def kill(self) -> None:
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Wait until the process is gone; used when no fork server is left to report its death."""
        poll = select.poll()
        if self.pidfd is not None:
            poll.register(self.pidfd, select.POLLIN)
        elif self.connection is not None:
            poll.register(self.connection, 0)  # POLLHUP only: its end of the line has closed
        poll.poll(1000 * seconds)


class LocalSupervisor(PlaceSupervisor[LocalPlace]):
    def __init__(self, program: Program, session: Session, log_dir: Path, faults: Faults,
                 fork_server: ForkServerClient | None) -> None:
        raise_file_limit()
        self.program = program
        log_dir.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, LocalPlace] = {}
        self.selector = selectors.DefaultSelector()
        self.closing = False
        self.allocator = LocalAllocator()
        self._lent = fork_server is not None
        self._attempts = 0
        self._asked: float | None = None  # when the fork server was asked for a sign of life that has not come yet
        self._ask_at = 0.0
        self._cores = CoreUse()
        self.fork_server = fork_server or ForkServerClient(program.preload)
        try:
            program.build(self.allocator)
            super().__init__(program, session, log_dir, faults, {name: LocalPlace(place) for name, place in program.places.items()})
            self._connect_fork_server()
        except BaseException:
            self._release()
            raise

    def _connect_fork_server(self) -> None:
        while True:
            try:
                self.fork_server.give(self.program, self.allocator)
                break
            except ConnectionError:
                self._restart_fork_server()  # it died before we came, or is dying now
        self._asked = None
        self.selector.register(self.fork_server.socket, selectors.EVENT_READ, None)

    def _restart_fork_server(self) -> None:
        """Start another fork server; but give up if it failed by itself, or several times, before it was up."""
        code = self.fork_server.code()
        self._attempts = 0 if self.fork_server.up else self._attempts + 1
        if not self.fork_server.up and (code > 0 or self._attempts >= FORK_SERVER_ATTEMPTS):
            raise ShoalError(f"the fork server cannot start (exit code {code}); see what it printed above")
        self.fork_server.restart()

    # ------------------------------------------------------------------ starting
    def _launch(self, child: LocalPlace, starts: list[dict[str, Any]], title: str, threads: int) -> None:
        order = {"op": "spawn", "place": child.place.name, "starts": starts, "title": title, "threads": threads,
                 "log": str(self.log_dir.absolute() / f"{child.place.name}.log")}
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        child.connection, child.listening = mine, True
        self.selector.register(mine, selectors.EVENT_READ, child)
        with theirs, contextlib.suppress(ConnectionError):  # a dead fork server is noticed by the end of its socket
            self.fork_server.send(order, [theirs.fileno()])

    def _send(self, instance: str, command: dict[str, Any]) -> None:
        child = self._child(instance)
        try:
            if child.connection is None or instance not in child.started:
                raise BrokenPipeError
            child.connection.send(json.dumps({**command, "to": instance}, default=json_numbers).encode())
        except OSError:  # dead, or dying, or so stuck that its socket is full
            if command["op"] not in ("reply", "start"):
                self._answered(command["id"], None, NotRunning(f"{instance} is not running"))

    def _hangs(self, child: LocalPlace, now: float) -> str:
        return super()._hangs(child, now) if child.pidfd is not None else ""  # else the fork server has not started it yet

    def turn(self) -> None:
        super().turn()
        self._watch_fork_server(time.monotonic())

    def _watch_fork_server(self, now: float) -> None:
        """Kill a fork server that does not reply (stopped, or hung): it starts no place and reports no death."""
        if self._asked is None:
            if now >= self._ask_at:
                self._asked, self._ask_at = now, now + ASK_SECONDS
                if self.fork_server.up:  # else it says so itself when it has imported everything
                    with contextlib.suppress(ConnectionError):  # its death is noticed by the end of its socket
                        self.fork_server.send({"op": "beat"})
            return
        limit = max(self.faults.hang_seconds if self.fork_server.up else self.faults.start_seconds, ANSWER_SECONDS)
        if now - self._asked > limit and not self.ending:
            self.event("hang", "fork server", f"no sign of life for {limit:g} s; killed")
            self.fork_server.process.kill()
            self._asked = now

    def surroundings(self) -> dict[str, float]:
        if self.starting():
            self._cores = CoreUse()  # how idle the cores are while roles start says nothing about the run
        pids = [child.pid for child in self.children.values() if child.pid is not None]
        return {"cores_busy": self._cores.look(pids, time.monotonic())}

    # ------------------------------------------------------------------ messages
    def _listen(self) -> None:
        with contextlib.suppress(ConnectionError):  # its death is noticed by the end of its socket
            self.fork_server.flush()
        for key, _ in self.selector.select(TICK_SECONDS):
            if key.data is None:
                self._hear_fork_server()
            else:
                self._hear(key.data)

    def _hear(self, child: LocalPlace) -> None:
        """One message of a place."""
        if child.connection is None or not child.listening:
            return  # it was reaped in this very turn
        try:
            data = child.connection.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if data:
            self._take(child, json.loads(data))
        else:
            self._stop_listening(child)  # it has closed its end; the fork server will report how it ended

    def _stop_listening(self, child: LocalPlace) -> None:
        if child.listening and child.connection is not None:
            self.selector.unregister(child.connection)
            child.listening = False

    def _hear_fork_server(self) -> None:
        try:
            data = self.fork_server.socket.recv(1 << 16)
        except (BlockingIOError, ConnectionResetError):
            return  # messages that it sent before it died are still to be read
        if not data:
            self._fork_server_died()
            return
        message = json.loads(data)
        self.fork_server.up, self._asked = True, None  # any message is a sign of life: it obeys one order after the other
        if message["kind"] in ("up", "beat"):
            return
        child = self.children[message["place"]]
        if message["kind"] == "failed":
            self._ended(child, -signal.SIGKILL, f"could not be forked: {message['why']}")
        elif message["kind"] == "spawned":
            child.pid = message["pid"]
            with contextlib.suppress(ProcessLookupError):  # it has already ended
                child.pidfd = os.pidfd_open(message["pid"])
        elif message["kind"] == "exit":
            self._ended(child, message["code"])

    def _fork_server_died(self) -> None:
        """All places die with it (PDEATHSIG). Make sure that they are gone, start another fork server, and restart them."""
        self.selector.unregister(self.fork_server.socket)
        self.fork_server.drop()  # with the sockets of places that it had not started yet
        orphans = [child for child in self.children.values() if child.connection is not None]
        for child in orphans:
            child.kill()
            if child.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
        for child in orphans:
            child.wait(KILL_SECONDS)
        try:
            if not self.ending:
                self.event("restart", "fork server", "the fork server died; starting another one and restarting all places")
                self._restart_fork_server()
                self._connect_fork_server()
        except BaseException:
            self.ending = True
            raise
        finally:
            for child in orphans:
                self._ended(child, -signal.SIGKILL, "the fork server died", uncounted=True)

    # ------------------------------------------------------------------ deaths
    def _ended(self, child: LocalPlace, code: int, cause: str = "", uncounted: bool = False) -> None:
        """A place has ended and is reaped (or could not be forked): remove its members, decide whether to restart it."""
        self._read_last_messages(child)
        lost = self._remove_members(child)
        if child.pidfd is not None:
            os.close(child.pidfd)
        child.pid = child.pidfd = None
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
        self._restart(child, lost, code == 0, -code in OUTSIDE, cause or killed or child.summary or f"exit code {code}",
                      uncounted)

    def _read_last_messages(self, child: LocalPlace) -> None:
        if child.connection is None:
            return
        self._stop_listening(child)
        while True:
            try:
                data = child.connection.recv(1 << 20)
            except ConnectionResetError:
                continue  # it died with something unread; its messages are still there
            except OSError:
                break
            if not data:
                break
            message = json.loads(data)
            if message["kind"] != "ready":
                self._take(child, message)
        child.connection.close()
        child.connection = None

    # ------------------------------------------------------------------ ending
    def close(self) -> None:
        """Stop every place: ask first, then kill; and release everything."""
        self.ending = self.closing = True
        try:
            for child in self.children.values():
                if child.connection is not None:
                    with contextlib.suppress(OSError):  # already gone
                        child.connection.send(json.dumps({"op": "stop"}).encode())
            self._await_deaths(STOP_SECONDS)
            for child in self.children.values():
                child.kill()
            self._await_deaths(KILL_SECONDS)
            for identity in list(self._waiting):
                self._answered(identity, None, "the run is over")
        finally:
            self._release()

    def _await_deaths(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(child.connection is not None for child in self.children.values()) and time.monotonic() < deadline:
            if not self.fork_server.up and not self._lent:
                return  # it has not started anything; it is killed
            self.turn()

    def _release(self) -> None:
        strays = [child for child in self.children.values() if child.connection is not None]
        for child in strays:
            child.kill()
        try:
            if not self._lent:
                self.fork_server.close()
            elif strays or self.fork_server.process.poll() is not None:
                self.fork_server.restart()  # kills all that is left there
            else:
                self.fork_server.forget()
        finally:
            for child in strays:
                if child.connection is not None:
                    child.connection.close()
                if child.pidfd is not None:
                    os.close(child.pidfd)
            self.selector.close()
            self.allocator.close()
            self.program.release()


def run_local(program: Program, session: Session, log_dir: Path, faults: Faults | None = None,
              fork_server: ForkServerClient | None = None) -> str:
    """Run a program in processes of this machine until it is stopped; returns the reason."""
    if not sys.platform.startswith("linux"):
        raise ShoalError("--runtime local needs Linux (memfd, pidfd, PDEATHSIG); use --runtime inline")
    return supervised(LocalSupervisor(program, session, log_dir, faults or Faults(), fork_server), session)
