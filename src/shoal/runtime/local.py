"""The local runtime: places are processes on this machine. The parent is only a supervisor.

It makes all shared memory and pipes before any place exists, asks the fork server for places, hears from each through
a socket of its own, learns of deaths from the fork server, and restarts the dead. It never touches the data.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from shoal.errors import RoleFailed, ShoalError
from shoal.runtime.instance import instance_name
from shoal.runtime.program import Place, Program
from shoal.runtime.supervisor import Faults, Session, Supervisor
from shoal.slots import Local

__all__ = ["Nursery", "run_local"]

TICK_SECONDS = 0.1
BACKOFF_SECONDS = (0.0, 0.1, 0.5, 2.0)


class Nursery:
    """The supervisor's end of the fork server. Starting one early hides the time of its imports."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen([sys.executable, "-m", "shoal.runtime.forkserver", str(os.getpid()), str(theirs.fileno())],
                                        stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self.socket = mine
        assert self.process.stdin is not None
        paths = json.dumps([path or os.getcwd() for path in sys.path]).encode()
        self.process.stdin.write(struct.pack("<q", len(paths)) + paths)
        self.process.stdin.flush()  # and kept open: its end is the fork server's end

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        socket.send_fds(self.socket, [json.dumps(message).encode()], fds or [])

    def give(self, program: Program, medium: Local) -> None:
        """Pass on the descriptors of all wires, and the program itself."""
        numbers = medium.fds
        for start in range(0, len(numbers), 200):
            part = numbers[start : start + 200]
            self.send({"op": "descriptors", "numbers": part}, part)
        blob = cloudpickle.dumps(program)
        fd = os.memfd_create("shoal-program")
        os.write(fd, blob)
        self.send({"op": "program", "size": len(blob)}, [fd])
        os.close(fd)

    def close(self) -> None:
        self.socket.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()


@dataclass
class Child:
    """What the supervisor knows of a place's process."""

    place: Place
    incarnation: int = -1
    pid: int | None = None
    line: socket.socket | None = None
    started: list[str] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    queue: list[dict[str, Any]] = field(default_factory=list)  # commands for a process that is not there yet
    steps_at_start: float = 0.0
    fruitless: int = 0
    errors: deque[float] = field(default_factory=deque)
    last_error: str = ""
    summary: str = ""
    again_at: float | None = None
    hung: bool = False


