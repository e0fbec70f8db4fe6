"""The inline runtime: one process, one thread, deterministic; for debugging and tests.

Ready roles are resumed in a fixed order, that of drawing. When no role is ready and none waits for a deadline, the program is
stuck: Deadlock names what each role waits for. A role's own exception is raised as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from shoal.errors import Deadlock
from shoal.runtime.control import ControlHandle
from shoal.runtime.instance import Instance, instance_name
from shoal.runtime.permits import Permits
from shoal.runtime.program import Program
from shoal.runtime.supervisor import NotRunning, Session, Supervisor, supervised
from shoal.slots import InlineAllocator

__all__ = ["run_inline"]

TICK_SECONDS = 0.1


class InlineSupervisor(Supervisor):
    def __init__(self, program: Program, session: Session) -> None:
        program.build(InlineAllocator())
        super().__init__(program, session)
        self.permits = {counter: Permits(most, ahead=False) for counter, most in program.limits.items()}
        self.instances: dict[str, Instance] = {}
        self._replies: dict[str, dict[int, Any]] = {}
        self._order = [instance_name(node, index) for node, index in program.instances()]
        self._lives: dict[str, int] = {}
        self._starting = False  # whether roles that were kept back begin with the next round

    def _send(self, instance: str, command: dict[str, Any]) -> None:
        if command["op"] == "reply":
            self._replies[instance][command["id"]] = command["arguments"]
        elif instance in self.instances:
            self.instances[instance].commands.append(command)
        else:
            self._answered(command["id"], None, NotRunning(f"{instance} is not running"))

    def _spawn(self, node: str, index: int) -> None:
        name = instance_name(node, index)
        if name in self.instances:
            return  # it is still being drained; it is started again after that
        replies = self._replies[name] = {}

        def emit(message: dict[str, Any]) -> None:
            self.receive(name, message)

        incarnation = self._lives[name] = self._lives.get(name, -1) + 1
        control = ControlHandle(emit, replies, incarnation)
        self.instances[name] = Instance(self.program, node, index, incarnation, emit, control, self.session.newest(),
                                        self.kept_settings(name))
        self.membership(node, index, alive=True)

    def run(self) -> None:
        first = self.program.first_instances()
        for node, index in first:
            self.enrol(node, index)
        for node, index in first:
            self._spawn(node, index)
        self.session.begin(self)
        while self.reason is None:
            self.round(self._look)
            self.session.tick(self)

    def start_steps(self) -> None:
        """With the next round: it may be called in the middle of one, and roles begin in their order."""
        self._starting = True

    def _look(self) -> bool:
        """Between two steps of a role that keeps its turn: see to stop conditions and checkpoints; whether it may continue."""
        self.session.tick(self)
        for instance in list(self.instances.values()):
            if instance.commands:
                instance.obey()
        return self.reason is None and self._within_its_share()

    def _within_its_share(self) -> bool:
        side = self.program.side_work
        if side is None:
            return True
        work = sum(self.total(counter) for counter in self.program.work_counters)
        return self.total(side.counter) <= side.free + side.share * work

    def round(self, look: Callable[[], bool] | None = None) -> None:
        """Give every ready role one turn. Without `look`, every turn is one step."""
        if self._starting:
            self._starting = False
            super().start_steps()
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
                while look is not None and instance.keeps_turn() and look():
                    instance.advance()
            if self.reason is not None:
                return
        if not turned:
            self._sleep()

    def _sleep(self) -> None:
        """Sleep until a deadline, or for a moment if a role may still be resumed or drained; otherwise the program is stuck."""
        waits = [instance.wait for instance in self.instances.values() if instance.wait is not None]
        deadlines = [wait.deadline for wait in waits if wait.deadline is not None]
        patient = any(i.paused or any(c["op"] == "drain" for c in i.commands) for i in self.instances.values())
        if not deadlines and not patient:
            if any([permits.reconcile(self.counted(counter)) for counter, permits in self.permits.items()]):
                return
            asleep = "; ".join(f"{name} waits for {i.wait.why if i.wait else 'nothing'}" for name, i in self.instances.items())
            raise Deadlock(f"every role waits and none can be resumed: {asleep or 'no role is left'}")
        time.sleep(max(0.0, min([TICK_SECONDS, *(deadline - time.monotonic() for deadline in deadlines)])))

    def wait(self, until: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.reason, reason = None, self.reason
        with contextlib.suppress(Deadlock):  # no role will get further; replies that came have been taken
            while not until() and time.monotonic() < deadline and self.reason is None:
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
