"""`--actors auto`, during the run: the number of actors follows the learner (Little's law, and a controller with patience).

    windows of telemetry ──▶ Rule (pure) ──▶ decision ──▶ control.scale("actor", n), and an event that says why
             ▲                                                   │
             └──────── nothing is looked at until the new ones act and the queue has passed once ◀┘

With n actors, of which a share b of the time is spent blocked on a full queue, and learners that wait a share f of theirs, the
learner could take n (1 - b) / (1 - f) actors' worth of data. So:

    more    f > 0.02 (twice, or above 0.1 once): n / (1 - f) of them, at most twice as many
    fewer   the queue is full and b is more than it would be with n - 1 actors and 10 % headroom, in 3 windows on end: n - 1
    back    an increase that brought less than half of what it should have: the cores are used up. What it brought is kept, and
            the number stays below until an actor's own rate has changed, or for long. A decrease that had to be taken back is
            not tried again either, until the learner needs fewer
    lag     none are added while the data are older than the limit; if they stay so, one goes

A window in which somebody was started, drained or restarted is not judged, nor is one in which something was not measured.
Two thresholds that cannot both hold for neighbouring numbers are what keeps it from oscillating.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError
from shoal.options import Options, number

if TYPE_CHECKING:
    from shoal.runtime import Supervisor

__all__ = ["AutoscaleConfig", "Autoscaler", "Decision", "LoadWindow", "Rule"]

IDLE = 0.02          # of their time that learners may wait
STARVED = 0.1        # where one window is enough
FULL = 0.8           # of the living actors' slots in use
HEADROOM = 0.1       # more supply than demand, for the number to be lowered
PATIENCE = 3         # windows on end
GAIN = 0.5           # of what an increase should have brought
SAME = (0.75, 1.33)  # what was measured, compared with what it was: within these it has not changed
RETRY_WINDOWS = 60   # until more actors are tried again on cores that were used up; twice as long each time
WARM_UPDATES = 2
SLOTS_PER_ACTOR = 4  # unrolls in a window, or it is not one yet
ACTORS_PER_CORE = 4  # by default: a process that waits for a simulator needs no core of its own


@dataclass(frozen=True)
class AutoscaleConfig(Options):
    """With --actors auto: how the number of actors moves during the run."""

    section = "autoscale"

    start: int | None = number(None, at_least=1)
    """Begin with this many actors; none finds the beginning by calibration."""
    most: int | None = number(None, at_least=1)
    """The most actors there may be; none allows four for each core of this machine, or one for each CPU of a cluster."""
    every_seconds: float = number(2.0, at_least=0.1)
    """Time between two decisions, at least."""
    max_lag: float | None = number(None, above=0, infinite=True)
    """Add no actor while data are more versions old than this, on average; none takes the algorithm's limit, if it has one."""

    def validate(self) -> None:
        super().validate()
        if self.start is not None and self.most is not None and self.start > self.most:
            raise ConfigError(f"--autoscale.start {self.start} is more than --autoscale.most {self.most}; lower it")


@dataclass(frozen=True)
class LoadWindow:
    """What a stretch of time has shown. NaN where something was not measured."""

    actors: int
    supply: float
    """Env steps per second of all of them."""
    idle: float
    """Share of their time that learners waited for data."""
    blocked: float
    """Share of their time that actors waited for a free slot."""
    occupied: float
    """Share of the actors' slots that are full or being written."""
    lag: float = 0.0
    """Versions that the data were old, on average."""
    steady: bool = True
    """Whether the same actors and learners were there from its beginning to its end."""
    room: float = math.inf
    """How many more could be started now."""


@dataclass(frozen=True)
class Decision:
    """How many from now on, and why; what holds a wish back has a word of its own, so that it is told once."""

    actors: int
    reason: str = ""
    hindrance: str = ""


@dataclass
class _Attempt:
    """An increase that has yet to show what it brings."""

    actors: int
    supply: float
    rate: float
    expected: float
    seen: list[float] = field(default_factory=list)  # supplies since then


@dataclass
class _Bound:
    """A number that was found to be the most that do any good, or the least that are enough; and what was so at that time (the
    rate of one actor, or how many the learner could take), without which it does not hold any more."""

    actors: int
    then: float
    windows: float = math.inf  # that it holds for at most
    why: str = ""
    doubts: int = 0

    def holds(self, now: float) -> bool:
        self.doubts = 0 if SAME[0] <= now / self.then <= SAME[1] else self.doubts + 1
        self.windows -= 1
        return self.doubts < PATIENCE and self.windows > 0


