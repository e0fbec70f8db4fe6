"""The local runtime: places are processes on this machine. The parent is only a supervisor.

It makes all shared memory and pipes before any place exists, asks the fork server for places, hears from each through
a socket of its own, learns of deaths from the fork server, and restarts the dead. It never touches the data.
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
from shoal.runtime.cores import CoreUse
from shoal.runtime.forkserver import raise_file_limit
from shoal.runtime.nursery import Nursery
from shoal.runtime.place import plain
from shoal.runtime.places import TICK_SECONDS, Life, PlaceSupervisor
from shoal.runtime.program import Program
from shoal.runtime.supervisor import Faults, Gone, Session, supervised
from shoal.slots import Local

__all__ = ["Nursery", "run_local"]

STOP_SECONDS = 5.0            # what a place may take to end by itself
KILL_SECONDS = 5.0            # what it may take to be gone after SIGKILL
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # others come from a role's own crash
NURSERY_ATTEMPTS = 3
ASK_SECONDS = 1.0             # between two questions whether the fork server is alive
ANSWER_SECONDS = 10.0         # what it may take to answer, at least: it forks and reaps for everybody


@dataclass
class Child(Life):
    """A place in a process."""

    pid: int | None = None
    pidfd: int | None = None
    line: socket.socket | None = None       # from the order to start it until its death has been dealt with
    listening: bool = False

    @property
    def up(self) -> bool:
        return self.line is not None

    def kill(self) -> None:
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Until the process is gone; for the case that there is no fork server any more to tell."""
        poll = select.poll()
        if self.pidfd is not None:
            poll.register(self.pidfd, select.POLLIN)
        elif self.line is not None:
            poll.register(self.line, 0)  # POLLHUP only: its end of the line has closed
        poll.poll(1000 * seconds)


