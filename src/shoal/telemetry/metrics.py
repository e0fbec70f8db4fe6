"""The registry of what roles measure, and `Stats`: how a role writes it down.

    role:       stats.add("env_steps", 32)   stats.observe("policy_lag", lags)   with stats.phase("env"): ...
    runtime:    one page of float64 words per role instance, in shared memory; it outlives the instance's incarnations
    supervisor: reads all pages, sums, and derives every rate (telemetry/snapshot.py)

Roles expose only cumulative numbers and gauges, never rates. A histogram is a sum, a count, a maximum and counts in
buckets with fixed edges, so that the mean, the 95th percentile and the maximum of any stretch of time can be computed
from two readings.

What an algorithm measures it declares itself (`Algorithm.metrics`); an architecture of your own adds what its roles measure to
`program.metrics`. Any other name raises. docs/metrics.md is generated from all that is declared (`make docs`).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import ProgramError, UnknownMetric

__all__ = ["PHASES", "REGISTRY", "Distribution", "Metric", "Stats", "distribution", "mean"]

PHASES = ("pull", "inference", "env", "write", "gather", "prepare", "learn", "publish", "evaluate", "checkpoint")

LAGS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096, 16384)
SECONDS = tuple(round(1e-4 * 10 ** (i / 6), 9) for i in range(43))  # 0.1 ms .. 1000 s, six per decade
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Metric:
    """One thing that is measured.

    counter: only grows; summed over instances and incarnations.     gauge: the newest value, of the first instance that set it.
    mean: a sum and a count.     histogram: a sum, a count, a maximum and counts in buckets (`edges` are upper ends).
    """

    name: str
    kind: str  # "counter" | "gauge" | "mean" | "histogram"
    unit: str
    text: str
    edges: tuple[float, ...] = ()
    summed: bool = False
    """Gauges only: show the sum over all instances, such as the shards of a table, not the value of one."""
    measured_by: str = ""
    """The part of a program that measures it. Programs without that part do not show it; "" shows it always."""

    def words(self) -> list[str]:
        """The names of the float64 words that hold it."""
        if self.kind == "mean":
            return [f"{self.name}/sum", f"{self.name}/count"]
        if self.kind == "histogram":
            buckets = [f"{self.name}/bucket{i}" for i in range(len(self.edges) + 1)]
            return [f"{self.name}/sum", f"{self.name}/count", f"{self.name}/max", *buckets]
        return [self.name]


INFO = "info"
"""What measures the numbers of environments' info; their metrics are called info.KEY."""

