"""One living role: its coroutine, what it waits for, and what it is told between two steps."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core import Wait
from shoal.errors import ProgramError, ShoalError
from shoal.runtime.program import ControlPort, Program
from shoal.runtime.wires import Port

__all__ = ["Instance", "Me", "instance_name"]

Emit = Callable[[dict[str, Any]], None]


def instance_name(node: str, index: int) -> str:
    return f"{node}-{index}"


class Me:
    """What a role may know of itself (core.Me)."""

    def __init__(self, program: Program, node: str, index: int, incarnation: int, emit: Emit) -> None:
        self.name, self.index, self.incarnation = node, index, incarnation
        self.replicas = program.nodes[node].most
        self.stats = program.stats(node, index)
        self._emit, self._seed = emit, program.seed
        self._lives = program.resumed * 1_000_003 + incarnation

    def rng(self, salt: str = "") -> np.random.Generator:
        words = (self._seed, zlib.crc32(self.name.encode()), self.index, self._lives, zlib.crc32(salt.encode()))
        return np.random.default_rng(np.random.SeedSequence(words))

    def finish(self, reason: str) -> None:
        self._emit({"kind": "finish", "reason": reason})

    def fail(self, text: str) -> None:
        self._emit({"kind": "fatal", "text": text[:20_000]})

    def note(self, text: str) -> None:
        self._emit({"kind": "note", "text": text[:20_000]})

    def beat(self) -> None:
        self.stats.set("heartbeat", time.monotonic())


class Instance:
    """Drives one role: `advance()` runs it to its next wait or to the end of its step.

    `wishes` is what a coordinator asked of a predecessor: {"paused": ..., "values": {...}}.
    """

    def __init__(self, program: Program, node: str, index: int, incarnation: int, emit: Emit, control: Callable[[], Any],
                 newest: Path | None, wishes: Mapping[str, Any] | None = None) -> None:
        self.name = instance_name(node, index)
        self.node, self.index = node, index
        self._program, self._emit = program, emit
        self.me = Me(program, node, index, incarnation, emit)
        self.stats = self.me.stats
        self.stats.set("incarnation", incarnation)
        self.commands: deque[dict[str, Any]] = deque()
        self.paused, self.drained = bool(wishes and wishes["paused"]), False
        self.wait: Wait | None = None
        self._coroutine: Coroutine[Wait, None, None] | None = None
        self._farewell: dict[str, Any] = {}
        self._since = 0.0
        self._stepped = False
        arguments = {key: self._bind(value, incarnation, control) for key, value in program.nodes[node].arguments.items()}
        self.role = program.nodes[node].role(self.me, **arguments)
        if newest is not None:
            self._load_newest(newest)
        if wishes and wishes["values"]:
            self.role.set(**wishes["values"])
        self.stats.set("alive", 1)
        emit({"kind": "ready", "stateful": hasattr(self.role, "state"), "shares": bool(getattr(self.role, "shares_state", False))})

    def _bind(self, value: Any, incarnation: int, control: Callable[[], Any]) -> Any:
        if isinstance(value, Port):
            return self._program.endpoint(value, self.node, self.index, incarnation)
        return control() if isinstance(value, ControlPort) else value

    # ------------------------------------------------------------------ running
    def runnable(self) -> bool:
        if self.drained:
            return False
        if self.wait is not None:
            return self.wait.ready() or (self.wait.deadline is not None and time.monotonic() >= self.wait.deadline)
        return not (self.paused and self._coroutine is None)

    def advance(self) -> None:
        """Run until the role waits or its step is done."""
        now = time.perf_counter()
        if self.wait is not None:
            self.stats.waited(self.wait.wire, now - self._since)
            self.wait = None
        if first := not self._stepped:
            self.stats.set("heartbeat", -time.monotonic())  # the first step may compile: see PlaceSupervisor._hangs
        if self._coroutine is None:
            self._coroutine = self.role.step()
        try:
            self.wait = self._coroutine.send(None)
        except StopIteration:
            self._coroutine = None
            self._stepped = True
            self.stats.add("steps")
        self._since = time.perf_counter()
        self.stats.add("busy_seconds", self._since - now)
        if first:
            self.me.beat()

    def account(self, now: float) -> None:
        """A sign of life, and the time waited so far, so that a long wait shows while it lasts."""
        self.stats.set("heartbeat", now)
        if self.wait is not None:
            now = time.perf_counter()
            self.stats.waited(self.wait.wire, now - self._since)
            self._since = now

    def settled(self) -> bool:
        """Whether the role is between two steps (or says that the step it began has changed nothing yet)."""
        return self._coroutine is None or bool(getattr(self.role, "settled", False))

    def close(self) -> None:
        try:
            if self._coroutine is not None:
                self._coroutine.close()
                self._coroutine = self.wait = None
            if hasattr(self.role, "close"):
                self.role.close()
        finally:
            self.stats.set("alive", 0)

    def leave(self) -> None:
        """The end of a drained role: only then is the drain answered."""
        self.close()
        self._emit(self._farewell)

    # ------------------------------------------------------------------ commands, between two steps only
    def obey(self) -> bool:
        """Do what was asked, if this is the moment; says whether anything was done."""
        done = False
        while self.commands and (self.settled() or self._at_once(self.commands[0])):
            command = self.commands.popleft()
            done = True
            answer = {"kind": "done", "id": command.get("id"), "op": command["op"], "error": None}
            try:
                answer["result"] = getattr(self, f"_do_{command['op']}")(**command.get("arguments", {}))
            except (OSError, ShoalError) as error:
                answer["error"] = f"{self.name}: {error}"
            if self.drained:
                self._farewell = answer
                break
            self._emit(answer)
        return done

    def _at_once(self, command: dict[str, Any]) -> bool:
        """What a role is told even while it waits within its step. Pausing it there means that it begins no other one: its
        step may need a role that is paused already, and would then never end. A drained role that waits for something that
        does not come is given up there."""
        if command["op"] in ("pause", "resume"):
            return True
        if command["op"] != "drain" or self.wait is None:
            return False
        until: float = command.setdefault("until", time.monotonic() + command["arguments"]["patience_seconds"])
        return time.monotonic() >= until

    def _hook(self, name: str) -> Callable[..., Any]:
        if not hasattr(self.role, name):
            raise ProgramError(f"{type(self.role).__name__} has no {name}()")
        hook: Callable[..., Any] = getattr(self.role, name)
        return hook

    def _do_checkpoint(self, folder: str) -> str | None:
        """Write the role's state, if it has one; returns the file's name."""
        state = self.role.state() if hasattr(self.role, "state") else None
        if state is None:
            return None
        if self._program.store is None:
            raise ProgramError("the program has no store; give it one: Program(name, store=...)")
        file = f"{self.name}.safetensors"
        with self.stats.phase("checkpoint"):
            self._program.store.save(Path(folder) / file, state)
        return file

    def _do_load(self, path: str) -> None:
        if self._program.store is None:
            raise ProgramError("the program has no store; give it one: Program(name, store=...)")
        self._hook("load")(self._program.store.load(Path(path)))

    def _do_pause(self) -> None:
        self.paused = True

    def _do_resume(self) -> None:
        self.paused = False

    def _do_set(self, values: dict[str, Any]) -> None:
        hook = self._hook("set")
        try:
            hook(**values)
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # the asker's mistake, not the role's
            raise ProgramError(f"set({', '.join(f'{k}={v!r}' for k, v in values.items())}) failed: {error!r}") from error

    def _do_drain(self, patience_seconds: float) -> None:
        if hasattr(self.role, "drain"):
            self.role.drain()
        self.drained = True

    def _load_newest(self, folder: Path) -> None:
        """A role's own file, or (where replicas share one state) any of its kind."""
        own = folder / f"{self.name}.safetensors"
        others = sorted(folder.glob(f"{self.node}-*.safetensors")) if getattr(self.role, "shares_state", False) else []
        path = own if own.exists() else others[0] if others else None
        if path is not None and hasattr(self.role, "load"):
            self._do_load(str(path))
