"""What runs in a place: the loop of its roles. It sleeps in one poll() over the wires' descriptors and the supervisor's socket."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.core import Wait
from shoal.runtime.control import ControlHandle
from shoal.runtime.instance import Instance
from shoal.runtime.program import Program

__all__ = ["InstanceStart", "PlaceProcess", "SupervisorConnection", "SupervisorSocket", "report", "run_place"]

HEARTBEAT_SECONDS = 0.5
HEAR_SECONDS = 0.02      # how often a place that never waits looks for commands of the supervisor
SWITCH_SECONDS = 0.0005  # after which a thread gives way to others; Python's 5 ms would hold up a server
THREAD_SECONDS = 4.0     # how long threads may take to finish their steps when the place is stopped


@dataclass(frozen=True)
class InstanceStart:
    """One instance that a place is to start."""

    node: str
    index: int
    incarnation: int
    newest: str | None
    kept_settings: dict[str, Any]


def json_numbers(value: Any) -> Any:
    """Numbers and arrays of NumPy, for JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be sent through the control handle; use numbers, strings or lists")


class SupervisorConnection(Protocol):
    """Carries whole messages between a place and its supervisor."""

    fd: int  # readable when there is something to receive

    def send(self, message: dict[str, Any]) -> None: ...
    def receive(self) -> dict[str, Any] | None: ...


class SupervisorSocket:
    """The socket to the supervisor: whole messages; several threads may use it, and a kill at any moment tears none."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self.fd = connection.fileno()
        self._lock = threading.Lock()  # between the threads of this process only
        self._room = select.poll()
        self._room.register(self.fd, select.POLLOUT)

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, default=json_numbers).encode()
        with self._lock:
            while True:
                try:
                    self._socket.send(data)
                    return
                except BlockingIOError:
                    self._room.poll(1000)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when there is none; "stop" when the supervisor is gone."""
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        message: dict[str, Any] = json.loads(data) if data else {"op": "stop"}
        return message


class RoleLoop:
    """Drives some of a place's roles in one thread. `rouse` wakes it from another thread."""

    def __init__(self, fds: tuple[int, ...] = ()) -> None:
        self.instances: list[Instance] = []
        self.failed: str | None = None  # the role whose exception ended the loop
        self.stopping = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._own = {self.fd, *fds}
        self._poll = select.poll()
        self._registered: set[int] = set()
        self._booked = 0.0

    def turn(self) -> bool:
        """Give every ready role one turn; false when all wait."""
        turned = False
        for instance in list(self.instances):
            self.failed = instance.name  # unless we come back
            if instance.commands and instance.obey():
                turned = True
            if instance.drained:
                self.instances.remove(instance)
                instance.leave()
            elif instance.runnable():
                instance.advance()
                turned = True
        self.failed = None
        now = time.monotonic()
        if now - self._booked > HEARTBEAT_SECONDS / 2:
            self._booked = now
            for instance in self.instances:
                instance.account(now)
        return turned

    def rouse(self) -> None:
        os.eventfd_write(self.fd, 1)

    def sleep(self) -> None:
        """Sleep until something that a role waits for may have come, or it is time for a heartbeat."""
        waits = [instance.wait for instance in self.instances if instance.wait is not None]
        wanted = {fd for wait in waits for fd in wait.fds}.union(self._own)
        for fd in wanted - self._registered:
            self._poll.register(fd, select.POLLIN)
        for fd in self._registered - wanted:
            self._poll.unregister(fd)
        self._registered = wanted
        for fd, _ in self._poll.poll(1000 * self._patience(waits)):
            if fd == self.fd:
                os.eventfd_read(fd)  # or it would never sleep again

    @staticmethod
    def _patience(waits: list[Wait]) -> float:
        deadlines = [wait.deadline for wait in waits if wait.deadline is not None]
        return max(0.0, min([HEARTBEAT_SECONDS, *(deadline - time.monotonic() for deadline in deadlines)]))