REGISTRY: tuple[Metric, ...] = (
    # every role
    Metric("steps", "counter", "steps", "Completed steps of the role: one step is one unit of its work."),
    Metric("busy_seconds", "counter", "s", "Time in which the role computed, waiting excluded."),
    Metric("alive", "gauge", "0 or 1", "1 while the instance runs."),
    Metric("incarnation", "gauge", "count", "How often the instance has been started, minus one."),
    Metric("heartbeat", "gauge", "s", "Monotonic clock at the end of the instance's last step."),
    Metric("restarts", "counter", "count", "Restarts after a death or a hang."),
    # acting
    Metric("env_steps", "counter", "decisions", "Agent decisions that were acted on in training environments."),
    Metric("env_frames", "counter", "frames", "Frames the environments simulated: env_steps times the frame-skip."),
    Metric("episodes", "counter", "episodes", "Training episodes that ended, by termination or truncation."),
    Metric("episode_return", "mean", "reward", "Undiscounted return of training episodes, with exploration."),
    Metric("episode_length", "mean", "decisions", "Length of training episodes."),
    Metric("env_restarts", "counter", "count", "Environments that raised and were made anew (--envs.restart-on-error)."),
    Metric("publish_to_use_seconds", "histogram", "s", "From publication of weights to their first use by an actor.",
           SECONDS),
    Metric("inference_batch", "histogram", "seats", "Seats in one forward pass of an inference server.", COUNTS),
    # learning
    Metric("learner_steps", "counter", "updates", "Optimiser steps; of a group of learners only the first one counts."),
    Metric("updates_skipped", "counter", "updates", "Updates left out because a loss or a gradient was not finite."),
    Metric("group_discarded", "counter", "updates", "Updates discarded because the group of learners changed."),
    Metric("results_refused", "counter", "results", "Results that a master left out: of an older task, or of a "
           "chunk that it knew already."),
    Metric("replicas_resynchronised", "counter", "times", "Workers that had drifted from the first one, and "
           "took over its state."),
    Metric("samples_consumed", "counter", "decisions", "Decisions that entered a batch, counted once per batch."),
    Metric("samples_masked", "counter", "decisions", "Decisions left out of a batch because their weights were too old."),
    Metric("gradients_stale", "counter", "gradients", "Gradients that a parameter server refused: too old, or of a version that "
           "it has not had since its restart."),
    Metric("gradients_outlying", "counter", "gradients", "Gradients that a learner kept back because their loss was an outlier."),
    Metric("gradient_age", "histogram", "versions", "Versions that the parameter server made while a gradient of replayed data "
           "was computed.", LAGS, measured_by="parameter server"),
    Metric("weights_version", "gauge", "version", "The newest published version of the weights."),
    Metric("policy_lag", "histogram", "versions", "Version at consumption minus version at generation.", LAGS),
    Metric("data_age_seconds", "histogram", "s", "Time from generation to consumption, per decision.", SECONDS),
    Metric("label_lag", "histogram", "versions", "Version at consumption minus the version that an item was relabelled with.", LAGS,
           measured_by="relabelling"),
    Metric("relabelled", "counter", "items", "Items that were recomputed and put into another table.",
           measured_by="relabelling"),
    Metric("encoder_updates", "counter", "updates", "Updates of the encoder by a representation learner.",
           measured_by="representation"),
    Metric("encoder_version", "gauge", "version", "The newest version of the encoder that it has published.",
           measured_by="representation"),
    Metric("encoder_lag", "histogram", "versions", "Versions that the encoder in a learner's update is behind the newest one when "
           "the update is made.", LAGS, measured_by="representation"),
    # a league
    Metric("league_games", "counter", "games", "Games that actors have played to their end.", measured_by="league"),
    Metric("league_reports", "counter", "games", "Results that the coordinator has entered into the payoff table.",
           measured_by="league"),
    Metric("league_snapshots", "counter", "snapshots", "Snapshots that were taken of players.", measured_by="league"),
    # replaying
    Metric("replay_inserts", "counter", "items", "Items that the replay table has taken in."),
    Metric("replay_samples", "counter", "items", "Items that it has handed out; the same one may be drawn often."),
    Metric("replay_size", "gauge", "items", "Items in the table now.", summed=True, measured_by="replay"),
    Metric("replay_bytes", "gauge", "bytes", "Bytes of their data, as they are stored: images compressed.", summed=True,
           measured_by="replay"),
    Metric("replay_checkpoint_bytes", "gauge", "bytes", "Size of the table in the last checkpoint; 0 where it is not saved.",
           summed=True, measured_by="replay"),
    Metric("insert_blocked_seconds", "counter", "s", "Time in which actors' items waited for the rate limiter.",
           measured_by="replay"),
    Metric("sample_blocked_seconds", "counter", "s", "Time in which a learner's batch waited for the rate limiter or for the "
           "first items.", measured_by="replay"),
    Metric("uncounted_samples", "counter", "items", "Items that a table has handed to readers that do not count: its rate limiter "
           "does not see them."),
    Metric("priority_updates", "counter", "items", "Priorities that a learner changed."),
    Metric("priority_updates_late", "counter", "items", "Priorities that came for items which had left the table; they touch "
           "nothing."),
    Metric("demo_size", "gauge", "items", "Items in the table of demonstrations.", summed=True, measured_by="demonstrations"),
    Metric("demo_bytes", "gauge", "bytes", "Bytes of their data.", summed=True, measured_by="demonstrations"),
    Metric("epochs", "gauge", "epochs", "How often a recording that is learned from alone was read.", measured_by="readers"),
    Metric("fqe", "gauge", "reward", "Fitted Q of the greedy policy where episodes begin, discounted by 0.99, on the recording "
           "that is learned from; with --until fqe.", measured_by="value estimator"),
    Metric("demo_samples", "counter", "items", "Items drawn from the demonstrations."),
    Metric("demo_priority_updates", "counter", "items", "Priorities of demonstrations that a learner changed."),
    Metric("log_episodes", "counter", "episodes", "Recorded episodes that log readers have put into a table; each again and "
           "again.", measured_by="log readers"),
    Metric("recorded_episodes", "counter", "episodes", "Episodes that actors have written to a folder of logs "
           "(--architecture.record).", measured_by="actors that record"),
    # evaluating
    Metric("eval_return", "gauge", "reward", "Mean return of the last evaluation, of one published version."),
    Metric("eval_std", "gauge", "reward", "Standard deviation of the returns of the last evaluation."),
    Metric("eval_episodes", "gauge", "episodes", "Episodes in the last evaluation."),
    Metric("eval_version", "gauge", "version", "Weights version of the last evaluation."),
    Metric("win_rate", "gauge", "share", "How often the last evaluation's matches were won, a draw counting half.",
           measured_by="matches"),
    Metric("loss_rate", "gauge", "share", "How often they were lost.", measured_by="matches"),
    Metric("exploitability", "gauge", "reward", "What a best response wins against the version of the last evaluation, played with "
           "its own probabilities; matrix games and Kuhn poker.", measured_by="exploitability"),
    Metric("eval_episodes_planned", "gauge", "episodes", "Episodes of the evaluation that is under way; 0 where none is."),
    Metric("eval_episodes_played", "gauge", "episodes", "Those of them that have ended."),
    Metric("eval_env_steps", "counter", "decisions", "Decisions spent on evaluation; they are not env_steps."),
    Metric("evaluations", "counter", "count", "Completed evaluations."),
)

