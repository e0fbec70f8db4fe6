"""From cumulative numbers to what a user wants to know: rates, shares of time, distributions over a window.

    Reading        what the runtime reports at one moment: per role instance every word of its page, per wire its counters
    ReadingWindow  the readings of the last minute, and the one at the first environment step
    snapshot       one plain dictionary, derived from two readings; the console, metrics.jsonl, TensorBoard and
                   summary.json all show this one

Everything is a difference between two readings divided by the time between them, so nothing can drift or be reset.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.telemetry.metrics import INFO, PHASES, REGISTRY, Metric, distribution, mean

__all__ = ["COUNTERS", "SHOWN_AS", "Reading", "ReadingWindow", "group_of"]

COUNTERS = tuple(metric.name for metric in REGISTRY if metric.kind == "counter" and metric.unit != "s")
SHOWN_AS = {
    "busy_seconds": "`busy` of each role in `roles`", "alive": "`instances` of each role in `roles`",
    "incarnation": "`restarts`, summed", "heartbeat": "nothing; the supervisor reads it to find instances that hang",
    "episode_return": "`train_return`", "episode_length": "`train_length`",
}
"""Metrics of the registry that a snapshot does not have under their own names, and where to find them instead."""
LATEST = ("eval_return", "eval_std", "eval_episodes", "eval_version", "weights_version")  # read in a way of their own
WIRE_COUNTERS = {"written", "dropped", "consumed", "torn", "retries", "asked", "late", "batches", "answered",
                 "discarded"}
RECENT_EPISODES = 100


def group_of(instance: str) -> str:
    """The role of an instance: "actor" for "actor-3"."""
    name, _, index = instance.rpartition("-")
    return name if name and index.isdigit() else instance


@dataclass(frozen=True)
class Reading:
    """Everything the runtime knows, at one moment."""

    time: float
    roles: Mapping[str, Mapping[str, float]]
    wires: Mapping[str, Mapping[str, float]]
    sums: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for page in self.roles.values():
            for name, value in page.items():
                if name.endswith("/max"):
                    self.sums[name] = max(self.sums.get(name, 0.0), value)
                else:
                    self.sums[name] = self.sums.get(name, 0.0) + value

    def evaluated(self, name: str) -> float:
        """A gauge of the first evaluator that has evaluated; NaN without one."""
        return next((page[name] for page in self.roles.values() if page.get("eval_episodes", 0.0) > 0), math.nan)

    def lives(self, instance: str) -> bool:
        return self.roles.get(instance, {}).get("alive", 0.0) > 0


class ReadingWindow:
    """Readings of the last `seconds`, the one at the first environment step, and the recent episodes' returns.

    `algorithm_metrics` and `role_metrics` are what the program's algorithm and its roles declare beyond the registry. `policies`
    are the names of several policies: the roles of each are called policy.role.
    """

    def __init__(self, seconds: float = 60.0, rate_seconds: float = 10.0, *, algorithm_metrics: Sequence[Metric] = (),
                 role_metrics: Sequence[Metric] = (), policies: Sequence[str] = ()) -> None:
        self._seconds, self._rate_seconds = seconds, rate_seconds
        self._algorithm_metrics, self._role_metrics = tuple(algorithm_metrics), tuple(role_metrics)
        self._policies = tuple(policies)
        self._registry = [metric for metric in REGISTRY if metric.name not in SHOWN_AS and metric.name not in LATEST]
        declared = (*self._registry, *self._algorithm_metrics, *self._role_metrics)
        self._counters = [metric for metric in declared if metric.kind == "counter"]
        self._histograms = [metric for metric in declared if metric.kind == "histogram"]
        self.counters = tuple(metric.name for metric in self._counters)
        self._writers: dict[tuple[str, ...], str] = {}  # gauges -> the instance that they are read from
        self._readings: deque[Reading] = deque()
        self._returns: deque[tuple[float, dict[str, float]]] = deque()  # (episodes so far, their sums)
        self._occupancy: dict[str, tuple[float, float]] = {}  # wire -> (seconds seen, occupied share times seconds)
        self._occupied: deque[tuple[float, dict[str, float]]] = deque()
        self.first: Reading | None = None  # the first one that has seen an environment step, or offline an update

    def push(self, reading: Reading) -> None:
        if self.first is None and reading.sums.get("env_steps", 0) + reading.sums.get("learner_steps", 0) > 0:
            self.first = reading
        self._readings.append(reading)
        while len(self._readings) > 2 and self._readings[1].time <= reading.time - self._seconds:
            self._readings.popleft()
        episodes = reading.sums.get("episode_return/count", 0.0)
        kept = ("episode_return/sum", "episode_return/count", "episode_length/sum", "episode_length/count")
        self._returns.append((episodes, {name: reading.sums.get(name, 0.0) for name in kept}))
        while len(self._returns) > 1 and self._returns[1][0] <= episodes - RECENT_EPISODES:
            self._returns.popleft()

    def sample_occupancy(self, now: float, wires: Mapping[str, Mapping[str, float]]) -> None:
        """Called often: how full the streams are, for a time-weighted mean."""
        shares = {name: wire["occupied"] / wire["slots"] for name, wire in wires.items() if wire.get("slots")}
        self._occupied.append((now, shares))
        while len(self._occupied) > 2 and self._occupied[0][0] < now - self._rate_seconds:
            self._occupied.popleft()
        if len(self._occupied) > 1:
            elapsed = now - self._occupied[-2][0]
            for name, share in shares.items():
                seconds, total = self._occupancy.get(name, (0.0, 0.0))
                self._occupancy[name] = (seconds + elapsed, total + share * elapsed)

    def _back(self, seconds: float) -> Reading:
        """The newest reading at least `seconds` old, or the oldest there is."""
        now = self._readings[-1].time
        for reading in reversed(self._readings):
            if reading.time <= now - seconds:
                return reading
        return self._readings[0]

    def snapshot(self, whole_run: bool = False) -> dict[str, Any]:
        """What to show now: rates over the last ten seconds, shares of time and distributions over the last minute;
        with `whole_run`, everything since the first environment step."""
        now = self._readings[-1]
        origin = self.first or self._readings[0]
        recent = origin if whole_run else self._since(origin, self._rate_seconds)
        before = origin if whole_run else self._since(origin, self._seconds)
        elapsed = now.time - before.time
        since = None if whole_run or before is origin else before.sums
        shot: dict[str, Any] = self._declared(now, since)
        shot["window_seconds"] = elapsed
        shot["weights_version"] = int(max((page.get("weights_version", 0) for page in now.roles.values()), default=0))
        for name in ("env_steps", "env_frames", "learner_steps"):
            shot[f"{name}_per_second"] = _rate(now, recent, name)
        shot["train_return"] = mean(now.sums, self._recent(), "episode_return")
        shot["train_length"] = mean(now.sums, self._recent(), "episode_length")
        for name in ("eval_return", "eval_std", "eval_episodes", "eval_version"):
            shot[name] = now.evaluated(name)
        env_steps = now.sums.get("env_steps", 0.0)
        shot["samples_per_insert"] = now.sums.get("samples_consumed", 0.0) / env_steps if env_steps else math.nan
        shot["bytes_per_env_step"] = _bytes_per_env_step(now, before)
        shot["bytes_per_second"] = _moved(now, before) / elapsed if elapsed > 0 else math.nan
        shot["learner_idle"] = _idle(now, before, elapsed)
        shot["roles"] = {role: _role(now, before, elapsed, names) for role, names in _living(now.roles).items()}
        shot["wires"] = self._wires(now, before, elapsed, whole_run)
        shot["slots"] = _slots(now.wires)
        if self._policies:
            shot["policies"] = {name: self._policy(name, now, since) for name in self._policies}
        return shot

    def _policy(self, name: str, now: Reading, since: Mapping[str, float] | None) -> dict[str, Any]:
        """What the roles of one of several policies have written."""
        pages = [page for role, page in now.roles.items() if role.startswith(f"{name}.")]
        judged: Mapping[str, float] = next((page for page in pages if page.get("eval_episodes", 0.0) > 0), {})
        learner: Mapping[str, float] = next((page for page in pages if page.get("learner_steps", 0.0) > 0), {})
        losses = {metric.name: learner.get(metric.name, math.nan) for metric in self._algorithm_metrics if metric.kind == "gauge"}
        return {"learner_steps": int(sum(page.get("learner_steps", 0.0) for page in pages)),
                "weights_version": int(max((page.get("weights_version", 0.0) for page in pages), default=0)),
                **{word: judged.get(word, math.nan) for word in ("eval_return", "eval_std", "eval_episodes", "eval_version")},
                "train_return": mean(now.sums, since, f"{name}.episode_return"), "losses": losses}

    def _since(self, origin: Reading, seconds: float) -> Reading:
        """The reading `seconds` ago, but none from before the first environment step."""
        return max(origin, self._back(seconds), key=lambda reading: reading.time)

    def _declared(self, now: Reading, since: Mapping[str, float] | None) -> dict[str, Any]:
        """What is declared, by kind. An algorithm's gauges and means are its `losses`, those of a program's own roles are its
        `role_metrics`; everything else has its own name."""
        measured = {metric.measured_by for metric in self._registry if any(now.sums.get(word) for word in metric.words())} | {""}
        shot: dict[str, Any] = {}
        for metric in self._counters:
            if metric.measured_by in measured:
                total = now.sums.get(metric.name, 0.0)
                shot[metric.name] = total if metric.unit == "s" else int(total)
        for metric in self._histograms:
            if metric.measured_by in measured:
                shown = distribution(now.sums, since, metric)
                shot[metric.name] = {"mean": shown.mean, "p95": shown.p95, "max": shown.max}
        shot |= self._values(now, since, [metric for metric in self._registry if metric.measured_by in measured])
        shot["losses"] = {}
        for part in dict.fromkeys(metric.measured_by for metric in self._algorithm_metrics):
            own = [metric for metric in self._algorithm_metrics if metric.measured_by == part]
            together = tuple(metric.name for metric in own if metric.kind == "gauge")
            shot["losses"] |= self._values(now, since, own, together)
        own = [metric for metric in self._role_metrics if metric.measured_by != INFO]
        logged = [metric for metric in self._role_metrics if metric.measured_by == INFO]
        if own:
            shot["role_metrics"] = self._values(now, since, own)
        if logged:
            shot["info"] = {name.removeprefix(f"{INFO}."): value for name, value in self._values(now, since, logged).items()}
        return shot

    def _values(self, now: Reading, since: Mapping[str, float] | None, metrics: Iterable[Metric],
                together: tuple[str, ...] = ()) -> dict[str, float]:
        """The gauges and the means among `metrics`; gauges that are written `together` are read from one instance."""
        values: dict[str, float] = {}
        for metric in metrics:
            if metric.kind == "mean":
                values[metric.name] = mean(now.sums, since, metric.name)
            elif metric.kind == "gauge":
                values[metric.name] = now.sums.get(metric.name, 0.0) if metric.summed \
                    else self._gauge(now, metric.name, together or (metric.name,))
        return values

    def _gauge(self, now: Reading, name: str, together: tuple[str, ...]) -> float:
        """A gauge of the first instance that has set it, or one of those written `together` with it, for as long as that
        instance lives. Pages begin with 0, so it counts as set once it is not 0; NaN until then."""
        writer = self._writers.get(together)
        if writer is None or not now.lives(writer):
            wrote = [instance for instance, page in now.roles.items() if any(page.get(word) for word in together)]
            writer = next((instance for instance in wrote if now.lives(instance)), writer or next(iter(wrote), None))
        if writer is None:
            return math.nan
        self._writers[together] = writer
        return now.roles.get(writer, {}).get(name, math.nan)

    def _recent(self) -> dict[str, float] | None:
        episodes, sums = self._returns[0]
        return sums if self._returns[-1][0] - episodes >= RECENT_EPISODES else None

    def _wires(self, now: Reading, before: Reading, elapsed: float, whole_run: bool) -> dict[str, dict[str, float]]:
        """Per wire: how full it was, and how fast each of its counters grew. (Who waited for it: see the roles.)"""
        shown: dict[str, dict[str, float]] = {}
        for wire, counters in now.wires.items():
            old = before.wires.get(wire, {})
            shown[wire] = {"occupancy": self._occupancy_of(wire, whole_run)} if counters.get("slots") else {}
            for name in sorted(WIRE_COUNTERS & counters.keys()):
                grown = counters[name] - old.get(name, 0.0)
                shown[wire][f"{name}_per_second"] = grown / elapsed if elapsed > 0 else math.nan
            if counters.get("dropped"):
                shown[wire]["dropped"] = counters["dropped"]
        return shown

    def _occupancy_of(self, wire: str, whole_run: bool) -> float:
        if whole_run:
            seconds, total = self._occupancy.get(wire, (0.0, 0.0))
            return total / seconds if seconds else math.nan
        shares = [shares[wire] for _, shares in self._occupied if wire in shares]
        return sum(shares) / len(shares) if shares else math.nan


def _slots(wires: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The totals of all streams: written = consumed + dropped + held, but for slots that moved while they were read."""
    streams = [counters for counters in wires.values() if counters.get("slots")]
    totals = {name: int(sum(counters[name] for counters in streams)) for name in ("written", "consumed", "dropped")}
    held = int(sum(counters["occupied"] for counters in streams))
    return {**totals, "held": held, "conserved": all(counters.get("conserved", 1.0) for counters in wires.values())}


