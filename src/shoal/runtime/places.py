"""What runtimes whose places can die share: starting places, judging their deaths, starting them again.

`LocalSupervisor` adds processes of this machine, `RaySupervisor` actors of a cluster.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from shoal.errors import RoleFailed
from shoal.runtime.instance import instance_name
from shoal.runtime.program import Place, Program
from shoal.runtime.supervisor import Faults, Session, Supervisor

__all__ = ["TICK_SECONDS", "Life", "PlaceSupervisor"]

TICK_SECONDS = 0.1
BACKOFF_SECONDS = (0.0, 0.1, 0.5, 2.0)
SILENCES = 3                  # times its longest silence so far: what a place that computes for long at a time is given
UNBORN_DEATHS = 10            # deaths by an outside signal, in a row, before a place was ever ready: out of memory?


@dataclass
class Life(ABC):
    """What the supervisor knows of a place, through all its incarnations."""

    place: Place
    incarnation: int = -1
    started: list[str] = field(default_factory=list)  # the instances that live in it, or are being born
    ready: set[str] = field(default_factory=set)
    emptied: bool = False                    # all of them were drained
    steps: dict[str, float] = field(default_factory=dict)  # that each had made when it was started
    started_at: float = 0.0
    deaths: int = 0                          # in a row without a step between them, for the back-off
    fruitless: int = 0                       # of these, the ones that were its own fault
    unborn: int = 0                          # and the ones from outside before it was ready
    errors: deque[float] = field(default_factory=deque)
    last_error: str = ""
    summary: str = ""
    again_at: float | None = None
    hung: str = ""
    last_beat: float = 0.0
    silence: float = 0.0                     # since then, when it was last looked at
    longest_silence: float = 0.0             # of this incarnation that ended with a sign of life

    @property
    @abstractmethod
    def up(self) -> bool:
        """From the order to start it until its death has been dealt with."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""


L = TypeVar("L", bound=Life)


