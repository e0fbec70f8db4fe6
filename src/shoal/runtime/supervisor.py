"""What both runtimes' supervisors do: membership, commands, checkpoints, counters, events. It computes nothing itself."""

from __future__ import annotations

import itertools
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import ProgramError, RoleFailed
from shoal.runtime.instance import instance_name
from shoal.runtime.program import Node, Program

__all__ = ["Faults", "Session", "Supervisor"]

Done = Callable[[Any, str | None], None]


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
    exceptions_per_minute: int = 3
    deaths_without_step: int = 3


class Supervisor:
    """The control handle of a running program. `_send` and `_spawn` are what a runtime adds."""

    def __init__(self, program: Program, session: Session) -> None:
        self.program, self.session = program, session
        self.reason: str | None = None
        self.running: dict[str, tuple[str, int]] = {}  # instance -> (node, replica): those that should be alive
        self.stateful: set[str] = set()
        self._members: set[tuple[str, int]] = set()  # those whom the wires count on
        self._stats = {instance_name(n, i): program.stats(n, i) for n, i in program.instances()}
        self._events: deque[dict[str, Any]] = deque()
        self._waiting: dict[int, tuple[str, Done]] = {}  # command id -> (instance, what to do with its answer)
        self._identity = itertools.count(1)

    # ------------------------------------------------------------------ what a runtime adds
    def _send(self, instance: str, command: dict[str, Any]) -> None:
        raise NotImplementedError

    def _spawn(self, node: str, index: int) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ reading
    def snapshot(self) -> dict[str, dict[str, float]]:
        return {name: stats.read() for name, stats in self._stats.items()}

    def total(self, counter: str) -> float:
        return sum(stats.get(counter) for stats in self._stats.values())

    def wires(self) -> dict[str, dict[str, float]]:
        return {name: {**wire.numbers(), "conserved": float(wire.conserved())} for name, wire in self.program.wires.items()}

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

    def checkpoint(self, folder: Path) -> None:
        """Every stateful role writes its file into `folder`; then the session is told."""
        folder.mkdir(parents=True, exist_ok=True)
        asked = sorted(self.stateful & self.running.keys())
        left = set(asked)
        failed: list[str] = []

        def done_by(name: str) -> Done:
            def done(result: Any, error: str | None) -> None:
                left.discard(name)
                if error:
                    failed.append(error)
                    self.event("checkpoint failed", name, error)
                if not left:
                    self.session.saved(folder, not failed)

            return done

        if not asked:
            self.session.saved(folder, False)
        for name in asked:
            self.command(name, "checkpoint", done_by(name), folder=str(folder))

    def pause(self, role: str) -> None:
        for name in self._named(role):
            self.command(name, "pause")

    def resume(self, role: str) -> None:
        for name in self._named(role):
            self.command(name, "resume")

    def set(self, role: str, **values: Any) -> None:
        for name in self._named(role):
            self.command(name, "set", values=values)

    def copy_state(self, source: str, target: str, done: Done | None = None) -> None:
        """The target takes over the source's state (parameters, optimiser moments, everything in `state()`)."""
        done = done or (lambda result, error: None)
        folder = tempfile.TemporaryDirectory(prefix="shoal-copy-")

        def loaded(result: Any, error: str | None) -> None:
            folder.cleanup()
            done(result, error)

        def written(file: Any, error: str | None) -> None:
            if error or not file:
                loaded(None, error or f"{source} has no state to copy")
            else:
                self.command(target, "load", loaded, path=str(Path(folder.name) / file))

        self.command(source, "checkpoint", written, folder=folder.name)

    def scale(self, role: str, count: int) -> None:
        """Start replicas, or drain the newest ones, until `count` run."""
        node = self._node(role)
        if not node.least <= count <= node.most:
            raise ProgramError(f"{role} may have {node.least} to {node.most} replicas, not {count}")
        alive = sorted(index for name, index in self.running.values() if name == role)
        for index in [i for i in range(node.most) if i not in alive][: max(0, count - len(alive))]:
            self._spawn(role, index)
        for index in list(reversed(alive))[: max(0, len(alive) - count)]:
            self.running.pop(instance_name(role, index))
            self.command(instance_name(role, index), "drain", self._drained(role, index))
        self.event("scale", role, f"{len(alive)} -> {count} replicas")

    def _drained(self, node: str, index: int) -> Done:
        def done(result: Any, error: str | None) -> None:
            self.membership(node, index, alive=False)

        return done

    # ------------------------------------------------------------------ bookkeeping
    def membership(self, node: str, index: int, alive: bool) -> None:
        """Tell every wire of an instance that it has come to life, or is dead and reaped."""
        if alive == ((node, index) in self._members):
            return
        (self._members.add if alive else self._members.discard)((node, index))
        for port in self.program.nodes[node].ports.values():
            port.wire.membership(port.end, port.wire.member(port.end, node, index), alive)

    def receive(self, instance: str, message: dict[str, Any]) -> None:
        """A message of an instance."""
        kind = message["kind"]
        if kind == "done":
            self._answered(message.get("id"), message.get("result"), message.get("error"))
        elif kind == "ready":
            if message["stateful"]:
                self.stateful.add(instance)
        elif kind == "finish":
            self.stop(message["reason"])
        elif kind == "fatal":
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
            self._answered(identity, None, f"{instance} died")

    def _requested(self, instance: str, message: dict[str, Any]) -> None:
        """A coordinator's wish; it is answered when the wish has been carried out."""

        def reply(result: Any, error: str | None) -> None:
            self._send(instance, {"op": "reply", "id": message["id"], "arguments": {"error": error}})

        try:
            if message["op"] == "copy_state":
                self.copy_state(*message["arguments"], done=reply)
                return
            getattr(self, message["op"])(*message["arguments"], **message["values"])
        except ProgramError as error:
            reply(None, str(error))
        else:
            reply(None, None)

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