class LocalSupervisor(PlaceSupervisor[Child]):
    def __init__(self, program: Program, session: Session, log_dir: Path, faults: Faults, nursery: Nursery | None) -> None:
        raise_file_limit()
        self.program = program
        log_dir.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, Child] = {}
        self.selector = selectors.DefaultSelector()
        self.closing = False
        self.medium = Local()
        self._lent = nursery is not None
        self._attempts = 0
        self._asked: float | None = None  # when the fork server was asked for a sign of life that has not come yet
        self._ask_at = 0.0
        self._cores = CoreUse()
        self.nursery = nursery or Nursery()
        try:
            program.build(self.medium)
            super().__init__(program, session, log_dir, faults, {name: Child(place) for name, place in program.places.items()})
            self._meet_nursery()
        except BaseException:
            self._give_back()
            raise

    def _meet_nursery(self) -> None:
        while True:
            try:
                self.nursery.give(self.program, self.medium)
                break
            except ConnectionError:
                self._revive_nursery()  # it died before we came, or is dying now
        self._asked = None
        self.selector.register(self.nursery.socket, selectors.EVENT_READ, None)

    def _revive_nursery(self) -> None:
        """Its death is replaced; but one that fails by itself, or again and again, before it is up will not get better."""
        code = self.nursery.code()
        self._attempts = 0 if self.nursery.up else self._attempts + 1
        if not self.nursery.up and (code > 0 or self._attempts >= NURSERY_ATTEMPTS):
            raise ShoalError(f"the fork server cannot start (exit code {code}): what it printed above says why")
        self.nursery.restart()

    # ------------------------------------------------------------------ starting
    def _launch(self, child: Child, births: list[dict[str, Any]], title: str, threads: int) -> None:
        order = {"op": "spawn", "place": child.place.name, "births": births, "title": title, "threads": threads,
                 "log": str(self.log_dir.absolute() / f"{child.place.name}.log")}
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        child.line, child.listening = mine, True
        self.selector.register(mine, selectors.EVENT_READ, child)
        with theirs, contextlib.suppress(ConnectionError):  # a dead fork server is noticed by the end of its socket
            self.nursery.send(order, [theirs.fileno()])

    def _send(self, instance: str, command: dict[str, Any]) -> None:
        child = self._child(instance)
        try:
            if child.line is None or instance not in child.started:
                raise BrokenPipeError
            child.line.send(json.dumps({**command, "to": instance}, default=plain).encode())
        except OSError:  # dead, or dying, or so stuck that its socket is full
            if command["op"] not in ("reply", "start"):
                self._answered(command["id"], None, Gone(f"{instance} is not running"))

    def _hangs(self, child: Child, now: float) -> str:
        return super()._hangs(child, now) if child.pidfd is not None else ""  # else the fork server has not begun with it

    def turn(self) -> None:
        super().turn()
        self._watch_nursery(time.monotonic())

    def _watch_nursery(self, now: float) -> None:
        """One that does not answer (stopped, or hung) starts nobody and reports no death: it is killed, which is noticed."""
        if self._asked is None:
            if now >= self._ask_at:
                self._asked, self._ask_at = now, now + ASK_SECONDS
                if self.nursery.up:  # else it says so by itself when it has imported everything
                    with contextlib.suppress(ConnectionError):  # its death is noticed by the end of its socket
                        self.nursery.send({"op": "beat"})
            return
        limit = max(self.faults.hang_seconds if self.nursery.up else self.faults.start_seconds, ANSWER_SECONDS)
        if now - self._asked > limit and not self.ending:
            self.event("hang", "fork server", f"no sign of life for {limit:g} s; it is killed")
            self.nursery.process.kill()
            self._asked = now

    def surroundings(self) -> dict[str, float]:
        if not self.total("env_steps") and not self.total("learner_steps"):
            self._cores = CoreUse()  # how idle the cores are while everybody starts says nothing about the run
        pids = [child.pid for child in self.children.values() if child.pid is not None]
        return {"cores_busy": self._cores.look(pids, time.monotonic())}

    # ------------------------------------------------------------------ hearing
    def _listen(self) -> None:
        with contextlib.suppress(ConnectionError):  # its death is noticed by the end of its socket
            self.nursery.flush()
        for key, _ in self.selector.select(TICK_SECONDS):
            if key.data is None:
                self._hear_nursery()
            else:
                self._hear(key.data)

    def _hear(self, child: Child) -> None:
        """One message of a place."""
        if child.line is None or not child.listening:
            return  # it was reaped in this very turn
        try:
            data = child.line.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if data:
            self._take(child, json.loads(data))
        else:
            self._deafen(child)  # it has closed its end; the fork server will tell how it ended

    def _deafen(self, child: Child) -> None:
        if child.listening and child.line is not None:
            self.selector.unregister(child.line)
            child.listening = False

    def _hear_nursery(self) -> None:
        try:
            data = self.nursery.socket.recv(1 << 16)
        except (BlockingIOError, ConnectionResetError):
            return  # what it said before it died is still to be read
        if not data:
            self._nursery_died()
            return
        message = json.loads(data)
        self.nursery.up, self._asked = True, None  # whatever it says is a sign of life: orders are obeyed one after the other
        if message["kind"] in ("up", "beat"):
            return
        child = self.children[message["place"]]
        if message["kind"] == "failed":
            self._ended(child, -signal.SIGKILL, f"could not be forked: {message['why']}")
        elif message["kind"] == "spawned":
            child.pid = message["pid"]
            with contextlib.suppress(ProcessLookupError):  # it has come and gone
                child.pidfd = os.pidfd_open(message["pid"])
        elif message["kind"] == "exit":
            self._ended(child, message["code"])

    def _nursery_died(self) -> None:
        """Its children die with it (PDEATHSIG). See that they are gone, start another one, and all of them again."""
        self.selector.unregister(self.nursery.socket)
        self.nursery.drop()  # with the other ends of the lines of those whom it never began with
        orphans = [child for child in self.children.values() if child.line is not None]
        for child in orphans:
            child.kill()
            if child.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
        for child in orphans:
            child.wait(KILL_SECONDS)
        try:
            if not self.ending:
                self.event("restart", "fork server", "the fork server died; it is replaced and all places are restarted")
                self._revive_nursery()
                self._meet_nursery()
        except BaseException:
            self.ending = True
            raise
        finally:
            for child in orphans:
                self._ended(child, -signal.SIGKILL, "the fork server died", uncounted=True)

    # ------------------------------------------------------------------ deaths
    def _ended(self, child: Child, code: int, cause: str = "", uncounted: bool = False) -> None:
        """A place has ended and is reaped (or was never born): take its membership back, decide whether it comes again."""
        self._hear_last_words(child)
        lost = self._bury(child)
        if child.pidfd is not None:
            os.close(child.pidfd)
        child.pid = child.pidfd = None
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
        self._restart(child, lost, code == 0, -code in OUTSIDE, cause or killed or child.summary or f"exit code {code}",
                      uncounted)

    def _hear_last_words(self, child: Child) -> None:
        if child.line is None:
            return
        self._deafen(child)
        while True:
            try:
                data = child.line.recv(1 << 20)
            except ConnectionResetError:
                continue  # it died with something unread; what it said is still there
            except OSError:
                break
            if not data:
                break
            message = json.loads(data)
            if message["kind"] != "ready":
                self._take(child, message)
        child.line.close()
        child.line = None

    # ------------------------------------------------------------------ ending
    def close(self) -> None:
        """Stop every place: ask first, then kill; and give everything back."""
        self.ending = self.closing = True
        try:
            for child in self.children.values():
                if child.line is not None:
                    with contextlib.suppress(OSError):  # already gone
                        child.line.send(json.dumps({"op": "stop"}).encode())
            self._await_deaths(STOP_SECONDS)
            for child in self.children.values():
                child.kill()
            self._await_deaths(KILL_SECONDS)
            for identity in list(self._waiting):
                self._answered(identity, None, "the run is over")
        finally:
            self._give_back()

    def _await_deaths(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(child.line is not None for child in self.children.values()) and time.monotonic() < deadline:
            if not self.nursery.up and not self._lent:
                return  # it has not even begun; it is killed
            self.turn()

    def _give_back(self) -> None:
        strays = [child for child in self.children.values() if child.line is not None]
        for child in strays:
            child.kill()
        try:
            if not self._lent:
                self.nursery.close()
            elif strays or self.nursery.process.poll() is not None:
                self.nursery.restart()  # whatever is left there belongs to nobody
            else:
                self.nursery.forget()
        finally:
            for child in strays:
                child.line.close()  # type: ignore[union-attr]
                if child.pidfd is not None:
                    os.close(child.pidfd)
            self.selector.close()
            self.medium.close()
            self.program.release()


def run_local(program: Program, session: Session, log_dir: Path, faults: Faults | None = None,
              nursery: Nursery | None = None) -> str:
    """Run a program in processes of this machine until it is stopped; returns the reason."""
    if not sys.platform.startswith("linux"):
        raise ShoalError("the local runtime needs Linux (memfd, pidfd, PDEATHSIG); use --runtime inline here")
    return supervised(LocalSupervisor(program, session, log_dir, faults or Faults(), nursery), session)
