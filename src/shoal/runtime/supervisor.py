"""What the supervisors of all runtimes do: membership, commands, checkpoints, counters, events. They compute nothing themselves."""

from __future__ import annotations

import itertools
import math
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import ProgramError, RoleFailed
from shoal.options import Options, number
from shoal.runtime.checkpointing import CheckpointRequest
from shoal.runtime.instance import instance_name
from shoal.runtime.permits import Ask, Permits
from shoal.runtime.program import Program, RoleNode
from shoal.runtime.replies import NotRunning, OnReply, after_all

__all__ = ["Faults", "NotRunning", "Session", "Supervisor", "supervised"]


class Session(Protocol):
    """What drives a run from above: the experiment. The supervisor calls `tick` about ten times a second."""

    def begin(self, control: Supervisor) -> None: ...
    def tick(self, control: Supervisor) -> None: ...
    def save_soon(self) -> bool: ...  # checkpoint as soon as possible; False: this session saves nothing
    def saved(self, folder: Path, ok: bool) -> None: ...
    def newest(self, instance: str | None = None) -> Path | None: ...  # of an instance: one whose file of it is not damaged
    def end(self, control: Supervisor, reason: str, error: str | None) -> None: ...


@dataclass(frozen=True)
class Faults(Options):
    """When to replace a role, and when to give up the run."""

    section = "faults"

    hang_seconds: float = number(60.0, at_least=1, infinite=True)
    """Seconds without a sign of life after which a role is killed and restarted."""
    exceptions_per_minute: int = number(3, at_least=1)
    """Exceptions of one role within a minute that end the run."""
    deaths_without_step: int = number(3, at_least=1)
    """Failures of one role in a row, without a completed step between them, that end the run."""
    start_seconds: float = number(600.0, at_least=1, infinite=True)
    """Seconds that a role may take to start and to complete its first step (compilation) before it counts as hung."""


