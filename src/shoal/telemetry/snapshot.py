"""From cumulative numbers to what a user wants to know: rates, shares of time, distributions over a window.

    reading   what the runtime reports at one moment: per role instance every word of its page, per wire its counters
    Window    the readings of the last minute, and the one at the first environment step
    snapshot  one plain dictionary, derived from two readings; the console, metrics.jsonl, TensorBoard, summary.json and
              the live page all show this one

Everything is a difference between two readings divided by the time between them, so nothing can drift or be reset.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.telemetry.metrics import KINDS, PHASES, REGISTRY, distribution, mean

__all__ = ["COUNTERS", "Reading", "Window", "group_of"]

COUNTERS = tuple(metric.name for metric in REGISTRY if metric.kind == "counter" and metric.unit != "s")
LOSSES = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm", "learning_rate",
          "explained_variance", "mean_rho", "td_error", "q_mean", "q_max", "target_mean", "importance_min")
HISTOGRAMS = ("policy_lag", "data_age_seconds", "publish_to_use_seconds", "inference_batch")
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

    def gauge(self, name: str, witness: str) -> float:
        """The value of a gauge at the first instance that has done what the gauge speaks of; NaN without one."""
        for page in self.roles.values():
            if page.get(witness, 0.0) > 0:
                return page.get(name, math.nan)
        return math.nan


class Window:
    """Readings of the last `seconds`, the one at the first environment step, and the recent episodes' returns."""

    def __init__(self, seconds: float = 60.0, rate_seconds: float = 10.0) -> None:
        self._seconds, self._rate_seconds = seconds, rate_seconds
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
        recent = origin if whole_run else self._back(self._rate_seconds)
        before = origin if whole_run else max(origin, self._back(self._seconds), key=lambda reading: reading.time)
        elapsed = now.time - before.time
        shot: dict[str, Any] = {name: int(now.sums.get(name, 0)) for name in COUNTERS}
        shot["window_seconds"] = elapsed
        shot["weights_version"] = int(max((page.get("weights_version", 0) for page in now.roles.values()), default=0))
        for name in ("env_steps", "env_frames", "learner_steps"):
            shot[f"{name}_per_second"] = _rate(now, recent, name)
        shot["train_return"] = mean(now.sums, self._recent(), "episode_return")
        shot["train_length"] = mean(now.sums, self._recent(), "episode_length")
        for name in ("eval_return", "eval_std", "eval_episodes", "eval_version"):
            shot[name] = now.gauge(name, "eval_episodes")
        for name in HISTOGRAMS:
            shown = distribution(now.sums, None if whole_run or before is origin else before.sums, name)
            shot[name] = {"mean": shown.mean, "p95": shown.p95, "max": shown.max}
        env_steps = now.sums.get("env_steps", 0.0)
        shot["samples_per_insert"] = now.sums.get("samples_consumed", 0.0) / env_steps if env_steps else math.nan
        shot["bytes_per_env_step"] = _bytes_per_env_step(now, before)
        shot["bytes_per_second"] = _moved(now, before) / elapsed if elapsed > 0 else math.nan
        shot["learner_idle"] = _idle(now, before, elapsed)
        shot["losses"] = {name: now.gauge(name, "learner_steps") for name in LOSSES}
        shot["roles"] = {role: _role(now, before, elapsed, names) for role, names in _living(now.roles).items()}
        shot["wires"] = self._wires(now, before, elapsed, whole_run)
        shot["slots"] = _slots(now.wires)
        return shot

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
    """The books of all streams: written = consumed + dropped + held, but for slots that moved while they were read."""
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
    """The share of wall time in which those who learn did not compute."""
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
        "busy": _share(now, before, elapsed, "busy_seconds", names),
        "phases": {phase: share for phase, share in phases.items() if share > 0},
        "waits": {wire: share for wire, share in waits.items() if share > 0},
    }


assert set(HISTOGRAMS) <= set(KINDS) and set(LOSSES) <= set(KINDS)