def _living(roles: Mapping[str, Mapping[str, float]]) -> dict[str, list[str]]:
    """Role -> the instances that run now; elastic graphs have pages for more than there are."""
    groups: dict[str, list[str]] = {}
    for instance, page in roles.items():
        if page.get("alive", 0) > 0:
            groups.setdefault(group_of(instance), []).append(instance)
    return groups


def _rate(now: Reading, before: Reading, name: str) -> float:
    elapsed = now.time - before.time
    return (now.sums.get(name, 0.0) - before.sums.get(name, 0.0)) / elapsed if elapsed > 0 else math.nan


def _bytes_per_env_step(now: Reading, before: Reading) -> float:
    """What went through the wires, each byte counted once where it is handed over, per decision."""
    steps = now.sums.get("env_steps", 0.0) - before.sums.get("env_steps", 0.0)
    return _moved(now, before) / steps if steps > 0 else math.nan


def _moved(now: Reading, before: Reading) -> float:
    return sum(counters.get("bytes_moved", 0.0) - before.wires.get(wire, {}).get("bytes_moved", 0.0)
               for wire, counters in now.wires.items())


def _share(now: Reading, before: Reading, elapsed: float, word: str, names: Iterable[str]) -> float:
    """Seconds of `word` per second of wall time, averaged over those of `names` that have the word."""
    grown = [now.roles[n][word] - before.roles.get(n, {}).get(word, 0.0) for n in names if word in now.roles[n]]
    return sum(grown) / len(grown) / elapsed if grown and elapsed > 0 else 0.0


