"""What all runtimes' supervisors do: membership, commands, checkpoints, counters, events. It computes nothing itself."""

from __future__ import annotations

import itertools
import math
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import ConfigError, ProgramError, RoleFailed
from shoal.runtime.answers import Done, Gone, after
from shoal.runtime.instance import instance_name
from shoal.runtime.program import Node, Program
from shoal.runtime.saving import Saving

__all__ = ["Faults", "Gone", "Session", "Supervisor", "supervised"]


class Session(Protocol):
    """What drives a run from above: the experiment."""

    def begin(self, control: Supervisor) -> None: ...
    def tick(self, control: Supervisor) -> None: ...
    def saved(self, folder: Path, ok: bool) -> None: ...
    def newest(self) -> Path | None: ...
    def end(self, control: Supervisor, reason: str, error: str | None) -> None: ...


@dataclass(frozen=True)
class Faults:
    """When to give up."""

    hang_seconds: float = 60.0
    """Seconds without a sign of life after which a role is replaced."""
    exceptions_per_minute: int = 3
    """Exceptions of one role's own within a minute that end the run."""
    deaths_without_step: int = 3
    """Failures of one role in a row, without a completed step between them, that end the run."""
    start_seconds: float = 600.0
    """Seconds that a role may take to start and to make its first step (compilation) before it counts as hung."""

    def validate(self) -> None:
        for name in ("exceptions_per_minute", "deaths_without_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"faults.{name}={getattr(self, name)} is not possible: the run would end without any; give "
                                  f"--faults.{name.replace('_', '-')} 1 or more")
        for name in ("hang_seconds", "start_seconds"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"faults.{name}={getattr(self, name)} is not possible: a role gives a sign of life every half "
                                  f"second; give --faults.{name.replace('_', '-')} 1 or more (inf: wait for ever)")


