"""What runs in a place: its roles' loop. Sleeps in one poll() over the wires' descriptors and the supervisor's socket."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from shoal.core import Wait
from shoal.runtime.control import ControlHandle
from shoal.runtime.instance import Instance, instance_name
from shoal.runtime.program import Program

__all__ = ["run_place"]

HEARTBEAT_SECONDS = 0.5


class Line:
    """The socket to the supervisor: whole messages, safe to use from several threads, safe to be killed at."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self.fd = connection.fileno()
        self._lock = threading.Lock()  # between the threads of this process only

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with self._lock:
            while True:
                try:
                    self._socket.send(data)
                    return
                except BlockingIOError:
                    select.select([], [self._socket], [], 1.0)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when there is none; a stop when the supervisor is gone."""
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return None
        return json.loads(data) if data else {"op": "stop"}


class Loop:
    """Drives some of a place's roles in one thread."""

    def __init__(self, instances: list[Instance], fds: tuple[int, ...]) -> None:
        self.instances = instances
        self.stopping = False
        self._fds = fds
        self._poll = select.poll()
        self._registered: set[int] = set()
        self._booked = 0.0

    def turn(self) -> bool:
        """Give every ready role one turn; false when all wait."""
        turned = False
        for instance in self.instances:
            if instance.commands:
                instance.obey()
            if instance.runnable():
                instance.advance()
                turned = True
        now = time.monotonic()
        if now - self._booked > HEARTBEAT_SECONDS / 2:
            self._booked = now
            for instance in self.instances:
                instance.account()
                instance.stats.set("heartbeat", now)
        return turned

    def sleep(self) -> None:
        waits = [instance.wait for instance in self.instances if instance.wait is not None]
        wanted = {fd for wait in waits for fd in wait.fds}.union(self._fds)
        for fd in wanted - self._registered:
            self._poll.register(fd, select.POLLIN)
        for fd in self._registered - wanted:
            self._poll.unregister(fd)
        self._registered = wanted
        self._poll.poll(1000 * self._patience(waits))

    @staticmethod
    def _patience(waits: list[Wait]) -> float:
        deadlines = [wait.deadline for wait in waits if wait.deadline is not None]
        return max(0.0, min([HEARTBEAT_SECONDS, *(deadline - time.monotonic() for deadline in deadlines)]))

    def drained(self) -> bool:
        return all(instance.drained for instance in self.instances)


class PlaceProcess:
    """A place in its own process."""

    def __init__(self, program: Program, place: str, incarnation: int, newest: Path | None, line: Line, started: list[str]) -> None:
        self._line = line
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK)
        self._replies: dict[str, dict[int, Any]] = {}
        self._instances: dict[str, Instance] = {}
        self._threads = program.places[place].threads
        for node, index in program.places[place].members:
            if instance_name(node, index) in started:
                self._make(program, node, index, incarnation, newest)

    def _make(self, program: Program, node: str, index: int, incarnation: int, newest: Path | None) -> None:
        name = instance_name(node, index)
        replies = self._replies[name] = {}

        def emit(message: dict[str, Any]) -> None:
            self._line.send({**message, "from": name})

        fds = (self._wake_read,) if self._threads else (self._line.fd,)
        control = ControlHandle(emit, replies, fds)
        self._instances[name] = Instance(program, node, index, incarnation, emit, lambda: control, newest)

    def _hear(self) -> bool:
        """Take what the supervisor says; false when it says stop."""
        while (message := self._line.receive()) is not None:
            if message["op"] == "stop":
                return False
            name = message["to"]
            if message["op"] == "reply":
                self._replies[name][message["id"]] = message["arguments"]["error"]
            else:
                self._instances[name].commands.append(message)
            if self._threads:
                os.write(self._wake_write, b"!")
        return True

    def run(self) -> None:
        try:
            if self._threads:
                self._run_threads()
            else:
                self._run_loop()
        finally:
            for instance in self._instances.values():
                instance.close()

    def _run_loop(self) -> None:
        loop = Loop(list(self._instances.values()), (self._line.fd,))
        quiet = 0
        while not loop.drained():
            turned = loop.turn()
            # The socket is asked when all roles wait, and now and then while they do not.
            quiet = 0 if not turned else quiet + 1
            if (not turned or quiet % 16 == 0) and not self._hear():
                return
            if not turned and not any(instance.commands for instance in loop.instances):
                loop.sleep()
            elif not turned and not any(i.commands and i.settled() for i in loop.instances):
                loop.sleep()

    def _run_threads(self) -> None:
        failures: list[BaseException] = []
        loops = [Loop([instance], (self._wake_read,)) for instance in self._instances.values()]

        def drive(loop: Loop) -> None:
            try:
                while not loop.stopping and not loop.drained():
                    if not loop.turn():
                        loop.sleep()
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=drive, args=(loop,), daemon=True) for loop in loops]
        for thread in threads:
            thread.start()
        listening = select.poll()
        listening.register(self._line.fd, select.POLLIN)
        while any(thread.is_alive() for thread in threads) and not failures:
            listening.poll(1000 * HEARTBEAT_SECONDS)
            if not self._hear():
                break
        for loop in loops:
            loop.stopping = True
        os.write(self._wake_write, b"!")
        for thread in threads:
            thread.join(timeout=5)
        if failures:
            raise failures[0]


def run_place(program: Program, place: str, incarnation: int, newest: Path | None, connection: socket.socket, started: list[str]) -> int:
    """The life of a place; returns its exit code."""
    line = Line(connection)
    try:
        PlaceProcess(program, place, incarnation, newest, line, started).run()
    except BaseException as failure:
        text = traceback.format_exc()
        print(text, flush=True)
        line.send({"kind": "error", "from": started[0], "traceback": text[-20000:], "summary": f"{type(failure).__name__}: {failure}"})
        return 1
    return 0
