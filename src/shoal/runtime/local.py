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
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import RoleFailed, ShoalError
from shoal.runtime.forkserver import raise_file_limit
from shoal.runtime.instance import instance_name
from shoal.runtime.nursery import Nursery
from shoal.runtime.place import plain
from shoal.runtime.program import Place, Program
from shoal.runtime.supervisor import Faults, Gone, Session, Supervisor
from shoal.slots import Local

__all__ = ["Nursery", "run_local"]

TICK_SECONDS = 0.1
BACKOFF_SECONDS = (0.0, 0.1, 0.5, 2.0)
STOP_SECONDS = 5.0            # what a place may take to end by itself
KILL_SECONDS = 5.0            # what it may take to be gone after SIGKILL
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # others come from a role's own crash
UNBORN_DEATHS = 10            # deaths by an outside signal, in a row, before a place was ever ready: out of memory?
NURSERY_ATTEMPTS = 3


@dataclass
class Child:
    """What the supervisor knows of a place's process."""

    place: Place
    incarnation: int = -1
    pid: int | None = None
    pidfd: int | None = None
    line: socket.socket | None = None       # from the order to start it until its death has been dealt with
    listening: bool = False
    started: list[str] = field(default_factory=list)  # the instances that live in it, or are being born
    ready: set[str] = field(default_factory=set)
    emptied: bool = False                    # all of them were drained
    steps: dict[str, float] = field(default_factory=dict)  # that each had made when it was started
    started_at: float = 0.0
    deaths: int = 0                          # in a row without a step between them, for the back-off
    fruitless: int = 0                       # of these, the ones that were its own fault
    unborn: int = 0                          # and the ones from outside before it was ready
    errors: deque[float] = field(default_factory=deque)
    last_error: str = ""
    summary: str = ""
    again_at: float | None = None
    hung: str = ""

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