class Supervisor(ABC):
    """The control handle of a running program; what is abstract is what a runtime adds."""

    def __init__(self, program: Program, session: Session) -> None:
        self.program, self.session = program, session
        self.reason: str | None = None
        self.ending = False  # nothing is restarted any more, and nothing fails the run
        self.running: dict[str, tuple[str, int]] = {}  # instance -> (node, replica): those that should be alive
        self.stateful: set[str] = set()
        self.sharing: dict[str, bool] = {}  # node -> whether its replicas share one state, as they have said
        self._heard: set[str] = set()  # instances that have said that they are ready
        self._members: set[tuple[str, int]] = set()  # those whom the wires count on
        self._stats = {instance_name(n, i): program.stats(n, i) for n, i in program.instances()}
        self._events: deque[dict[str, Any]] = deque()
        self._waiting: dict[int, tuple[str, Done]] = {}  # command id -> (instance, what to do with its answer)
        self._unbalanced: set[str] = set()  # wires whose books were found not to balance
        self._births: dict[str, list[Done]] = {}  # instance -> who waits until it is ready
        self.absent: dict[str, bool] = {}  # instances that were not there at the last checkpoint, and whether that was said
        self._paused: set[str] = set()  # these two outlive an instance's incarnations
        self._values: dict[str, dict[str, Any]] = {}
        self._identity = itertools.count(1)

    # ------------------------------------------------------------------ what a runtime adds
    @abstractmethod
    def _send(self, instance: str, command: dict[str, Any]) -> None:
        """Pass a command on; one that cannot be is answered at once with Gone."""

    @abstractmethod
    def _spawn(self, node: str, index: int) -> None:
        """Start an instance that is in `running`."""

    @abstractmethod
    def run(self) -> None:
        """Go on until there is a reason to stop."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    # ------------------------------------------------------------------ reading
    def snapshot(self) -> dict[str, dict[str, float]]:
        return {name: stats.read() for name, stats in self._stats.items()}

    def total(self, counter: str) -> float:
        return sum(stats.get(counter) for stats in self._stats.values())

    def wires(self) -> dict[str, dict[str, float]]:
        """The numbers of every wire, and whether its books have always balanced; one whose have not is reported once."""
        rows = {}
        for name, wire in self.program.wires.items():
            rows[name] = {**wire.numbers(), "conserved": float(wire.conserved() and name not in self._unbalanced)}
            self._check_books(name, rows[name])
        return rows

    def _check_books(self, wire: str, row: dict[str, float]) -> None:
        if not row["conserved"] and wire not in self._unbalanced:
            self._unbalanced.add(wire)
            self.event("unbalanced", wire, f"a slot was lost: written is not consumed + dropped + held ({row})")

    def surroundings(self) -> dict[str, float]:
        """What a runtime knows beyond roles and wires: cores in use, nodes, object stores."""
        return {}

    def room(self, role: str) -> float:
        """How many more replicas of a role could be started now; a runtime that counts processors says."""
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

    def command(self, instance: str, op: str, done: Done | None = None, **arguments: Any) -> None:
        """Tell an instance something; it obeys between two steps."""
        identity = next(self._identity)
        self._waiting[identity] = (instance, done or (lambda result, error: None))
        self._send(instance, {"op": op, "id": identity, "arguments": arguments})

    def complete(self) -> bool:
        """Whether everyone who should run has been ready once: from then on a checkpoint holds all there is."""
        return not self.unheard()

    def unheard(self) -> list[str]:
        """Those who have not been ready once."""
        return sorted(self.running.keys() - self._heard)

    def checkpoint(self, folder: Path) -> None:
        """Every stateful role writes its file into `folder`; then the session is told."""
        folder.mkdir(parents=True, exist_ok=True)
        if names := sorted(self.stateful & self.running.keys()):
            Saving(self, folder).begin(names)
        else:
            self.session.saved(folder, False)

    def pause(self, role: str, done: Done | None = None) -> None:
        """Begin no other step, until `resume`. It holds for a restarted instance too, like `set`."""
        self._tell(self._named(role), "pause", done, self._paused.add)

    def resume(self, role: str, done: Done | None = None) -> None:
        self._tell(self._named(role), "resume", done, self._paused.discard)

    def set(self, role: str, done: Done | None = None, **values: Any) -> None:
        def keep(name: str) -> None:
            self._values.setdefault(name, {}).update(values)

        self._tell(self._named(role), "set", done, keep, values=values)

    def _tell(self, names: list[str], op: str, done: Done | None, keep: Callable[[str], object], **arguments: Any) -> None:
        """Tell several instances a wish that outlives them: one that is just being restarted will begin with it."""
        all_done = after(len(names), done or (lambda result, error: None))

        def told(name: str) -> Done:
            def done(result: Any, error: str | None) -> None:
                if not error or isinstance(error, Gone):
                    keep(name)
                    error = None
                all_done(result, error)

            return done

        for name in names:
            self.command(name, op, told(name), **arguments)

    def wishes(self, instance: str) -> dict[str, Any]:
        """What an instance begins with."""
        return {"paused": instance in self._paused, "values": self._values.get(instance, {})}

    def copy_state(self, source: str, target: str, done: Done | None = None) -> None:
        """The target takes over the source's state (parameters, optimiser moments, everything in `state()`)."""
        for name in (source, target):
            if name not in self.running:
                raise ProgramError(f"{name} is not running; there are {', '.join(self.running)}")
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

    def scale(self, role: str, count: int, patience_seconds: float = 10.0, done: Done | None = None) -> None:
        """Start replicas, or drain the newest ones, until `count` run. A role that waits within its step for something
        that does not come within `patience_seconds` is given up there."""
        node = self._node(role)
        if not node.least <= count <= node.most:
            raise ProgramError(f"{role} may have {node.least} to {node.most} replicas, not {count}")
        alive = sorted(index for name, index in self.running.values() if name == role)
        more = [i for i in range(node.most) if i not in alive][: max(0, count - len(alive))]
        less = list(reversed(alive))[: max(0, len(alive) - count)]
        self.event("scale", role, f"{len(alive)} -> {count} replicas")
        all_done = after(len(more) + len(less), done or (lambda result, error: None))
        for index in more:
            self._births.setdefault(instance_name(role, index), []).append(all_done)
            self.enrol(role, index)
            self._spawn(role, index)
        for index in less:
            self._drain(role, index, patience_seconds, all_done)

    def enrol(self, node: str, index: int) -> None:
        """From now on the graph has this instance."""
        self.running[instance_name(node, index)] = (node, index)
        self._enlist(node, index, True)

    def _enlist(self, node: str, index: int, here: bool) -> None:
        """Tell every wire of an instance that the graph has it now, or has it no more."""
        for port in self.program.nodes[node].ports.values():
            port.wire.enlist(port.end, port.wire.member_number(port.end, node, index), here)

    def _drain(self, node: str, index: int, patience_seconds: float, then: Done) -> None:
        """From now on the graph does without this instance; it ends between two steps."""
        name = instance_name(node, index)
        self.running.pop(name)

        def done(result: Any, error: str | None) -> None:
            self.membership(node, index, alive=False)
            self._paused.discard(name)
            self._values.pop(name, None)
            for waiting in self._births.pop(name, []):
                waiting(None, None)  # it never came to life, and is not wanted any more
            if name in self.running:  # it has been asked for again in the meantime
                self._spawn(node, index)
            else:
                self._enlist(node, index, False)
            then(result, None)

        self.command(name, "drain", done, patience_seconds=patience_seconds)

    # ------------------------------------------------------------------ bookkeeping
    def membership(self, node: str, index: int, alive: bool) -> None:
        """Tell every wire of an instance that it has come to life, or is dead and reaped."""
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
            for done in self._births.pop(instance, []):
                done(None, None)
        elif kind == "finish":
            self.stop(message["reason"])
        elif kind == "fatal":
            if not self.ending:  # it may say so again while the run ends
                raise RoleFailed(f"{instance}: {message['text']}")
        elif kind == "note":
            self.event("note", instance, message["text"])
        elif kind == "control":
            self._requested(instance, message)

    def _answered(self, identity: int | None, result: Any, error: str | None) -> None:
        if identity in self._waiting:
            self._waiting.pop(identity)[1](result, error)

    def forget(self, instance: str) -> None:
        """A dead instance answers no more."""
        for identity in [k for k, (name, _) in self._waiting.items() if name == instance]:
            self._answered(identity, None, Gone(f"{instance} died"))

    def _requested(self, instance: str, message: dict[str, Any]) -> None:
        """A coordinator's wish; it is answered when the wish has been carried out."""
        op, arguments, values = message["op"], message["arguments"], message["values"]

        def reply(result: Any, error: str | None) -> None:
            self._send(instance, {"op": "reply", "id": message["id"], "arguments": {"error": error}})

        try:
            if op not in ("scale", "pause", "resume", "set", "copy_state"):
                raise ProgramError(f"there is no wish {op}")
            if op != "copy_state" and instance in self._named(arguments[0]):
                getattr(self, op)(*arguments, **values)  # it cannot obey while it waits for the answer
                reply(None, None)
            else:
                getattr(self, op)(*arguments, done=reply, **values)
        except ProgramError as error:
            reply(None, str(error))

    def _node(self, role: str) -> Node:
        if role not in self.program.nodes:
            raise ProgramError(f"there is no role {role}; there are {', '.join(self.program.nodes)}")
        return self.program.nodes[role]

    def _named(self, role: str) -> list[str]:
        """The running instances of a role, or the one instance that is named."""
        if role in self.running:
            return [role]
        node = self._node(role)
        return [name for name, (kind, _) in self.running.items() if kind == node.name]


def supervised(supervisor: Supervisor, session: Session) -> str:
    """Run until somebody says stop; returns the reason. Whatever happens, the session is told and everything is given back."""
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