class Rule:
    """Windows in, decisions out; it knows no clock and no process."""

    def __init__(self, least: int, most: int, max_lag: float | None = None) -> None:
        self.least, self.most, self.max_lag = least, most, max_lag
        self._hungry = self._full = self._late = 0  # windows on end
        self._attempt: _Attempt | None = None
        self._ceiling: _Bound | None = None
        self._floor: _Bound | None = None
        self._lowered = False  # whether the last change was one
        self._retry = RETRY_WINDOWS

    def hear(self, window: LoadWindow) -> Decision:
        n = window.actors
        measured = (window.supply, window.idle, window.blocked, window.occupied)
        if not window.steady or n < 1 or not all(math.isfinite(x) for x in measured) or window.supply <= 0:
            self._hungry = self._full = self._late = 0
            return Decision(n)
        rate = window.supply / (n * max(1.0 - window.blocked, 0.05))  # of an actor that is not blocked
        needed = n * max(1.0 - window.blocked, 0.05) / max(1.0 - window.idle, 0.05)
        if self._ceiling is not None and not self._ceiling.holds(rate):
            self._ceiling = None
        if self._floor is not None and not self._floor.holds(needed):
            self._floor = None
        attempt, self._attempt = self._attempt, None
        decision = (self._back(window, attempt) if attempt is not None else None) or self._lagging(window, rate) \
            or self._up(window, rate) or self._down(window)
        if decision is None:
            return Decision(n)
        if decision.actors != n:
            self._hungry = self._full = self._late = 0
            if decision.actors > n and self._lowered:
                self._floor = _Bound(n + 1, needed)  # one less was tried just now, and was too few
            self._lowered = decision.actors < n
        return decision

    def _back(self, window: LoadWindow, attempt: _Attempt) -> Decision | None:
        n = window.actors
        attempt.seen.append(window.supply)
        gain = sum(attempt.seen) / len(attempt.seen) - attempt.supply
        if n <= attempt.actors or window.idle <= IDLE or gain >= GAIN * attempt.expected:
            return None
        if len(attempt.seen) < PATIENCE:  # one window may be a bad one
            self._attempt = attempt
            return Decision(n)
        useful = min(n - 1, attempt.actors + max(0, math.floor(gain / attempt.rate)))
        self._ceiling = _Bound(useful, attempt.rate, self._retry, f"more than {useful} brought nothing: the cores are used up")
        self._retry *= 2
        return Decision(useful, f"{n} brought {gain:+,.0f} env steps/s in the place of {attempt.expected:+,.0f}: the cores are "
                                "used up; a larger batch, or fewer environments per actor")

    def _lagging(self, window: LoadWindow, rate: float) -> Decision | None:
        if self.max_lag is None or not window.lag > self.max_lag:
            self._late = 0
            return None
        n, text = window.actors, f"data are {window.lag:.1f} versions old, the limit is {self.max_lag:g}"
        self._late += 1
        self._hungry = self._full = 0
        if self._late < PATIENCE or n <= self.least:
            return Decision(n, f"{text}: none are added", "lag")
        self._ceiling = _Bound(n - 1, rate, why=f"with more, {text}")
        return Decision(n - 1, text)

    def _up(self, window: LoadWindow, rate: float) -> Decision | None:
        n, idle = window.actors, min(window.idle, 0.99)
        self._hungry = self._hungry + 1 if idle > IDLE else 0
        if idle <= STARVED and self._hungry < 2:
            return None
        self._full = 0
        text = f"learners waited {_percent(idle)} of the time for data"
        if 1 - idle >= (1 + HEADROOM) * (1 - window.blocked):
            return Decision(n, f"{text}, and actors {_percent(window.blocked)} for them: the queue is too short, not the actors "
                               "too few; more --architecture.slots-per-actor", "queue")
        wanted = min(n + max(1, math.ceil(n * idle / (1 - idle) - 1e-9)), 2 * n)
        ceiling = self._ceiling.actors if self._ceiling else wanted
        allowed = int(min(wanted, self.most, ceiling, n + window.room))
        if allowed <= n:
            held = self._ceiling.why if self._ceiling and ceiling <= n else "there is no room for more"
            held = f"{self.most} are the most (--autoscale.most)" if n >= self.most else held
            return Decision(n, f"{text}, but {held}", held)
        self._attempt = _Attempt(n, window.supply, rate, min((allowed - n) * rate, window.supply * idle / (1 - idle)))
        return Decision(allowed, text)

    def _down(self, window: LoadWindow) -> Decision | None:
        n, least = window.actors, max(self.least, self._floor.actors if self._floor else 0)
        spare = window.blocked > 1 - (n - 1) / (n * (1 + HEADROOM))  # one less would still be enough
        self._full = self._full + 1 if spare and window.occupied > FULL and n > least else 0
        if self._full < PATIENCE:
            return None
        return Decision(n - 1, f"actors were blocked {_percent(window.blocked)} of the time on a full queue, in {PATIENCE} windows "
                               "on end")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