class PlaceProcess:
    """A place in its own process: one loop for all roles, or a thread with a loop for each."""

    def __init__(self, program: Program, place: str, line: SupervisorConnection) -> None:
        self._program, self._line, self._threaded = program, line, program.places[place].threads
        self._replies: dict[str, dict[int, Any]] = {}
        self._living: dict[str, tuple[Instance, RoleLoop]] = {}
        self._threads: dict[threading.Thread, RoleLoop] = {}
        self._failures: list[tuple[str | None, BaseException]] = []  # of threads: a role and its exception
        self._main = RoleLoop((line.fd,))

    def _create(self, start: InstanceStart) -> None:
        name = f"{start.node}-{start.index}"
        loop = RoleLoop() if self._threaded else self._main
        replies: dict[int, Any] = {}

        def emit(message: dict[str, Any]) -> None:
            self._line.send({**message, "from": name})

        control = ControlHandle(emit, replies, start.incarnation)  # its replies wake the loop
        newest = Path(start.newest) if start.newest else None
        self._main.failed = name  # unless we come back
        instance = Instance(self._program, start.node, start.index, start.incarnation, emit, control, newest,
                            start.kept_settings, saves_aside=True)
        self._main.failed = None
        loop.instances.append(instance)
        self._replies[name], self._living[name] = replies, (instance, loop)

    def rouse(self) -> None:
        """Something that a role waits for may have come; may be called from any thread."""
        for loop in [self._main, *list(self._threads.values())]:
            loop.rouse()

    @property
    def failed(self) -> str | None:
        """The role whose exception ended this place."""
        return self._failures[0][0] if self._failures else self._main.failed

    def _hear(self) -> bool:
        """Take the messages of the supervisor; false when it says stop."""
        while (message := self._line.receive()) is not None:
            if message["op"] == "stop":
                return False
            name = message["to"]
            if message["op"] == "start":
                self._create(InstanceStart(**message["arguments"]))
                self._start_threads()
            elif message["op"] == "reply":
                self._replies[name][message["id"]] = message["arguments"]
                self._living[name][1].rouse()
            else:
                self._living[name][0].commands.append(message)
                self._living[name][1].rouse()
        return True

    def run(self, starts: list[InstanceStart]) -> None:
        try:
            for start in starts:
                self._create(start)
            if self._threaded:
                self._run_threads()
            else:
                self._run_loop()
        finally:
            busy = {id(loop) for thread, loop in self._threads.items() if thread.is_alive()}
            for _, loop in self._living.values():
                for instance in loop.instances if id(loop) not in busy else ():
                    instance.close()
                loop.instances = []

    def _run_loop(self) -> None:
        loop, heard = self._main, 0.0
        while loop.instances:
            turned = loop.turn()
            now = time.monotonic()
            if not turned or now - heard > HEAR_SECONDS:
                heard = now
                if not self._hear():
                    return
            if not turned:
                loop.sleep()  # wakes at once if a message has just come

    # ------------------------------------------------------------------ a thread for each role
    def _start_threads(self) -> None:
        driven = {id(loop) for loop in self._threads.values()}
        for _, loop in self._living.values():
            if self._threaded and loop.instances and id(loop) not in driven:
                thread = threading.Thread(target=self._drive, args=(loop,), daemon=True)
                self._threads[thread] = loop
                thread.start()

    def _drive(self, loop: RoleLoop) -> None:
        try:
            while loop.instances and not loop.stopping:
                if not loop.turn():
                    loop.sleep()
        except BaseException as failure:
            self._failures.append((loop.failed, failure))
        finally:
            self._main.rouse()

    def _run_threads(self) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        self._start_threads()
        while any(thread.is_alive() for thread in self._threads) and not self._failures and self._hear():
            self._main.sleep()
        for loop in self._threads.values():
            loop.stopping = True
            loop.rouse()
        deadline = time.monotonic() + THREAD_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if self._failures:
            raise self._failures[0][1]


def run_place(process: PlaceProcess, line: SupervisorConnection, starts: list[InstanceStart]) -> int:
    """Run a place until its end; returns its exit code."""
    try:
        process.run(starts)
    except BaseException as failure:
        report(line, process.failed or f"{starts[0].node}-{starts[0].index}", failure)
        return 1
    return 0


def report(line: SupervisorConnection, name: str, failure: BaseException) -> None:
    """Write a traceback to the log, and send it to the supervisor."""
    text = "".join(traceback.format_exception(failure))
    with contextlib.suppress(OSError):  # a full disk
        sys.stderr.write(text)
        sys.stderr.flush()
    summary = f"{type(failure).__name__}: {failure}"[:2_000]
    line.send({"kind": "error", "from": name, "traceback": text[-20_000:], "summary": summary})