KINDS = {metric.name: metric for metric in REGISTRY}


class _Phase:
    """`with stats.phase("env")`: adds the time spent inside, less that of phases and waits nested in it."""

    __slots__ = ("_nested", "_slot", "_start", "_stats")

    def __init__(self, stats: Stats, slot: int) -> None:
        self._stats, self._slot, self._start, self._nested = stats, slot, 0.0, 0.0

    def __enter__(self) -> None:
        self._nested, self._stats.nested = self._stats.nested, 0.0
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        elapsed = time.perf_counter() - self._start
        stats = self._stats
        stats.words[self._slot] += elapsed - stats.nested
        stats.nested = self._nested + elapsed


class _Index(dict[str, int]):
    """Where each word lies; a name that is not declared raises."""

    def __missing__(self, name: str) -> int:
        raise UnknownMetric(f"there is no metric {name.removesuffix('/sum')!r}; declare it: in `metrics` of the algorithm, in "
                            "program.metrics where an architecture of your own adds its roles, or, for a role inside the package, "
                            "in REGISTRY of shoal/telemetry/metrics.py")


class Stats:
    """One role instance's page of float64 words. Every method is a dictionary lookup and a few additions.

    `metrics` are those that the program has beyond the registry.
    """

    def __init__(self, names: Sequence[str], array: np.ndarray, metrics: Iterable[Metric] = ()) -> None:
        self._names = list(names)
        self._index = _Index((name, i) for i, name in enumerate(self._names))
        self._edges = {metric.name: metric.edges for metric in (*REGISTRY, *metrics) if metric.edges}
        self._edge_arrays = {name: np.array(edges) for name, edges in self._edges.items()}
        self.words: Any = array.data  # plain floats in and out: three times as fast as a NumPy scalar
        self._array = array
        self.nested = 0.0
        self._phases = {phase: _Phase(self, self._index[f"phase_seconds/{phase}"]) for phase in PHASES}

    @staticmethod
    def names(extra: Iterable[str] = (), metrics: Iterable[Metric] = ()) -> list[str]:
        """All words of a page: the registry's and those of `metrics`, one per phase, and `extra` ones such as
        wait_seconds/<wire>."""
        declared = set(KINDS)
        for metric in metrics:
            if metric.name in declared:
                raise ProgramError(f"the metric {metric.name} is declared twice; give it another name")
            declared.add(metric.name)
        words = [word for metric in (*REGISTRY, *metrics) for word in metric.words()]
        return [*words, *(f"phase_seconds/{p}" for p in PHASES), *extra]

    def __contains__(self, name: str) -> bool:
        return name in self._index or f"{name}/sum" in self._index

    def position(self, name: str) -> int:
        """Where a word lies in the page."""
        return self._index[name]

    def add(self, name: str, n: float = 1) -> None:
        self.words[self._index[name]] += n

    def set(self, name: str, x: float) -> None:
        self.words[self._index[name]] = x

    def get(self, name: str) -> float:
        return float(self.words[self._index[name]])

    def observe(self, name: str, values: np.ndarray | float) -> None:
        """Add one value, or an array of them, to a `mean` or a `histogram`."""
        start, words = self._index[f"{name}/sum"], self.words
        edges = self._edges.get(name)
        if isinstance(values, float | int):
            words[start] += values
            words[start + 1] += 1
            if edges is not None:
                words[start + 2] = max(words[start + 2], values)
                words[start + 3 + bisect_left(edges, values)] += 1
            return
        values = np.asarray(values, np.float64).ravel()
        if not values.size:
            return
        words[start] += float(np.add.reduce(values))
        words[start + 1] += values.size
        if edges is not None:
            words[start + 2] = max(words[start + 2], float(np.maximum.reduce(values)))
            counts = np.bincount(self._edge_arrays[name].searchsorted(values))
            self._array[start + 3 : start + 3 + len(counts)] += counts

    def phase(self, name: str) -> _Phase:
        return self._phases[name]

    def waited(self, wire: str, seconds: float) -> None:
        """Time suspended on a wire; a phase that contains the `await` does not count it."""
        self.words[self._index[f"wait_seconds/{wire}"]] += seconds
        self.nested += seconds

    def read(self) -> dict[str, float]:
        return dict(zip(self._names, self.words.tolist(), strict=False))