class PlaceSupervisor(Supervisor, Generic[L]):
    """Starts places, hears from them, judges their deaths. What it adds to a runtime's own part: all that is not a process."""

    def __init__(self, program: Program, session: Session, log_dir: Path, faults: Faults, children: Mapping[str, L]) -> None:
        super().__init__(program, session)
        self.log_dir, self.faults = log_dir, faults
        self.children = dict(children)

    # ------------------------------------------------------------------ what a runtime adds
    @abstractmethod
    def _launch(self, child: L, births: list[dict[str, Any]], title: str, threads: int) -> None:
        """Bring a place to life; `births` are the instances that begin in it."""

    @abstractmethod
    def _listen(self) -> None:
        """Hear what places say and how they end, for at most TICK_SECONDS."""

    def _can_start(self, child: L, now: float) -> bool:
        """Whether this is the moment to start a place again that should be."""
        return True

    # ------------------------------------------------------------------ starting
    def _child(self, instance: str) -> L:
        node, index = instance.rsplit("-", 1)
        return self.children[self.program.place_of(node, int(index)).name]

    def _spawn(self, node: str, index: int) -> None:
        """Start an instance: with its place, or in its place if that is running without it."""
        name = instance_name(node, index)
        child = self._child(name)
        if not child.up:
            if child.again_at is None:  # else it comes with its place
                self._start(child)
        elif name not in child.started:  # else it is still being drained, and started again after that
            child.incarnation += 1
            child.started.append(name)
            child.started_at = time.monotonic()
            child.steps[name] = self._stats[name].get("steps")
            self._stats[name].set("heartbeat", 0)
            self._send(name, {"op": "start", "arguments": self._birth(node, index, child.incarnation)})

    def _birth(self, node: str, index: int, incarnation: int) -> dict[str, Any]:
        newest = self.session.newest()
        return {"node": node, "index": index, "incarnation": incarnation, "newest": str(newest) if newest else None,
                "wishes": self.wishes(instance_name(node, index))}

    def _start(self, child: L) -> None:
        members = [(n, i) for n, i in child.place.members if instance_name(n, i) in self.running]
        child.started = [instance_name(n, i) for n, i in members]
        child.ready.clear()
        child.incarnation += 1
        child.again_at, child.hung, child.emptied, child.started_at = None, "", False, time.monotonic()
        child.last_beat = child.silence = child.longest_silence = 0.0
        child.steps = {name: self._stats[name].get("steps") for name in child.started}
        for name in child.started:
            self._stats[name].set("heartbeat", 0)
        title = " + ".join(" ".join(name.rsplit("-", 1)) for name in child.started)
        self._launch(child, [self._birth(n, i, child.incarnation) for n, i in members], f"shoal: {title}",
                     max(self.program.nodes[n].compute_threads for n, _ in members))

    # ------------------------------------------------------------------ the loop
    def run(self) -> None:
        first = [(node.name, index) for node in self.program.nodes.values() for index in range(node.start)]
        for node, index in first:
            self.enrol(node, index)
            self.membership(node, index, alive=True)  # barriers wait for all that begin together
        for node, index in first:
            self._spawn(node, index)
        self.session.begin(self)
        while self.reason is None:
            self.turn()
            self.session.tick(self)

    def turn(self) -> None:
        self._listen()
        now = time.monotonic()
        for child in self.children.values():
            if child.again_at is not None and now >= child.again_at and not self.ending and self._can_start(child, now):
                self._start(child)
            elif child.up and not child.hung and (why := self._hangs(child, now)):
                child.hung = why
                child.kill()

    def _hangs(self, child: L, now: float) -> str:
        """Why a place is taken for hung. Roles beat whenever they wait, and within long steps where they can; whoever has needed
        longer than the limit for one thing, and come back, is given more the next time: an update may take minutes."""
        beats = [self._stats[name].get("heartbeat") for name in child.started]
        if not beats:
            return ""
        moments = [abs(beat) for beat in beats]
        last = min(moments) if child.place.threads else max(moments)  # in one loop any role's life is that of all
        if last > child.last_beat:
            child.longest_silence = max(child.longest_silence, child.silence)
        child.last_beat, child.silence = last, now - last if last else 0.0
        if min(beats) <= 0.0:  # 0: it has not begun its first step; else minus the time at which this part of it began
            limit = self.faults.start_seconds
            since = child.started_at if 0.0 in beats else max(child.started_at, -max(beat for beat in beats if beat < 0))
            return f"not started within {limit:g} s" if now - since > limit else ""
        limit = max(self.faults.hang_seconds, SILENCES * child.longest_silence)
        return f"no sign of life for {round(limit, 1):g} s" if now - last > limit else ""

    def _take(self, child: L, message: dict[str, Any]) -> None:
        """A message of a place."""
        name = message["from"]
        if message["kind"] == "ready":
            child.ready.add(name)
            node, index = name.rsplit("-", 1)
            if name in self.running:
                self.membership(node, int(index), alive=True)
        elif message["kind"] == "error":
            child.last_error, child.summary = message["traceback"], message["summary"]
        elif message["kind"] == "done" and message["op"] == "drain":
            child.started.remove(name)
            child.emptied = not child.started
        self.receive(name, message)

    # ------------------------------------------------------------------ deaths
    def _bury(self, child: L) -> list[str]:
        """A place has ended: take its membership back; returns the instances that were lost with it."""
        lost, child.started = child.started, []
        for name in lost:
            node, index = name.rsplit("-", 1)
            self._stats[name].set("alive", 0)
            self.membership(node, int(index), alive=False)
        for name in lost:
            self.forget(name)
        return lost

    def _restart(self, child: L, lost: list[str], well: bool, outside: bool, cause: str, uncounted: bool = False) -> None:
        """Decide whether a place that has ended comes again. `well`: it ended by itself; `outside`: it was killed; `uncounted`:
        by the death of something that all places depend on."""
        wanted = [name for name in (instance_name(n, i) for n, i in child.place.members) if name in self.running]
        if self.ending or not wanted or child.up:
            return  # the end of everything, or drained; or a drained one was asked for again just now
        if well and child.emptied:
            child.again_at = time.monotonic()  # all were drained, and some are wanted again
            return
        for name in lost:
            if name in self.running:
                self._stats[name].add("restarts")
        self._judge(child, lost, outside and not child.hung, child.hung or cause, uncounted)

    def _judge(self, child: L, lost: list[str], outside: bool, cause: str, uncounted: bool) -> None:
        """Its own failures are counted; deaths by a signal from outside are restarted without limit."""
        now, who = time.monotonic(), child.place.name
        if any(self._stats[name].get("steps") > child.steps[name] for name in lost):
            child.deaths = child.fruitless = child.unborn = 0
        child.deaths += 1
        child.fruitless += not outside
        if not uncounted:
            child.unborn = child.unborn + 1 if outside and not child.ready else 0
        if not outside and not child.hung:
            child.errors.append(now)
        while child.errors and now - child.errors[0] > 60:
            child.errors.popleft()
        why = ""
        if len(child.errors) >= self.faults.exceptions_per_minute:
            why = f"failed {len(child.errors)} times within a minute"
        elif child.fruitless >= self.faults.deaths_without_step:
            why = f"died {child.fruitless} times without completing a step"
        elif child.unborn >= UNBORN_DEATHS:
            why = f"ended {child.unborn} times before it could start (is there enough memory, and room for another process?)"
        if why:
            log = self.log_dir / f"{who}.log"
            raise RoleFailed(f"{who} {why}, last: {cause}\n{child.last_error or '(it left no traceback)'}\nits log: {log}")
        child.again_at = now + BACKOFF_SECONDS[min(child.deaths - 1, len(BACKOFF_SECONDS) - 1)]
        times = int(max((self._stats[name].get("restarts") for name in lost), default=0))
        self.event("restart", who, f"{cause}; restarted ({times} so far)")

    # ------------------------------------------------------------------ ending
    def settle(self, seconds: float) -> None:
        """Go on until every command has been answered (a last checkpoint), at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while self._waiting and time.monotonic() < deadline:
            self.turn()