class Supervisor(ABC):
    """Controls a running program. A runtime implements the abstract methods."""

    def __init__(self, program: Program, session: Session) -> None:
        self.program, self.session = program, session
        self.reason: str | None = None
        self.ending = False  # if true, nothing is restarted and nothing fails the run
        self.running: dict[str, tuple[str, int]] = {}  # instance -> (node, replica): those that should be alive
        self.stateful: set[str] = set()
        self.sharing: dict[str, bool] = {}  # node -> whether its replicas share one state, once one of them has said so
        self._heard: set[str] = set()  # instances that have said that they are ready
        self._finished: set[str] = set()  # instances that have reached their goal
        self._members: set[tuple[str, int]] = set()  # the instances that wires count as alive
        self._stats = {instance_name(n, i): program.stats(n, i) for n, i in program.instances()}
        self._events: deque[dict[str, Any]] = deque()
        self._waiting: dict[int, tuple[str, OnReply]] = {}  # command id -> (instance, what to do with its reply)
        self._unbalanced: set[str] = set()  # wires that were found to have lost a slot
        self._awaiting_start: dict[str, list[OnReply]] = {}  # instance -> callbacks for when it is ready
        self.absent: dict[str, bool] = {}  # instances not running at the last checkpoint -> whether an event said so
        first = [instance_name(n, i) for n, i in program.instances()] if program.starts_paused else []
        self._kept_back = set(first)  # until `start_steps`, unless they are paused by somebody else
        self._paused = set(first)  # these two outlive an instance's incarnations
        self._values: dict[str, dict[str, Any]] = {}
        self._settings: dict[str, Any] = {}  # what `change` has changed
        self._savers: list[Callable[[], None]] = []  # what waits for the next checkpoint
        self._identity = itertools.count(1)
        self.permits = {counter: Permits(most) for counter, most in program.limits.items()}

    # ------------------------------------------------------------------ what a runtime adds
    @abstractmethod
    def _send(self, instance: str, command: dict[str, Any]) -> None:
        """Pass a command to an instance; reply NotRunning at once if that is impossible."""

    @abstractmethod
    def _spawn(self, node: str, index: int) -> None:
        """Start an instance that is in `running`."""

    @abstractmethod
    def run(self) -> None:
        """Run until there is a reason to stop."""

    @abstractmethod
    def wait(self, until: Callable[[], bool], seconds: float) -> None:
        """Continue until `until()` is true, at most for `seconds`, whatever there may be a reason to stop for."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""

    # ------------------------------------------------------------------ reading
    def snapshot(self) -> dict[str, dict[str, float]]:
        return {name: stats.read() for name, stats in self._stats.items()}

    def total(self, counter: str) -> float:
        return sum(stats.get(counter) for stats in self._stats.values())

    def counted(self, counter: str) -> dict[str, float]:
        """What every instance has counted."""
        return {name: stats.get(counter) for name, stats in self._stats.items()}

    def starting(self) -> bool:
        """Whether no role has done any of the program's work yet."""
        return not any(self.total(counter) for counter in self.program.work_counters)

    def wires(self) -> dict[str, dict[str, float]]:
        """The numbers of every wire, and whether it never lost a slot; an event reports the first loss."""
        rows = {}
        for name, wire in self.program.wires.items():
            rows[name] = {**wire.numbers(), "conserved": float(wire.conserved() and name not in self._unbalanced)}
            self._check_conserved(name, rows[name])
        return rows

    def _check_conserved(self, wire: str, row: dict[str, float]) -> None:
        if not row["conserved"] and wire not in self._unbalanced:
            self._unbalanced.add(wire)
            self.event("unbalanced", wire, f"a slot was lost: written is not consumed + dropped + held ({row})")

    def surroundings(self) -> dict[str, float]:
        """Numbers of the machines: cores in use, nodes, object stores."""
        return {}

    def room(self, role: str) -> float:
        """How many more replicas of a role could be started now; infinite unless a runtime counts processors."""
        return math.inf

    def events(self) -> list[dict[str, Any]]:
        events = list(self._events)
        self._events.clear()
        return events

    def event(self, kind: str, role: str, text: str) -> None:
        self._events.append({"kind": kind, "role": role, "text": text})

    # ------------------------------------------------------------------ acting
    def stop(self, reason: str) -> None:
        self.reason = self.reason or reason

    def command(self, instance: str, op: str, done: OnReply | None = None, **arguments: Any) -> None:
        """Send an instance a command; it obeys between two steps."""
        identity = next(self._identity)
        self._waiting[identity] = (instance, done or (lambda result, error: None))
        self._send(instance, {"op": op, "id": identity, "arguments": arguments})

    def complete(self) -> bool:
        """Whether every instance that should run has been ready once: from then on checkpoints are complete."""
        return not self.unheard()

    def unheard(self) -> list[str]:
        """The instances that have not been ready yet."""
        return sorted(self.running.keys() - self._heard)

    def checkpoint(self, folder: Path) -> None:
        """Every stateful role writes its file into `folder`; then `session.saved` is called."""
        folder.mkdir(parents=True, exist_ok=True)
        savers, self._savers = self._savers, []

        def over(ok: bool) -> None:
            self.session.saved(folder, ok)
            for saver in savers:
                saver()

        if names := sorted(self.stateful & self.running.keys()):
            CheckpointRequest(self, folder, over).begin(names)
        else:
            over(False)

    def settle(self, seconds: float) -> None:
        """Continue until every command is answered (a last checkpoint), at most for `seconds`."""
        self.wait(lambda: not self._waiting, seconds)

    def start_steps(self) -> None:
        """Let roles begin that were kept back (`Program.starts_paused`)."""
        kept_back, self._kept_back = sorted(self._kept_back), set()
        for name in kept_back:
            self._paused.discard(name)
            if name in self.running:
                self.resume(name)

    def pause(self, role: str, done: OnReply | None = None) -> None:
        """Begin no other step until `resume`. Like `set`, it also applies to later incarnations."""
        names = self._named(role)
        self._kept_back.difference_update(names)  # only `resume` lets them continue
        self._tell(names, "pause", done, self._paused.add)

    def resume(self, role: str, done: OnReply | None = None) -> None:
        self._tell(self._named(role), "resume", done, self._paused.discard)

    def set(self, role: str, done: OnReply | None = None, **values: Any) -> None:
        def keep(name: str) -> None:
            self._values.setdefault(name, {}).update(values)

        self._tell(self._named(role), "set", done, keep, values=values)

    def change(self, values: Mapping[str, Any], done: OnReply | None = None) -> None:
        """Change shared settings (`Program.settings`) in all places; later incarnations begin with them."""
        if self.program.settings is None:
            raise ProgramError("the program has no settings that could be changed")
        self.program.settings.change(values)
        self._settings.update(values)
        self._tell(list(self.running), "change", done, lambda name: None, values=dict(values))

    def _tell(self, names: list[str], op: str, done: OnReply | None, keep: Callable[[str], object], **arguments: Any) -> None:
        """Send a setting to several instances; one that is just being restarted will start with it."""
        all_done = after_all(len(names), done or (lambda result, error: None))

        def told(name: str) -> OnReply:
            def done(result: Any, error: str | None) -> None:
                if not error or isinstance(error, NotRunning):
                    keep(name)
                    error = None
                all_done(result, error)

            return done

        for name in names:
            self.command(name, op, told(name), **arguments)

    def kept_settings(self, instance: str) -> dict[str, Any]:
        """The settings that an instance starts with."""
        return {"paused": instance in self._paused, "values": self._values.get(instance, {}), "settings": dict(self._settings)}

    def copy_state(self, source: str, target: str, done: OnReply | None = None) -> None:
        """The target takes over the source's state (parameters, optimiser moments, everything in `state()`)."""
        for name in (source, target):
            if name not in self.running:
                raise ProgramError(f"{name} is not running; running are {', '.join(self.running)}")
        then = done or (lambda result, error: None)
        folder = tempfile.TemporaryDirectory(prefix="shoal-copy-")

        def loaded(result: Any, error: str | None) -> None:
            folder.cleanup()
            then(result, error)

        def written(file: Any, error: str | None) -> None:
            if error or not file:
                loaded(None, error or f"{source} has no state to copy")
            else:
                self.command(target, "load", loaded, path=str(Path(folder.name) / file))

        self.command(source, "checkpoint", written, folder=folder.name)

    def scale(self, role: str, count: int, patience_seconds: float = 10.0, done: OnReply | None = None) -> None:
        """Start replicas, or drain the newest ones, until `count` run. A role that waits within its step for longer than
        `patience_seconds` is ended there. One with a state is saved first if none of it is left: later it continues from there."""
        node = self._node(role)
        if not node.least <= count <= node.most:
            raise ProgramError(f"{role} may have {node.least} to {node.most} replicas, not {count}")
        alive = sorted(index for name, index in self.running.values() if name == role)
        more = [i for i in range(node.most) if i not in alive][: max(0, count - len(alive))]
        less = list(reversed(alive))[: max(0, len(alive) - count)]
        if more or less:
            self.event("scale", role, f"{len(alive)} -> {count} replicas")
        all_done = after_all(len(more) + len(less), done or (lambda result, error: None))
        for index in more:
            self._awaiting_start.setdefault(instance_name(role, index), []).append(all_done)
            self.enrol(role, index)
            self._spawn(role, index)

        def drain() -> None:
            for index in less:
                self._drain(role, index, patience_seconds, all_done)

        if count or not any(instance_name(role, index) in self.stateful for index in less) or not self.session.save_soon():
            drain()
        else:
            self._savers.append(drain)

    def enrol(self, node: str, index: int) -> None:
        """From now on the graph has this instance."""
        self.running[instance_name(node, index)] = (node, index)
        self._enlist(node, index, True)

    def _enlist(self, node: str, index: int, here: bool) -> None:
        """Tell every wire of an instance that the graph now has it, or no longer has it."""
        for port in self.program.nodes[node].ports.values():
            port.wire.enlist(port.end, port.wire.member_number(port.end, node, index), here)

    def _drain(self, node: str, index: int, patience_seconds: float, then: OnReply) -> None:
        """Remove an instance from the graph; it ends between two steps."""
        name = instance_name(node, index)
        if self.running.pop(name, None) is None:
            then(None, None)  # it was drained in the meantime
            return

        def done(result: Any, error: str | None) -> None:
            self.membership(node, index, alive=False)
            self._paused.discard(name)
            self._values.pop(name, None)
            for waiting in self._awaiting_start.pop(name, []):
                waiting(None, None)  # it never started, and is no longer wanted
            if name in self.running:  # it was added again in the meantime
                self._spawn(node, index)
            else:
                self._enlist(node, index, False)
            then(result, None)

        self.command(name, "drain", done, patience_seconds=patience_seconds)

    # ------------------------------------------------------------------ bookkeeping
    def membership(self, node: str, index: int, alive: bool) -> None:
        """Tell every wire of an instance that it has started, or is dead and reaped."""
        if alive == ((node, index) in self._members):
            return
        (self._members.add if alive else self._members.discard)((node, index))
        for port in self.program.nodes[node].ports.values():
            port.wire.membership(port.end, port.wire.member_number(port.end, node, index), alive)

    def receive(self, instance: str, message: dict[str, Any]) -> None:
        """A message of an instance."""
        kind = message["kind"]
        if kind == "done":
            self._answered(message.get("id"), message.get("result"), message.get("error"))
        elif kind == "ready":
            self._heard.add(instance)
            if message["stateful"]:
                self.stateful.add(instance)
            self.sharing[instance.rpartition("-")[0]] = message["shares"]
            for done in self._awaiting_start.pop(instance, []):
                done(None, None)
        elif kind == "finish":
            self._finished.add(instance)
            if len(self._finished) >= self.program.finishers:
                self.stop(message["reason"])
        elif kind == "fatal":
            if not self.ending:  # it may repeat this while the run ends
                raise RoleFailed(f"{instance}: {message['text']}")
        elif kind == "note":
            self.event("note", instance, message["text"])
        elif kind == "control":
            self._requested(instance, message)

    def _answered(self, identity: int | None, result: Any, error: str | None) -> None:
        if identity in self._waiting:
            self._waiting.pop(identity)[1](result, error)

    def forget(self, instance: str) -> None:
        """Reply to all commands of a dead instance."""
        for identity in [k for k, (name, _) in self._waiting.items() if name == instance]:
            self._answered(identity, None, NotRunning(f"{instance} died"))

    def _requested(self, instance: str, message: dict[str, Any]) -> None:
        """A request of a coordinator; the reply is sent when it has been carried out."""
        requests: dict[str, Callable[..., None]] = {
            "scale": self.scale, "pause": self.pause, "resume": self.resume, "set": self.set, "copy_state": self.copy_state}
        op, arguments, values = message["op"], message["arguments"], message["values"]

        def reply(result: Any, error: str | None) -> None:
            self._send(instance, {"op": "reply", "id": message["id"], "arguments": {"error": error, "result": result}})

        try:
            if op == "permit":
                replicas = len(self._named(self.running[instance][0])) if instance in self.running else 1
                counter, units, counted, round_number = arguments
                ask = Ask(instance, units, counted, round_number, replicas, lambda allowed: reply(allowed, None))
                self.permits[counter].ask(ask)
                return
            if op not in requests:
                raise ProgramError(f"there is no control request {op!r}; there are {', '.join(requests)}")
            if op != "copy_state" and instance in self._named(arguments[0]):
                requests[op](*arguments, **values)  # it cannot obey while it waits for the reply
                reply(None, None)
            else:
                requests[op](*arguments, done=reply, **values)
        except ProgramError as error:
            reply(None, str(error))

    def _node(self, role: str) -> RoleNode:
        if role not in self.program.nodes:
            raise ProgramError(f"there is no role {role}; the roles are {', '.join(self.program.nodes)}")
        return self.program.nodes[role]

    def _named(self, role: str) -> list[str]:
        """The running instances of a role, or the one instance that is named."""
        if role in self.running:
            return [role]
        node = self._node(role)
        return [name for name, (kind, _) in self.running.items() if kind == node.name]


def supervised(supervisor: Supervisor, session: Session) -> str:
    """Run until a reason to stop; returns it. Whatever happens, `session.end` is called and everything is released."""
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