# ---------------------------------------------------------------------------------------------- reading
@dataclass(frozen=True)
class Distribution:
    """What can be said of a histogram. NaN where nothing was observed."""

    count: float = 0.0
    mean: float = math.nan
    p95: float = math.nan
    max: float = math.nan


def mean(now: Mapping[str, float], before: Mapping[str, float] | None, name: str) -> float:
    """The mean of what was observed between two readings (from the start without `before`)."""
    before = before or {}
    count = now.get(f"{name}/count", 0.0) - before.get(f"{name}/count", 0.0)
    total = now.get(f"{name}/sum", 0.0) - before.get(f"{name}/sum", 0.0)
    return total / count if count > 0 else math.nan


def distribution(now: Mapping[str, float], before: Mapping[str, float] | None, metric: Metric) -> Distribution:
    """Mean, 95th percentile and maximum of a histogram between two readings.

    The percentile of seconds interpolates inside its bucket; that of whole numbers is the bucket's upper end. The
    maximum is that of the whole run, or less where the buckets show that it lay outside this stretch.
    """
    before, name, edges = before or {}, metric.name, metric.edges
    counts = [now.get(word, 0.0) - before.get(word, 0.0) for word in metric.words()[3:]]
    total = sum(counts)
    if total <= 0:
        return Distribution()
    top = now.get(f"{name}/max", 0.0)
    highest = max(i for i, n in enumerate(counts) if n > 0)
    top = min(top, edges[highest]) if highest < len(edges) else top
    p95 = _percentile(edges, counts, 0.95, top, whole=metric.unit != "s")
    return Distribution(total, mean(now, before, name), min(p95, top), top)


def _percentile(edges: Sequence[float], counts: Sequence[float], share: float, top: float, whole: bool) -> float:
    target, seen = share * sum(counts), 0.0
    for i, n in enumerate(counts):
        if n > 0 and seen + n >= target:
            low = edges[i - 1] if i else 0.0
            high = edges[i] if i < len(edges) else top
            return float(high) if whole else low + (high - low) * (target - seen) / n
        seen += n
    return top
