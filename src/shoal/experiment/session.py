"""What drives a run from above the runtime: stop conditions, checkpoints, snapshots into sinks, summary.json.

    runtime:  session.begin(control)
              loop: session.tick(control)        # after every round (inline), about ten times a second (local)
              session.end(control, reason, error)

It computes no reinforcement learning and starts no process. On a resumed run the totals of the earlier parts are added
to every counter, so env_steps never runs backwards.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.experiment.checkpoints import Checkpoints
from shoal.experiment.cpu import cpu_seconds
from shoal.experiment.memory import PeakMemory
from shoal.experiment.rundir import RunDir
from shoal.telemetry.sinks import Sink, jsonable
from shoal.telemetry.snapshot import COUNTERS, Reading, Window
from shoal.telemetry.verdict import verdict

if TYPE_CHECKING:
    from shoal.coordination.autoscale import Autoscaler
    from shoal.runtime import Supervisor

__all__ = ["Base", "Goals", "RunSession"]

GLANCE_SECONDS = 0.1    # stop conditions, events, how full the streams are
SNAPSHOT_SECONDS = 1.0
RETRY_SECONDS = 5.0     # after a checkpoint that failed
LAST_CHECKPOINT_SECONDS = 30.0
BATCH_SECONDS = 30.0    # without an update, until it is said that the first batch is not full yet


@dataclass(frozen=True)
class Goals:
    """When to stop. None: never for this reason."""

    until_return: float | None = None
    max_env_steps: int | None = None
    max_learner_steps: int | None = None
    max_seconds: float | None = None


@dataclass(frozen=True)
class Base:
    """What the earlier parts of a resumed run add up to."""

    totals: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    peak_memory_mb: float = 0.0
    cpu_seconds: float = 0.0
    snapshot: Mapping[str, Any] = field(default_factory=dict)  # the last one: returns, until there are new ones


class RunSession:
    """One part of a run: from `shoal train` or `shoal resume` to its end."""

    def __init__(self, rundir: RunDir, labels: Mapping[str, Any], goals: Goals, *, checkpoint_seconds: float, keep: int,
                 sinks: Sequence[Sink], base: Base | None = None, started: float | None = None,
                 autoscaler: Autoscaler | None = None, batch_slots: int = 0) -> None:
        self.rundir, self.labels, self.goals, self.base = rundir, dict(labels), goals, base or Base()
        self.checkpoints: Checkpoints = rundir.checkpoints(keep)
        self.summary: dict[str, Any] = {}
        self._checkpoint_seconds, self._sinks, self._batch_slots = checkpoint_seconds, list(sinks), batch_slots
        self._started = time.monotonic() if started is None else started
        self._window, self._memory, self._autoscaler = Window(), PeakMemory(), autoscaler
        self._first_step: float | None = None
        self._cpu_before = 0.0  # processor time at the first step
        self._best, self._lowest = -math.inf, math.inf
        self._glance_at = self._snapshot_at = 0.0
        self._checkpoint_at = math.inf
        self._writing: Path | None = None
        self._number = 0
        self._interrupted = False
        self._checkpoint_failed: str | None = None  # why the last one could not be written
        self._outcome: tuple[str | None, str | None] = (None, None)  # why it ended, and the error; a late checkpoint knows them too
        self._control: Supervisor | None = None

    @property
    def begun(self) -> bool:
        """Whether the runtime has said anything yet; one that fails without a word has started no role."""
        return self._control is not None

    # ------------------------------------------------------------------ called by the runtime
    def begin(self, control: Supervisor) -> None:
        self._control = control
        self.checkpoints.clear_torn()
        whole = self.checkpoints.newest() is not None
        self._checkpoint_at = time.monotonic() + (self._checkpoint_seconds if whole else 0.0)  # one exists from step 0
        self.tick(control)

    def tick(self, control: Supervisor) -> None:
        done = {name: control.total(name) for name in ("env_steps", "learner_steps")}
        for name, steps in done.items():  # asked in every round, so that an inline run always stops at the same step
            limit = getattr(self.goals, f"max_{name}")
            if limit is not None and self.base.totals.get(name, 0) + steps >= limit:
                control.stop(name)
        now, begun = time.monotonic(), any(done.values())  # offline there are updates only
        if now < self._glance_at and not (self._first_step is None and begun):
            return
        self._glance_at = now + GLANCE_SECONDS
        self._glance(control, now, begun)
        if now >= self._snapshot_at:
            self._snapshot_at = now + SNAPSHOT_SECONDS
            self._report(control, now)
        if now >= self._checkpoint_at and self._writing is None and control.complete():
            self._checkpoint_at = now + self._checkpoint_seconds
            self._save(control)

    def saved(self, folder: Path, ok: bool) -> None:
        """Every role has written its file, or one could not."""
        self._writing = None
        if not ok:
            self.checkpoints.abandon(folder)
            self._failed("not all roles could write")
            return
        shot = self._measure(time.monotonic())
        meta = {"totals": {name: shot[name] for name in COUNTERS}, "env_steps": shot["env_steps"],
                "learner_steps": shot["learner_steps"], "seconds": shot["seconds"], "time": time.time()}
        try:
            self.checkpoints.commit(folder, meta)
            self._checkpoint_failed = None
            self._write_summary()
        except OSError as error:
            self._failed(str(error))

    def newest(self) -> Path | None:
        return self.checkpoints.newest()

    def end(self, control: Supervisor, reason: str, error: str | None) -> None:
        self._control = control  # where a role could not be made it ends before it has begun
        done = any(control.total(name) for name in ("env_steps", "learner_steps"))
        if reason != "failure" and (done or control.complete()):  # else roles were still starting: there is nothing to keep
            if self._writing is None:
                self._save(control)
            control.settle(LAST_CHECKPOINT_SECONDS)
            if self._writing is not None:
                self._failed(f"not all roles could write within {LAST_CHECKPOINT_SECONDS:g} s")
        self._report(control, time.monotonic(), last=True)
        self._outcome = reason, error
        self._try(self._write_summary)
        for sink in self._sinks:
            self._try(sink.close)

    # ------------------------------------------------------------------ called by the experiment
    def interrupt(self) -> None:
        """Ctrl-C: stop at the next tick, with a checkpoint and a summary."""
        self._interrupted = True

    def abandon(self) -> None:
        """The run was refused before it began: nothing is to be reported any more."""
        for sink in self._sinks:
            self._try(sink.close)

    def announce(self, kind: str, text: str) -> None:
        """What was decided before the run."""
        self._event({"kind": kind, "text": text})

    # ------------------------------------------------------------------ watching
    def _glance(self, control: Supervisor, now: float, begun: bool) -> None:
        if self._first_step is None and begun:
            self._first_step, self._cpu_before = now, cpu_seconds()
            self._measure(now)
        self._window.sample_occupancy(now, control.wires())
        if self._autoscaler is not None:
            self._autoscaler.tick(control, now)
        for event in control.events():
            self._event(event)
        if self._interrupted:
            control.stop("interrupt")
        limit = self.goals.max_seconds
        if limit is not None and self._seconds(now) >= limit:
            control.stop("seconds")

    def _seconds(self, now: float) -> float:
        """Wall time since the first environment step (offline: the first update), earlier parts included."""
        return self.base.seconds + (now - self._first_step if self._first_step is not None else 0.0)

    def _measure(self, now: float, whole_run: bool = False) -> dict[str, Any]:
        """A snapshot of this moment, with the totals of earlier parts."""
        assert self._control is not None
        self._window.push(Reading(now, self._control.snapshot(), self._control.wires()))
        shot = self._window.snapshot(whole_run)
        for name in COUNTERS:
            shot[name] += int(self.base.totals.get(name, 0))
        for name in ("train_return", "train_length", "eval_return", "eval_std", "eval_episodes", "eval_version"):
            if not math.isfinite(shot[name]):
                before = self.base.snapshot.get(name)
                shot[name] = math.nan if before is None else float(before)
        for value in (shot["eval_return"], shot["train_return"]):
            if math.isfinite(value):
                self._lowest = min(self._lowest, value)
        if math.isfinite(shot["eval_return"]):
            self._best = max(self._best, shot["eval_return"])
        shot["best_return"], shot["lowest_return"] = self._best, self._lowest
        shot["seconds"], shot["time"] = self._seconds(now), time.time()
        shot.update(self._control.surroundings())
        shot["verdict"] = self._no_batch(shot) or verdict(shot, shot["seconds"] - self.base.seconds, self.labels["runtime"])
        return shot

    def _no_batch(self, shot: Mapping[str, Any]) -> str:
        """How far the first batch is, where it has been waited for long; else nothing."""
        seconds, come = shot["seconds"] - self.base.seconds, shot["slots"]["written"] - shot["slots"]["dropped"]
        updated = shot["learner_steps"] > self.base.totals.get("learner_steps", 0)
        if updated or seconds < BATCH_SECONDS or come >= self._batch_slots:
            return ""
        return (f"no batch yet: {come:,} of {self._batch_slots:,} unrolls after {seconds:.0f} s; a smaller "
                "--architecture.batch-slots is full sooner")

    def _report(self, control: Supervisor, now: float, last: bool = False) -> None:
        self._memory.sample(now, force=last)
        for event in control.events():
            self._event(event)
        shot = self._measure(now)
        shot["last"] = last
        for sink in list(self._sinks):
            self._try(lambda sink=sink: sink.write(shot), sink)

    def _event(self, event: Mapping[str, Any]) -> None:
        for sink in list(self._sinks):
            self._try(lambda sink=sink: sink.event({"time": time.time(), **event}), sink)

    def _try(self, action: Any, sink: Sink | None = None) -> None:
        """A full disk or a closed terminal must not end a run: drop that sink."""
        try:
            action()
        except (OSError, ValueError) as error:
            if sink in self._sinks:
                self._sinks.remove(sink)
                with contextlib.suppress(OSError, ValueError):  # it may have something left to write
                    sink.close()
                self._event({"kind": "note", "text": f"{type(sink).__name__} stopped: {error}"})

    # ------------------------------------------------------------------ writing
    def _save(self, control: Supervisor) -> None:
        self._number += 1
        try:
            self._writing = self.checkpoints.begin(self._number)
        except OSError as error:
            self._failed(str(error))
            return
        control.checkpoint(self._writing)

    def _failed(self, why: str) -> None:
        """The previous checkpoint, if there is one, is still whole; try again soon."""
        self._checkpoint_at = time.monotonic() + min(RETRY_SECONDS, self._checkpoint_seconds)
        self._checkpoint_failed = why
        kept = "the previous one stays" if self.checkpoints.newest() is not None else "there is none yet"
        self._event({"kind": "checkpoint failed", "text": f"{why}; {kept}"})

    def _write_summary(self) -> None:
        """At the end and with every checkpoint (before the end, as after a kill -9, it says nothing of a reason)."""
        now, (reason, error) = time.monotonic(), self._outcome
        shot = self._measure(now, whole_run=True)
        lag, age = shot["policy_lag"], shot["data_age_seconds"]
        started = self._first_step if self._first_step is not None else now
        summary = {
            **self.labels, "stopped_by": reason, "seconds": shot["seconds"],
            "startup_seconds": started - self._started,
            **{name: shot[name] for name in ("env_steps", "env_frames", "learner_steps", "episodes")},
            **{f"{name}_per_second": shot[name] / shot["seconds"] if shot["seconds"] else math.nan
               for name in ("env_steps", "learner_steps")},
            **{name: shot[name] for name in ("train_return", "eval_return", "learner_idle")},
            **{name: int(shot[name]) if math.isfinite(shot[name]) else 0 for name in ("eval_episodes", "eval_version")},
            "policy_lag": lag, "data_age_seconds": {"mean": age["mean"], "p95": age["p95"]},
            **{name: shot[name] for name in ("samples_per_insert", "bytes_per_env_step", "bytes_per_second", "restarts",
                                             "updates_skipped")}, **self._control.surroundings(),  # type: ignore[union-attr]
            "cpu_seconds": self.base.cpu_seconds + (cpu_seconds() - self._cpu_before if self._first_step is not None else 0.0),
            "peak_memory_mb": max(self.base.peak_memory_mb, self._memory.peak_mb),
            "verdict": shot["verdict"], "roles": shot["roles"], "wires": shot["wires"], "slots": shot["slots"], "error": error,
            "checkpoint_failed": self._checkpoint_failed, "checkpoint_bytes": self.checkpoints.sizes(),
        }
        self.summary = jsonable(summary)  # what it is, also where the disk is full
        self.rundir.save_summary(self.summary)
