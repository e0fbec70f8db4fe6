"""The part of a supervisor that runtimes with processes share: it starts places, notices hangs, and restarts places that died.

`LocalSupervisor` adds processes of this machine, `RaySupervisor` Ray actors of a cluster.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from shoal.errors import RoleFailed
from shoal.runtime.instance import instance_name, split_name
from shoal.runtime.log_limit import LogLimit
from shoal.runtime.program import Place, Program
from shoal.runtime.supervisor import Faults, Session, Supervisor

__all__ = ["TICK_SECONDS", "PlaceState", "PlaceSupervisor"]

TICK_SECONDS = 0.1
BACKOFF_SECONDS = (0.0, 0.1, 0.5, 2.0)
SILENCES = 3                  # a place that computes for long at a time may be silent for this many times its longest silence
DEATHS_WHILE_STARTING = 10    # in a row, by a signal from outside, before the place was ever ready: probably out of memory


@dataclass
class PlaceState(ABC):
    """What the supervisor knows of a place, throughout its incarnations."""

    place: Place
    incarnation: int = -1
    started: list[str] = field(default_factory=list)  # the instances that live in it, or are starting
    ready: set[str] = field(default_factory=set)
    emptied: bool = False                    # all instances were drained
    steps: dict[str, float] = field(default_factory=dict)  # the steps of each instance when it was started
    started_at: float = 0.0
    deaths: int = 0                          # in a row without a step between them, for the back-off
    failures_without_step: int = 0           # those of them that were its own fault
    deaths_while_starting: int = 0           # those of them that came from outside before it was ready
    errors: deque[float] = field(default_factory=deque)  # times of its own failures in the last minute
    last_error: str = ""
    summary: str = ""
    again_at: float | None = None            # when to restart it
    hung: str = ""                           # why it was killed as hung
    last_beat: float = 0.0
    silence: float = 0.0                     # seconds between the last sign of life and the last look
    longest_silence: float = 0.0             # of this incarnation, that ended with a sign of life

    @property
    @abstractmethod
    def up(self) -> bool:
        """From the order to start it until its death has been dealt with."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""


L = TypeVar("L", bound=PlaceState)


