"""One running role: its coroutine, what it waits for, and the commands that it obeys between two steps."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core import Adjustable, Captures, Closable, Drainable, KeepsTurn, Role, Settles, SharesState, Stateful, Wait
from shoal.errors import CheckpointError, ProgramError, ShoalError
from shoal.runtime.background_saving import Saving, in_pieces, let_go
from shoal.runtime.control import ControlHandle
from shoal.runtime.program import ControlPort, Program, Store
from shoal.runtime.wires import Port

__all__ = ["Instance", "RoleContext", "instance_name", "shares_state", "split_name"]

Emit = Callable[[dict[str, Any]], None]


def instance_name(node: str, index: int) -> str:
    return f"{node}-{index}"


def split_name(instance: str) -> tuple[str, int]:
    """The node and the index of an instance."""
    node, _, index = instance.rpartition("-")
    return node, int(index)


class RoleContext:
    """What a role knows of itself (core.Me)."""

    def __init__(self, program: Program, node: str, index: int, incarnation: int, emit: Emit,
                 control: ControlHandle | None = None) -> None:
        self.name, self.index, self.incarnation = node, index, incarnation
        self.replicas, self.folder = program.nodes[node].most, program.folder
        self.stats = program.stats(node, index)
        self._emit, self._seed = emit, program.seed
        self._lives = program.resumed * 1_000_003 + incarnation
        self._control, self._allowed = control, dict.fromkeys(program.limits, -1.0)

    def rng(self, salt: str = "") -> np.random.Generator:
        words = (self._seed, zlib.crc32(self.name.encode()), self.index, self._lives, zlib.crc32(salt.encode()))
        return np.random.default_rng(np.random.SeedSequence(words))

    async def permit(self, counter: str, units: float, round_number: int = -1) -> None:
        if counter not in self._allowed:
            return
        counted = self.stats.get(counter)
        if (round_number if round_number >= 0 else counted + units) > self._allowed[counter]:
            assert self._control is not None
            self._allowed[counter] = await self._control.permit(counter, units, counted, round_number)

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

    `kept_settings` is what has been set on earlier incarnations, and for all: {"paused": ..., "values": {...}, "settings": {...}}.
    """

    def __init__(self, program: Program, node: str, index: int, incarnation: int, emit: Emit, control: ControlHandle,
                 newest: Path | None, kept_settings: Mapping[str, Any] | None = None, saves_aside: bool = False) -> None:
        """With `saves_aside` a large state is written in a thread of its own, and `account` has to be called now and then."""
        self.name = instance_name(node, index)
        self.node, self.index = node, index
        self._program, self._emit = program, emit
        self.me = RoleContext(program, node, index, incarnation, emit, control)
        self.stats = self.me.stats
        self.stats.set("incarnation", incarnation)
        self.commands: deque[dict[str, Any]] = deque()
        self.paused, self.drained = bool(kept_settings and kept_settings["paused"]), False
        self.wait: Wait | None = None
        self._coroutine: Coroutine[Wait, None, None] | None = None
        self._drain_reply: dict[str, Any] = {}
        self._saves_aside = saves_aside
        self._saving: tuple[Saving, dict[str, Any]] | None = None  # and the reply to the command
        self._since = 0.0
        self._stepped = False
        if kept_settings and kept_settings["settings"]:
            self._change(kept_settings["settings"])  # before the role reads any of them
        arguments = {key: self._bind(value, incarnation, control) for key, value in program.nodes[node].arguments.items()}
        self.role: Role = program.nodes[node].role(self.me, **arguments)
        self._keeper = self.role if isinstance(self.role, KeepsTurn) else None  # asked once: a protocol takes tens of microseconds
        if newest is not None:
            self._load_newest(newest)
        if kept_settings and kept_settings["values"]:
            self._do_set(kept_settings["values"])
        self.stats.set("alive", 1)
        emit({"kind": "ready", "stateful": isinstance(self.role, Stateful), "shares": shares_state(self.role)})

    def _bind(self, value: Any, incarnation: int, control: ControlHandle) -> Any:
        if isinstance(value, Port):
            return self._program.endpoint(value, self.node, self.index, incarnation)
        if isinstance(value, Mapping) and any(isinstance(port, Port) for port in value.values()):
            return {key: self._bind(port, incarnation, control) for key, port in value.items()}
        return control if isinstance(value, ControlPort) else value

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
        """Give a sign of life, count the time waited so far (a long wait shows while it lasts), report a state that is written."""
        if self._saving is not None and self._saving[0].over:
            self._end_saving()
        self.stats.set("heartbeat", now)
        if self.wait is not None:
            now = time.perf_counter()
            self.stats.waited(self.wait.wire, now - self._since)
            self._since = now

    def settled(self) -> bool:
        """Whether the role is between two steps (or says that the step it began has changed nothing yet)."""
        return self._coroutine is None or (isinstance(self.role, Settles) and self.role.settled)

    def keeps_turn(self) -> bool:
        """Whether the role is in the middle of work that it has cut into many steps."""
        return self._keeper is not None and self._keeper.keeps_turn and not (self.drained or self.paused)

    def close(self) -> None:
        if self._saving is not None:
            with contextlib.suppress(OSError):  # the supervisor may be gone
                self._end_saving()
        try:
            if self._coroutine is not None:
                self._coroutine.close()
                self._coroutine = self.wait = None
            if isinstance(self.role, Closable):
                self.role.close()
        finally:
            self.stats.set("alive", 0)

    def leave(self) -> None:
        """End a drained role; only now reply to the drain command."""
        self.close()
        self._emit(self._drain_reply)

    # ------------------------------------------------------------------ commands, between two steps only
    def obey(self) -> bool:
        """Carry out commands if this is the moment; returns whether any was carried out."""
        orders: dict[str, Callable[..., str | Saving | None]] = {
            "checkpoint": self._do_checkpoint, "load": self._do_load, "pause": self._do_pause, "resume": self._do_resume,
            "set": self._do_set, "change": self._do_change, "drain": self._do_drain}
        done = False
        while self.commands and (self.settled() or self._at_once(self.commands[0])):
            command = self.commands.popleft()
            done = True
            answer = {"kind": "done", "id": command.get("id"), "op": command["op"], "error": None}
            try:
                result = orders[command["op"]](**command.get("arguments", {}))
                if isinstance(result, Saving):
                    self._saving = result, answer
                    continue  # replied to when it is written
                answer["result"] = result
            except (OSError, ShoalError) as error:
                answer["error"] = f"{self.name}: {error}"
            if self.drained:
                self._drain_reply = answer
                break
            self._emit(answer)
        return done

    def _at_once(self, command: dict[str, Any]) -> bool:
        """Whether a command is carried out while the role waits within a step. Pausing means that no other step begins: the step
        may need a role that is already paused, and would then never end. A drain does not wait for ever for a step to end."""
        if command["op"] in ("pause", "resume"):
            return True
        if command["op"] != "drain" or self.wait is None:
            return False
        until: float = command.setdefault("until", time.monotonic() + command["arguments"]["patience_seconds"])
        return time.monotonic() >= until

    def _do_checkpoint(self, folder: str) -> str | Saving | None:
        """Write the role's state, if there is any; returns the file's name, or what is still writing it."""
        if self._saving is not None:
            self._end_saving()
        state = self.role.state() if isinstance(self.role, Stateful) else None
        if state is None:
            return None
        path, store = Path(folder) / f"{self.name}.safetensors", self._store()
        if self._saves_aside and in_pieces(state):
            return Saving(store, path, state)
        try:
            with self.stats.phase("checkpoint"):
                store.save(path, state)
        finally:
            let_go(state)
        return path.name

    def _end_saving(self) -> None:
        """Wait until the state is written, and reply to the command."""
        assert self._saving is not None
        (saving, answer), self._saving = self._saving, None
        try:
            answer["result"] = saving.end()
        except (OSError, ShoalError) as error:
            answer["error"] = f"{self.name}: {error}"
        self._emit(answer)

    def _do_load(self, path: str) -> None:
        store = self._store()
        if not isinstance(self.role, Stateful):
            raise ProgramError(f"{type(self.role).__name__} has no state() and load()")
        state = store.load(Path(path))
        try:
            self.role.load(state)
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(f"{path} is not what {self.name} had saved: {type(error).__name__}: {error}; continue from an "
                                  "older checkpoint, or start a new run") from error

    def _store(self) -> Store:
        if self._program.store is None:
            raise ProgramError("the program has no store for checkpoints; give it one: Program(name, store=...)")
        return self._program.store

    def _do_pause(self) -> None:
        self.paused = True

    def _do_resume(self) -> None:
        self.paused = False

    def _do_set(self, values: dict[str, Any]) -> None:
        if not isinstance(self.role, Adjustable):
            raise ProgramError(f"{type(self.role).__name__} has no set()")
        try:
            self.role.set(**values)
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # a mistake of the request, not of the role
            raise ProgramError(f"set({', '.join(f'{k}={v!r}' for k, v in values.items())}) failed: {error!r}") from error

    def _do_change(self, values: dict[str, Any]) -> None:
        self._change(values)
        if isinstance(self.role, Captures):
            self.role.capture_anew()

    def _change(self, values: Mapping[str, Any]) -> None:
        if self._program.settings is not None:
            self._program.settings.change(values)

    def _do_drain(self, patience_seconds: float) -> None:
        if isinstance(self.role, Drainable):
            self.role.drain()
        self.drained = True

    def _load_newest(self, folder: Path) -> None:
        """Load the role's own file or, where replicas share one state, any replica's."""
        own = folder / f"{self.name}.safetensors"
        others = sorted(folder.glob(f"{self.node}-*.safetensors")) if shares_state(self.role) else []
        path = own if own.exists() else others[0] if others else None
        if path is not None and isinstance(self.role, Stateful):
            self._do_load(str(path))


def shares_state(role: object) -> bool:
    """Whether this role (or every role of this class) may start from the file of another replica."""
    return isinstance(role, SharesState) and role.shares_state
