"""The inline runtime: one process, one thread, deterministic. The debugger's and the tests' runtime.

Ready roles are resumed in a fixed order, that of drawing. When none is ready and no deadline is set, nobody ever will
be: that is an error that names what each role waits for. A role's own exception is raised as it is.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from shoal.errors import Deadlock
from shoal.runtime.control import ControlHandle
from shoal.runtime.instance import Instance, instance_name
from shoal.runtime.program import Program
from shoal.runtime.supervisor import Gone, Session, Supervisor, supervised
from shoal.slots import Inline

__all__ = ["run_inline"]

TICK_SECONDS = 0.1


class InlineSupervisor(Supervisor):
    def __init__(self, program: Program, session: Session) -> None:
        program.build(Inline())
        super().__init__(program, session)
        self.instances: dict[str, Instance] = {}
        self._replies: dict[str, dict[int, Any]] = {}
        self._order = [instance_name(node, index) for node, index in program.instances()]
        self._lives: dict[str, int] = {}

    def _send(self, instance: str, command: dict[str, Any]) -> None:
        if command["op"] == "reply":
            self._replies[instance][command["id"]] = command["arguments"]["error"]
        elif instance in self.instances:
            self.instances[instance].commands.append(command)
        else:
            self._answered(command["id"], None, Gone(f"{instance} is not running"))

    def _spawn(self, node: str, index: int) -> None:
        name = instance_name(node, index)
        if name in self.instances:
            return  # it is still being drained, and started again after that
        replies = self._replies[name] = {}

        def emit(message: dict[str, Any]) -> None:
            self.receive(name, message)

        incarnation = self._lives[name] = self._lives.get(name, -1) + 1
        control = ControlHandle(emit, replies, incarnation)
        self.instances[name] = Instance(self.program, node, index, incarnation, emit, lambda: control, self.session.newest(),
                                        self.wishes(name))
        self.membership(node, index, alive=True)

    def run(self) -> None:
        first = [(node.name, index) for node in self.program.nodes.values() for index in range(node.start)]
        for node, index in first:
            self.enrol(node, index)
        for node, index in first:
            self._spawn(node, index)
        self.session.begin(self)
        while self.reason is None:
            self.round()
            self.session.tick(self)

    def round(self) -> None:
        """Give every ready role one turn."""
        turned = False
        for name in self._order:
            instance = self.instances.get(name)
            if instance is None:
                continue
            if instance.commands and instance.obey():
                turned = True
            if instance.drained:
                del self.instances[name]
                instance.leave()
            elif instance.runnable():
                instance.advance()
                turned = True
            if self.reason is not None:
                return
        if not turned:
            self._sleep()

    def _sleep(self) -> None:
        """Until a deadline; a short while if somebody above may yet resume or drain a role; else nothing will ever happen."""
        waits = [instance.wait for instance in self.instances.values() if instance.wait is not None]
        deadlines = [wait.deadline for wait in waits if wait.deadline is not None]
        patient = any(i.paused or any(c["op"] == "drain" for c in i.commands) for i in self.instances.values())
        if not deadlines and not patient:
            asleep = "; ".join(f"{name} waits for {i.wait.why if i.wait else 'nothing'}" for name, i in self.instances.items())
            raise Deadlock(f"every role waits and none can be resumed: {asleep or 'there is no role left'}")
        time.sleep(max(0.0, min([TICK_SECONDS, *(deadline - time.monotonic() for deadline in deadlines)])))

    def settle(self, seconds: float) -> None:
        """Go on until every command has been answered (a last checkpoint), at most for `seconds`."""
        deadline = time.monotonic() + seconds
        self.reason, reason = None, self.reason
        with contextlib.suppress(Deadlock):  # nobody will get further; what was answered was answered
            while self._waiting and time.monotonic() < deadline and self.reason is None:
                self.round()
        self.reason = reason

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.program.release)
            for instance in self.instances.values():
                stack.callback(instance.close)


def run_inline(program: Program, session: Session) -> str:
    """Run a program until its session or one of its roles stops it; returns the reason."""
    return supervised(InlineSupervisor(program, session), session)
