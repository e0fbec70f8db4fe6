"""The inline runtime: one process, one thread, deterministic. The debugger's and the tests' runtime.

Ready roles are resumed in a fixed order, that of drawing. When none is ready and no deadline is set, nobody ever will
be: that is an error that names what each role waits for.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from shoal.errors import Deadlock
from shoal.runtime.control import ControlHandle
from shoal.runtime.instance import Instance, instance_name
from shoal.runtime.program import Program
from shoal.runtime.supervisor import Session, Supervisor
from shoal.slots import Inline

__all__ = ["run_inline"]


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

    def _spawn(self, node: str, index: int) -> None:
        name = instance_name(node, index)
        replies = self._replies[name] = {}

        def emit(message: dict[str, Any]) -> None:
            self.receive(name, message)

        incarnation = self._lives[name] = self._lives.get(name, -1) + 1
        self.running[name] = (node, index)
        self.instances[name] = Instance(self.program, node, index, incarnation, emit,
                                        lambda: ControlHandle(emit, replies, ()), self.session.newest())
        self.membership(node, index, alive=True)

    def run(self) -> str:
        for node in self.program.nodes.values():
            for index in range(node.start):
                self._spawn(node.name, index)
        self.session.begin(self)
        while self.reason is None:
            self.round()
            self.session.tick(self)
        return self.reason

    def round(self) -> None:
        """Give every ready role one turn."""
        turned = False
        for name in self._order:
            instance = self.instances.get(name)
            if instance is None:
                continue
            if instance.commands:
                instance.obey()
                turned = True
                if instance.drained:
                    instance.close()
                    del self.instances[name]
                    continue
            if instance.runnable():
                instance.advance()
                turned = True
            if self.reason is not None:
                return
        if not turned:
            self._sleep()

    def _sleep(self) -> None:
        waits = [instance.wait for instance in self.instances.values() if instance.wait is not None]
        deadlines = [wait.deadline for wait in waits if wait.deadline is not None]
        if not deadlines:
            asleep = "; ".join(f"{name} waits for {i.wait.why if i.wait else 'its resumption'}" for name, i in self.instances.items())
            raise Deadlock(f"every role waits and none can be resumed: {asleep}")
        time.sleep(max(0.0, min(deadlines) - time.monotonic()))

    def settle(self, seconds: float) -> None:
        """Go on until every command has been answered (a last checkpoint), at most for `seconds`."""
        deadline = time.monotonic() + seconds
        self.reason, reason = None, self.reason
        try:
            while self._waiting and time.monotonic() < deadline and self.reason is None:
                self.round()
        except Deadlock:
            pass  # nobody will get further; what was answered was answered
        self.reason = reason


def run_inline(program: Program, session: Session, log_dir: Path | None = None, faults: Any = None) -> str:
    """Run a program until its session or one of its roles stops it; returns the reason."""
    supervisor = InlineSupervisor(program, session)
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
        session.end(supervisor, supervisor.reason or "failure", error)
        for instance in supervisor.instances.values():
            instance.close()
    return supervisor.reason or "failure"