@dataclass(frozen=True)
class _Mark:
    """The beginning of a window: all counters at that moment."""

    time: float
    pages: Mapping[str, Mapping[str, float]]
    wire: Mapping[str, float]
    actors: frozenset[str]


class Autoscaler:
    """Looks at a running program about ten times a second, from its session, and scales one of its roles."""

    def __init__(self, rule: Rule, every_seconds: float, *, role: str = "actor", learner: str = "learner",
                 stream: str = "unrolls") -> None:
        self.rule, self.every_seconds = rule, every_seconds
        self.role, self.learner, self.stream = role, learner, stream
        self._mark: _Mark | None = None
        self._held: list[float] = []  # full slots, as often as it was looked at
        self._changing = False
        self._quiet_until = 0.0
        self._said = ""

    def tick(self, control: Supervisor, now: float) -> None:
        if self._changing or now < self._quiet_until or control.total("learner_steps") < WARM_UPDATES:
            self._mark = None
            return
        wire = control.wires()[self.stream]
        if self._mark is None:
            self._mark, self._held = self._look(control, now, wire), []
            return
        self._held.append(wire["occupied"])
        enough = max(2, len(self._mark.actors)) * SLOTS_PER_ACTOR
        if now - self._mark.time >= self.every_seconds and wire["consumed"] - self._mark.wire["consumed"] >= enough:
            before, self._mark = self._mark, self._look(control, now, wire)
            self._decide(control, self._window(before, self._mark, control.room(self.role)), before)
            self._held = []

    def _look(self, control: Supervisor, now: float, wire: Mapping[str, float]) -> _Mark:
        actors = frozenset(name for name, (node, _) in control.running.items() if node == self.role)
        return _Mark(now, control.snapshot(), wire, actors)

    def _decide(self, control: Supervisor, window: LoadWindow, before: _Mark) -> None:
        decision = self.rule.hear(window)
        if decision.actors == window.actors:
            if decision.hindrance and decision.hindrance != self._said:
                control.event("autoscale", self.role, f"{window.actors} actors stay: {decision.reason}")
                self._said = decision.hindrance
            return
        assert self._mark is not None
        consumed = (self._mark.wire["consumed"] - before.wire["consumed"]) / (self._mark.time - before.time)
        drain = decision.actors * self._mark.wire["slots"] / self.rule.most / max(consumed, 1e-9)
        self._changing, self._said = True, ""

        def done(result: Any, error: str | None) -> None:
            self._changing = False
            self._quiet_until = time.monotonic() + min(drain, 10 * self.every_seconds) + 0.25 * self.every_seconds

        control.event("autoscale", self.role, f"{window.actors} -> {decision.actors} actors: {decision.reason}")
        control.scale(self.role, decision.actors, done=done)

    def _window(self, before: _Mark, now: _Mark, room: float) -> LoadWindow:
        n, seconds = len(now.actors), now.time - before.time
        learners = [name for name, page in now.pages.items() if name.rpartition("-")[0] == self.learner and page["alive"]]

        def grown(names: Any, word: str) -> float:
            return sum(now.pages[name][word] - before.pages[name][word] for name in names)

        def share(names: Any) -> float:
            waited = grown(names, f"wait_seconds/{self.stream}")
            return min(1.0, max(0.0, waited / len(names) / seconds)) if names else math.nan

        steady = now.actors == before.actors and all(
            page[name]["alive"] and page[name]["restarts"] == before.pages[name]["restarts"]
            for page in (before.pages, now.pages) for name in (*now.actors, *learners))
        blocked, count = share(now.actors), grown(learners, "policy_lag/count")
        per_actor = now.wire["slots"] / self.rule.most
        occupied = (sum(self._held) / len(self._held) + n * (1 - blocked)) / (n * per_actor) if self._held and n else math.nan
        return LoadWindow(n, grown(now.pages, "env_steps") / seconds, share(learners), blocked, occupied,
                          grown(learners, "policy_lag/sum") / count if count else math.nan, steady, room)