class LocalSupervisor(Supervisor):
    def __init__(self, program: Program, session: Session, log_dir: Path, faults: Faults, nursery: Nursery | None) -> None:
        raise_file_limit()
        self.program = program
        self.log_dir, self.faults = log_dir, faults
        log_dir.mkdir(parents=True, exist_ok=True)
        self.children = {name: Child(place) for name, place in program.places.items()}
        self.selector = selectors.DefaultSelector()
        self.closing = False
        self.medium = Local()
        self._lent = nursery is not None
        self._attempts = 0
        self.nursery = nursery or Nursery()
        try:
            program.build(self.medium)
            super().__init__(program, session)
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
        self.selector.register(self.nursery.socket, selectors.EVENT_READ, None)

    def _revive_nursery(self) -> None:
        """Its death is replaced; but one that fails by itself, or again and again, before it is up will not get better."""
        code = self.nursery.code()
        self._attempts = 0 if self.nursery.up else self._attempts + 1
        if not self.nursery.up and (code > 0 or self._attempts >= NURSERY_ATTEMPTS):
            raise ShoalError(f"the fork server cannot start (exit code {code}): what it printed above says why")
        self.nursery.restart()

    # ------------------------------------------------------------------ starting
    def _child(self, instance: str) -> Child:
        node, index = instance.rsplit("-", 1)
        return self.children[self.program.place_of(node, int(index)).name]

    def _spawn(self, node: str, index: int) -> None:
        """Start an instance: with its place, or in its place if that is running without it."""
        name = instance_name(node, index)
        child = self._child(name)
        if child.line is None:
            if child.again_at is None:  # else it comes with its place
                self._start(child)
        elif name not in child.started:  # else it is still being drained, and started again after that
            child.incarnation += 1
            child.started.append(name)
            child.started_at = time.monotonic()
            child.steps[name] = self._stats[name].get("steps")
            self._stats[name].set("heartbeat", 0)
            self._send(name, {"op": "start", "arguments": self._birth(node, index, child.incarnation)})

    def _birth(self, node: str, index: int, incarnation: int) -> dict[str, Any]:
        newest = self.session.newest()
        return {"node": node, "index": index, "incarnation": incarnation, "newest": str(newest) if newest else None,
                "wishes": self.wishes(instance_name(node, index))}

    def _start(self, child: Child) -> None:
        members = [(n, i) for n, i in child.place.members if instance_name(n, i) in self.running]
        child.started = [instance_name(n, i) for n, i in members]
        child.ready.clear()
        child.incarnation += 1
        child.again_at, child.hung, child.emptied, child.started_at = None, "", False, time.monotonic()
        child.steps = {name: self._stats[name].get("steps") for name in child.started}
        for name in child.started:
            self._stats[name].set("heartbeat", 0)
        title = " + ".join(" ".join(name.rsplit("-", 1)) for name in child.started)
        order = {"op": "spawn", "place": child.place.name, "births": [self._birth(n, i, child.incarnation) for n, i in members],
                 "log": str(self.log_dir.absolute() / f"{child.place.name}.log"), "title": f"shoal: {title}",
                 "threads": max(self.program.nodes[n].compute_threads for n, _ in members)}
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

    # ------------------------------------------------------------------ the loop
    def run(self) -> None:
        first = [(node.name, index) for node in self.program.nodes.values() for index in range(node.start)]
        for node, index in first:
            self.enrol(node, index)
            self.membership(node, index, alive=True)  # barriers wait for all that begin together
        for node, index in first:
            self._spawn(node, index)
        self.session.begin(self)
        while self.reason is None:
            self.turn()
            self.session.tick(self)

    def turn(self) -> None:
        for key, _ in self.selector.select(TICK_SECONDS):
            if key.data is None:
                self._hear_nursery()
            else:
                self._hear(key.data)
        now = time.monotonic()
        for child in self.children.values():
            if child.again_at is not None and now >= child.again_at and not self.ending:
                self._start(child)
            elif child.pidfd is not None and not child.hung and (why := self._hangs(child, now)):
                child.hung = why
                child.kill()

    def _hangs(self, child: Child, now: float) -> str:
        """Why a place is taken for hung. A heartbeat of 0 means that it starts or makes its first step."""
        beats = [self._stats[name].get("heartbeat") for name in child.started]
        if not beats:
            return ""
        if 0.0 in beats:
            limit = self.faults.start_seconds
            return f"not started within {limit:g} s" if now - child.started_at > limit else ""
        last = min(beats) if child.place.threads else max(beats)  # in one loop any role's life is that of all
        limit = self.faults.hang_seconds
        return f"no sign of life for {limit:g} s" if now - last > limit else ""

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

    def _take(self, child: Child, message: dict[str, Any]) -> None:
        name = message["from"]
        if message["kind"] == "ready":
            child.ready.add(name)
            node, index = name.rsplit("-", 1)
            if name in self.running:
                self.membership(node, int(index), alive=True)
        elif message["kind"] == "error":
            child.last_error, child.summary = message["traceback"], message["summary"]
        elif message["kind"] == "done" and message["op"] == "drain":
            child.started.remove(name)
            child.emptied = not child.started
        self.receive(name, message)

    def _deafen(self, child: Child) -> None:
        if child.listening and child.line is not None:
            self.selector.unregister(child.line)
            child.listening = False

    def _hear_nursery(self) -> None:
        try:
            data = self.nursery.socket.recv(1 << 16)
        except ConnectionResetError:
            return  # what it said before is still to be read
        if not data:
            self._nursery_died()
            return
        message = json.loads(data)
        if message["kind"] == "up":
            self.nursery.up = True
            return
        child = self.children[message["place"]]
        if message["kind"] == "spawned":
            child.pid = message["pid"]
            with contextlib.suppress(ProcessLookupError):  # it has come and gone
                child.pidfd = os.pidfd_open(message["pid"])
        elif message["kind"] == "exit":
            self._ended(child, message["code"])

    def _nursery_died(self) -> None:
        """Its children die with it (PDEATHSIG). See that they are gone, start another one, and all of them again."""
        self.selector.unregister(self.nursery.socket)
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
                self._ended(child, -signal.SIGKILL, "the fork server died")

    # ------------------------------------------------------------------ deaths
    def _ended(self, child: Child, code: int, cause: str = "") -> None:
        """A place has ended and is reaped: take its membership back, decide whether it comes again."""
        self._hear_last_words(child)
        lost, child.started = child.started, []
        for name in lost:
            node, index = name.rsplit("-", 1)
            self._stats[name].set("alive", 0)
            self.membership(node, int(index), alive=False)
        if child.pidfd is not None:
            os.close(child.pidfd)
        child.pid = child.pidfd = None
        for name in lost:
            self.forget(name)
        wanted = [name for name in (instance_name(n, i) for n, i in child.place.members) if name in self.running]
        if self.ending or not wanted or child.line is not None:
            return  # the end of everything, or drained; or a drained one was asked for again just now
        if code == 0 and child.emptied:
            child.again_at = time.monotonic()  # all were drained, and some are wanted again
            return
        for name in lost:
            if name in self.running:
                self._stats[name].add("restarts")
        self._judge(child, lost, code, cause)

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

    def _judge(self, child: Child, lost: list[str], code: int, cause: str) -> None:
        """Its own failures are counted; deaths by a signal from outside are restarted without limit."""
        now, who = time.monotonic(), child.place.name
        if any(self._stats[name].get("steps") > child.steps[name] for name in lost):
            child.deaths = child.fruitless = child.unborn = 0
        outside = -code in OUTSIDE and not child.hung
        child.deaths += 1
        child.fruitless += not outside
        if not cause:  # else the fork server died, and took it along
            child.unborn = child.unborn + 1 if outside and not child.ready else 0
        if not outside and not child.hung:
            child.errors.append(now)
        while child.errors and now - child.errors[0] > 60:
            child.errors.popleft()
        cause = cause or child.hung or (f"killed by {signal.Signals(-code).name}" if code < 0 else "") or child.summary \
            or f"exit code {code}"
        why = ""
        if len(child.errors) >= self.faults.exceptions_per_minute:
            why = f"failed {len(child.errors)} times within a minute"
        elif child.fruitless >= self.faults.deaths_without_step:
            why = f"died {child.fruitless} times without completing a step"
        elif child.unborn >= UNBORN_DEATHS:
            why = f"was killed {child.unborn} times before it could start (is there enough memory?)"
        if why:
            log = self.log_dir / f"{who}.log"
            raise RoleFailed(f"{who} {why}, last: {cause}\n{child.last_error or '(it left no traceback)'}\nits log: {log}")
        child.again_at = now + BACKOFF_SECONDS[min(child.deaths - 1, len(BACKOFF_SECONDS) - 1)]
        times = int(max(self._stats[name].get("restarts") for name in lost))
        self.event("restart", who, f"{cause}; restarted ({times} so far)")

    # ------------------------------------------------------------------ ending
    def settle(self, seconds: float) -> None:
        """Go on until every command has been answered (a last checkpoint), at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while self._waiting and time.monotonic() < deadline:
            self.turn()

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
                self._answered(identity, None, Gone("the run is over"))
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
        if not self._lent:
            self.nursery.close()
        elif strays or self.nursery.process.poll() is not None:
            self.nursery.restart()  # whatever is left there belongs to nobody
        else:
            self.nursery.forget()
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
    supervisor = LocalSupervisor(program, session, log_dir, faults or Faults(), nursery)
    error: str | None = None
    try:
        supervisor.run()
    except KeyboardInterrupt:
        supervisor.stop("interrupt")
    except BaseException as failure:
        supervisor.stop("failure")
        error = f"{type(failure).__name__}: {failure}"
        raise
    finally:
        supervisor.ending = True
        try:
            session.end(supervisor, supervisor.reason or "failure", error)
        finally:
            supervisor.close()
    return supervisor.reason or "failure"