def _waits(page: Mapping[str, float]) -> list[str]:
    return [word for word in page if word.startswith("wait_seconds/")]


def _idle(now: Reading, before: Reading, elapsed: float) -> float:
    """The share of wall time in which the learners did not compute."""
    first = next((name for name, page in now.roles.items() if page.get("learner_steps", 0) > 0), None)
    if first is None or elapsed <= 0:
        return math.nan
    names = _living(now.roles).get(group_of(first), [first])
    return min(1.0, max(0.0, 1.0 - _share(now, before, elapsed, "busy_seconds", names)))


def _role(now: Reading, before: Reading, elapsed: float, names: list[str]) -> dict[str, Any]:
    """One role's time: shares of wall time by phase and by wire, averaged over its instances."""
    phases = {phase: _share(now, before, elapsed, f"phase_seconds/{phase}", names) for phase in PHASES}
    waits = {word.partition("/")[2]: _share(now, before, elapsed, word, names) for word in _waits(now.roles[names[0]])}
    return {
        "instances": len(names),
        "steps_per_second": sum(now.roles[n].get("steps", 0.0) - before.roles.get(n, {}).get("steps", 0.0)
                                for n in names) / elapsed if elapsed > 0 else math.nan,
        "busy": min(1.0, _share(now, before, elapsed, "busy_seconds", names)),  # a step counts when it ends: it may be longer
        "phases": {phase: share for phase, share in phases.items() if share > 0},
        "waits": {wire: share for wire, share in waits.items() if share > 0},
    }