class LocalSupervisor(Supervisor):
    def __init__(self, program: Program, session: Session, log_dir: Path, faults: Faults, nursery: Nursery | None) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.medium = Local()
        program.build(self.medium)
        super().__init__(program, session)
        self.log_dir, self.faults = log_dir, faults
        log_dir.mkdir(parents=True, exist_ok=True)
        self.children = {name: Child(place) for name, place in program.places.items()}
        self.selector = selectors.DefaultSelector()
        self.closing = False
        self._start_nursery(nursery)

    def _start_nursery(self, nursery: Nursery | None) -> None:
        self.nursery = nursery or Nursery()
        self.nursery.give(self.program, self.medium)
        self.selector.register(self.nursery.socket, selectors.EVENT_READ, None)

    # ------------------------------------------------------------------ starting
    def _spawn(self, node: str, index: int) -> None:
        """Start an instance: with its place, if that is not running yet."""
        name = instance_name(node, index)
        self.running[name] = (node, index)
        child = self.children[self.program.place_of(node, index).name]
        if child.line is None:
            self._start(child)
        elif name not in child.started:
            raise ShoalError(f"{name} lives in the place {child.place.name}, which is running without it; scale whole places")

    def _start(self, child: Child) -> None:
        members = [(n, i) for n, i in child.place.members if instance_name(n, i) in self.running]
        child.started = [instance_name(n, i) for n, i in members]
        child.ready.clear()
        child.incarnation += 1
        child.again_at, child.hung = None, False
        child.steps_at_start = sum(self._stats[name].get("steps") for name in child.started)
        for name in child.started:
            self._stats[name].set("heartbeat", 0)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        newest = self.session.newest()
        self.nursery.send({"op": "spawn", "place": child.place.name, "incarnation": child.incarnation, "started": child.started,
                           "newest": str(newest) if newest else None, "log": str(self.log_dir / f"{child.place.name}.log"),
                           "title": f"shoal: {' + '.join(' '.join(name.rsplit('-', 1)) for name in child.started)}",
                           "threads": max(self.program.nodes[n].compute_threads for n, _ in members)}, [theirs.fileno()])
        theirs.close()
        child.line = mine
        self.selector.register(mine, selectors.EVENT_READ, child)
        queued, child.queue = child.queue, []
        for command in queued:
            self._send(command["to"], command)

    def _send(self, instance: str, command: dict[str, Any]) -> None:
        node, index = instance.rsplit("-", 1)
        child = self.children[self.program.place_of(node, int(index)).name]
        if child.line is None:
            self._answered(command.get("id"), None, f"{instance} is not running")
            return
        try:
            child.line.send(json.dumps({**command, "to": instance}).encode())
        except OSError:
            pass  # it is dying; its death is reported by the fork server, and answers what waits for it

    # ------------------------------------------------------------------ the loop
    def run(self) -> None:
        for node in self.program.nodes.values():
            for index in range(node.start):
                self._spawn(node.name, index)
                self.membership(node.name, index, alive=True)  # barriers wait for all that begin together
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
            if child.again_at is not None and now >= child.again_at and not self.closing:
                self._start(child)
            elif child.pid is not None and not child.hung and self._hangs(child, now):
                child.hung = True
                self.event("hang", child.place.name, f"no progress for {self.faults.hang_seconds:.0f} s; replaced")
                os.kill(child.pid, signal.SIGKILL)

    def _hangs(self, child: Child, now: float) -> bool:
        """Start-up is exempt: a heartbeat counts from the first completed step on."""
        beats = [self._stats[name].get("heartbeat") for name in child.started]
        stepped = sum(self._stats[name].get("steps") for name in child.started) > child.steps_at_start
        return stepped and bool(beats) and now - max(beats) > self.faults.hang_seconds

    def _hear(self, child: Child) -> None:
        if child.line is None:
            return  # it was reaped in this very turn
        try:
            data = child.line.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self.selector.unregister(child.line)  # it has closed its end; the fork server will tell how it ended
            return
        message = json.loads(data)
        name = message["from"]
        if message["kind"] == "ready":
            child.ready.add(name)
            node, index = name.rsplit("-", 1)
            self.membership(node, int(index), alive=True)
        if message["kind"] == "error":
            child.last_error, child.summary = message["traceback"], message["summary"]
        self.receive(name, message)

    def _hear_nursery(self) -> None:
        try:
            data = self.nursery.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._nursery_died()
            return
        message = json.loads(data)
        child = self.children[message["place"]]
        if message["kind"] == "spawned":
            child.pid = message["pid"]
        elif message["kind"] == "exit":
            self._ended(child, message["code"])

    def _nursery_died(self) -> None:
        """Its children have died with it: start another, and all of them again."""
        self.selector.unregister(self.nursery.socket)
        self.nursery.close()
        if self.closing:
            return
        self.event("restart", "fork server", "the fork server died and is replaced")
        self._start_nursery(None)
        for child in self.children.values():
            if child.line is not None:
                self._ended(child, -signal.SIGKILL)

    # ------------------------------------------------------------------ deaths
    def _ended(self, child: Child, code: int) -> None:
        """A place has ended and is reaped: take its membership back, decide whether it comes again."""
        self._drain_line(child)
        members = [(n, i) for n, i in child.place.members if instance_name(n, i) in child.started]
        for node, index in members:
            name = instance_name(node, index)
            self._stats[name].set("alive", 0)
            self.membership(node, index, alive=False)
            self.forget(name)
        child.pid = None
        if self.closing or not any(name in self.running for name in child.started):
            return  # drained, or the whole program ends
        for name in child.started:
            self._stats[name].add("restarts")
        self._judge(child, code)

    def _drain_line(self, child: Child) -> None:
        """Hear its last words before it is forgotten."""
        if child.line is None:
            return
        while True:
            try:
                data = child.line.recv(1 << 20, socket.MSG_DONTWAIT)
            except OSError:
                break
            if not data:
                break
            message = json.loads(data)
            if message["kind"] == "error":
                child.last_error, child.summary = message["traceback"], message["summary"]
            self.receive(message["from"], message)
        if child.line in [key.fileobj for key in self.selector.get_map().values()]:
            self.selector.unregister(child.line)
        child.line.close()
        child.line = None

    def _judge(self, child: Child, code: int) -> None:
        now = time.monotonic()
        stepped = sum(self._stats[name].get("steps") for name in child.started) > child.steps_at_start
        child.fruitless = 0 if stepped else child.fruitless + 1
        who = child.place.name
        if code < 0:
            cause = f"killed by {signal.Signals(-code).name}"
        else:
            cause = child.summary or f"exit code {code}"
            child.errors.append(now)
            while now - child.errors[0] > 60:
                child.errors.popleft()
        log = self.log_dir / f"{who}.log"
        own = len(child.errors) >= self.faults.exceptions_per_minute
        if own or child.fruitless >= self.faults.deaths_without_step:
            why = f"failed {len(child.errors)} times within a minute" if own else f"died {child.fruitless} times without completing a step"
            raise RoleFailed(f"{who} {why}, last: {cause}\n{child.last_error or '(it left no traceback)'}\nits log: {log}")
        delay = BACKOFF_SECONDS[min(child.fruitless, len(BACKOFF_SECONDS) - 1)]
        child.again_at = now + delay
        times = int(self._stats[child.started[0]].get("restarts"))
        self.event("restart", who, f"{who}: {cause}; restarted ({times}{'st' if times == 1 else 'nd' if times == 2 else 'rd' if times == 3 else 'th'} time)")

    # ------------------------------------------------------------------ ending
    def settle(self, seconds: float) -> None:
        """Go on until every command has been answered (a last checkpoint), at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while self._waiting and time.monotonic() < deadline:
            self.turn()

    def close(self, patience_seconds: float = 5.0) -> None:
        """Stop every place: ask first, then kill; and give everything back."""
        self.closing = True
        for child in self.children.values():
            if child.line is not None:
                try:
                    child.line.send(json.dumps({"op": "stop"}).encode())
                except OSError:
                    pass  # already gone
        deadline = time.monotonic() + patience_seconds
        while any(child.pid is not None for child in self.children.values()) and time.monotonic() < deadline:
            self.turn()
        for child in self.children.values():
            if child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
            if child.line is not None:
                child.line.close()
        self.nursery.close()
        self.selector.close()
        self.medium.close()


def run_local(program: Program, session: Session, log_dir: Path, faults: Faults | None = None, nursery: Nursery | None = None) -> str:
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
        try:
            session.end(supervisor, supervisor.reason or "failure", error)
        finally:
            supervisor.close()
    return supervisor.reason or "failure"