class PlaceSupervisor(Supervisor, Generic[L]):
    """Starts places, takes their messages, decides about restarts. A runtime adds how a process is started and heard."""

    def __init__(self, program: Program, session: Session, log_dir: Path, faults: Faults, children: Mapping[str, L]) -> None:
        super().__init__(program, session)
        self.log_dir, self.faults = log_dir, faults
        self.log_limit = LogLimit(log_dir, len(children))
        self.children = dict(children)
        self._logs_at = 0.0  # when to look at the logs again

    # ------------------------------------------------------------------ what a runtime adds
    @abstractmethod
    def _launch(self, child: L, starts: list[dict[str, Any]], title: str, threads: int) -> None:
        """Start the process of a place; `starts` are the instances that start in it."""

    @abstractmethod
    def _listen(self) -> None:
        """Take messages and deaths of places, for at most TICK_SECONDS."""

    def _can_start(self, child: L, now: float) -> bool:
        """Whether a place that is due may be restarted now."""
        return True

    # ------------------------------------------------------------------ starting
    def _child(self, instance: str) -> L:
        return self.children[self.program.place_of(*split_name(instance)).name]

    def _spawn(self, node: str, index: int) -> None:
        """Start an instance, with its place or, if that is already running, in it."""
        name = instance_name(node, index)
        child = self._child(name)
        if not child.up:
            if child.again_at is None:  # else it starts with its place
                self._start(child)
        elif name not in child.started:  # else it is still being drained, and started again after that
            child.incarnation += 1
            child.started.append(name)
            child.started_at = time.monotonic()
            child.steps[name] = self._stats[name].get("steps")
            self._stats[name].set("heartbeat", 0)
            self._send(name, {"op": "start", "arguments": self._instance_start(node, index, child.incarnation)})

    def _instance_start(self, node: str, index: int, incarnation: int) -> dict[str, Any]:
        again = incarnation > 0  # at the first start all files are known to be whole
        newest = self.session.newest(instance_name(node, index) if again else None)
        return {"node": node, "index": index, "incarnation": incarnation, "newest": str(newest) if newest else None,
                "kept_settings": self.kept_settings(instance_name(node, index))}

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
        self._launch(child, [self._instance_start(n, i, child.incarnation) for n, i in members], f"shoal: {title}",
                     max(self.program.nodes[n].compute_threads for n, _ in members))

    # ------------------------------------------------------------------ the loop
    def run(self) -> None:
        first = self.program.first_instances()
        for node, index in first:
            self.enrol(node, index)
            self.membership(node, index, alive=True)  # barriers wait for all that start together
        for node, index in first:
            self._spawn(node, index)
        self.session.begin(self)
        while self.reason is None:
            self.turn()
            self.session.tick(self)

    def turn(self) -> None:
        self._listen()
        for counter, permits in self.permits.items():
            permits.look(partial(self.counted, counter))
        now = time.monotonic()
        if now >= self._logs_at:
            self._logs_at = now + TICK_SECONDS
            self.log_limit.look()
        for child in self.children.values():
            if child.again_at is not None and now >= child.again_at and not self.ending and self._can_start(child, now):
                self._start(child)
            elif child.up and not child.hung and (why := self._hangs(child, now)):
                child.hung = why
                child.kill()

    def _hangs(self, child: L, now: float) -> str:
        """Why a place counts as hung; empty if it does not. Roles beat whenever they wait, and within long steps where they can.
        A place that was silent for longer than the limit and came back is given more time from then on: a step may take minutes."""
        beats = [self._stats[name].get("heartbeat") for name in child.started]
        if not beats:
            return ""
        moments = [abs(beat) for beat in beats]
        last = min(moments) if child.place.threads else max(moments)  # in one loop any role's life is that of all
        if last > child.last_beat:
            child.longest_silence = max(child.longest_silence, child.silence)
        child.last_beat, child.silence = last, now - last if last else 0.0
        if min(beats) <= 0.0:  # 0: the first step has not begun; else minus the time at which it was last resumed
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
            if name in self.running:
                self.membership(*split_name(name), alive=True)
        elif message["kind"] == "error":
            child.last_error, child.summary = message["traceback"], message["summary"]
        elif message["kind"] == "done" and message["op"] == "drain":
            child.started.remove(name)
            child.emptied = not child.started
        self.receive(name, message)

    # ------------------------------------------------------------------ deaths
    def _remove_members(self, child: L) -> list[str]:
        """A place has ended: remove its instances from the wires; returns their names."""
        lost, child.started = child.started, []
        for name in lost:
            self._stats[name].set("alive", 0)
            self.membership(*split_name(name), alive=False)
        for name in lost:
            self.forget(name)
        return lost

    def _restart(self, child: L, lost: list[str], well: bool, outside: bool, cause: str, uncounted: bool = False) -> None:
        """Decide whether to restart a place that has ended. `well`: it ended by itself; `outside`: it was killed; `uncounted`:
        because something died that all places depend on."""
        wanted = [name for name in (instance_name(n, i) for n, i in child.place.members) if name in self.running]
        if self.ending or not wanted or child.up:
            return  # the run ends, or all were drained; or a drained one has just been started again
        if well and child.emptied:
            child.again_at = time.monotonic()  # all were drained, and some are wanted again
            return
        for name in lost:
            if name in self.running:
                self._stats[name].add("restarts")
        self._count_failure(child, lost, outside and not child.hung, child.hung or cause, uncounted)

    def _count_failure(self, child: L, lost: list[str], outside: bool, cause: str, uncounted: bool) -> None:
        """Count a failure and set the time of the restart. Deaths by a signal from outside are restarted without limit."""
        now, who = time.monotonic(), child.place.name
        if any(self._stats[name].get("steps") > child.steps[name] for name in lost):
            child.deaths = child.failures_without_step = child.deaths_while_starting = 0
        child.deaths += 1
        child.failures_without_step += not outside
        if not uncounted:
            child.deaths_while_starting = child.deaths_while_starting + 1 if outside and not child.ready else 0
        if not outside and not child.hung:
            child.errors.append(now)
        while child.errors and now - child.errors[0] > 60:
            child.errors.popleft()
        why = ""
        if len(child.errors) >= self.faults.exceptions_per_minute:
            why = f"failed {len(child.errors)} times within a minute"
        elif child.failures_without_step >= self.faults.deaths_without_step:
            why = f"died {child.failures_without_step} times without completing a step"
        elif child.deaths_while_starting >= DEATHS_WHILE_STARTING:
            why = (f"ended {child.deaths_while_starting} times before it could start (check that there is free memory and that "
                   "another process may be started)")
        if why:
            log = self.log_dir / f"{who}.log"
            raise RoleFailed(f"{who} {why}, last: {cause}\n{child.last_error or '(it left no traceback)'}\nits log: {log}")
        child.again_at = now + BACKOFF_SECONDS[min(child.deaths - 1, len(BACKOFF_SECONDS) - 1)]
        times = int(max((self._stats[name].get("restarts") for name in lost), default=0))
        self.event("restart", who, f"{cause}; restarted ({times} so far)")

    # ------------------------------------------------------------------ ending
    def wait(self, until: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not until() and time.monotonic() < deadline:
            self.turn()
