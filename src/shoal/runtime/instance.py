"""One living role: its coroutine, what it waits for, and what it is told between two steps."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core import Wait
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
        self._emit({"kind": "fatal", "text": text})

    def note(self, text: str) -> None:
        self._emit({"kind": "note", "text": text})

    def beat(self) -> None:
        self.stats.set("heartbeat", time.monotonic())


class Instance:
    """Drives one role: `advance()` runs it to its next wait or to the end of its step."""

    def __init__(self, program: Program, node: str, index: int, incarnation: int, emit: Emit,
                 control: Callable[[], Any], newest: Path | None) -> None:
        self.name = instance_name(node, index)
        self.node, self.index = node, index
        self._program, self._emit = program, emit
        self.me = Me(program, node, index, incarnation, emit)
        self.stats = self.me.stats
        self.stats.set("incarnation", incarnation)
        self.commands: deque[dict[str, Any]] = deque()
        self.paused = self.drained = False
        self.wait: Wait | None = None
        self._coroutine: Coroutine[Wait, None, None] | None = None
        self._since = 0.0
        arguments = {key: self._bind(value, incarnation, control) for key, value in program.nodes[node].arguments.items()}
        self.role = program.nodes[node].role(self.me, **arguments)
        if newest is not None:
            self._load_newest(newest)
        self.stats.set("alive", 1)
        emit({"kind": "ready", "stateful": hasattr(self.role, "state")})

    def _bind(self, value: Any, incarnation: int, control: Callable[[], Any]) -> Any:
        if isinstance(value, Port):
            member = value.wire.member(value.end, self.node, self.index)
            return value.wire.attach(value.end, member, incarnation)
        return control() if isinstance(value, ControlPort) else value

    # ------------------------------------------------------------------ running
    def runnable(self) -> bool:
        if self.wait is not None:
            return self.wait.ready() or (self.wait.deadline is not None and time.monotonic() >= self.wait.deadline)
        return not (self.drained or (self.paused and self._coroutine is None))

    def advance(self) -> None:
        """Run until the role waits or its step is done."""
        now = time.perf_counter()
        if self.wait is not None:
            self.stats.waited(self.wait.wire, now - self._since)
            self.wait = None
        if self._coroutine is None:
            self._coroutine = self.role.step()
        try:
            self.wait = self._coroutine.send(None)
        except StopIteration:
            self._coroutine = None
            self.stats.add("steps")
        self._since = time.perf_counter()
        self.stats.add("busy_seconds", self._since - now)

    def account(self) -> None:
        """Book the time waited so far, so that a long wait shows while it lasts."""
        if self.wait is not None:
            now = time.perf_counter()
            self.stats.waited(self.wait.wire, now - self._since)
            self._since = now

    def settled(self) -> bool:
        """Whether the role is between two steps (or says that the step it began has changed nothing yet)."""
        return self._coroutine is None or bool(getattr(self.role, "settled", False))

    def close(self) -> None:
        if self._coroutine is not None:
            self._coroutine.close()
            self._coroutine = self.wait = None
        if hasattr(self.role, "close"):
            self.role.close()
        self.stats.set("alive", 0)

    # ------------------------------------------------------------------ commands, between two steps only
    def obey(self) -> None:
        while self.commands and self.settled():
            command = self.commands.popleft()
            answer = {"kind": "done", "id": command.get("id"), "op": command["op"], "error": None}
            try:
                answer["result"] = getattr(self, f"_do_{command['op']}")(**command.get("arguments", {}))
            except OSError as error:
                answer["error"] = f"{self.name}: {error}"
            self._emit(answer)

    def _do_checkpoint(self, folder: str) -> str | None:
        """Write the role's state, if it has one; returns the file's name."""
        state = self.role.state() if hasattr(self.role, "state") else None
        if state is None:
            return None
        assert self._program.store is not None
        file = f"{self.name}.safetensors"
        with self.stats.phase("checkpoint"):
            self._program.store.save(Path(folder) / file, state)
        return file

    def _do_load(self, path: str) -> None:
        assert self._program.store is not None
        self.role.load(self._program.store.load(Path(path)))

    def _do_pause(self) -> None:
        self.paused = True

    def _do_resume(self) -> None:
        self.paused = False

    def _do_set(self, values: dict[str, Any]) -> None:
        self.role.set(**values)

    def _do_drain(self) -> None:
        self.drained = True

    def _load_newest(self, folder: Path) -> None:
        """A role's own file, or (where replicas share one state) any of its kind."""
        own = folder / f"{self.name}.safetensors"
        others = sorted(folder.glob(f"{self.node}-*.safetensors")) if getattr(self.role, "shares_state", False) else []
        path = own if own.exists() else others[0] if others else None
        if path is not None and hasattr(self.role, "load"):
            self._do_load(str(path))
