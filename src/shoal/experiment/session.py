"""What drives a run from above the runtime: stop conditions, checkpoints, snapshots into outputs, summary.json.

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

from shoal.errors import CheckpointError
from shoal.experiment.checkpoints import Checkpoints
from shoal.experiment.last_evaluation import SHARE, LastEvaluation
from shoal.experiment.policy_choice import PolicyChoice, PolicyName, choose_policy
from shoal.experiment.process_usage import PeakMemory, cpu_seconds
from shoal.experiment.rundir import RunDir
from shoal.telemetry.outputs import Output, Watcher, jsonable
from shoal.telemetry.snapshot import Reading, ReadingWindow
from shoal.telemetry.verdict import verdict

if TYPE_CHECKING:
    from shoal.coordination.autoscale import Autoscaler
    from shoal.experiment.run_control import RunControl
    from shoal.runtime import Supervisor
    from shoal.telemetry.metrics import Metric

__all__ = ["Base", "Goals", "RunSession"]

GLANCE_SECONDS = 0.1    # stop conditions, events, how full the streams are
SNAPSHOT_SECONDS = 1.0
RETRY_SECONDS = 5.0     # after a checkpoint that failed
LAST_CHECKPOINT_SECONDS = 30.0
PAUSED_SECONDS = 2.0    # of these, until actors continue because a role may need them to end its step
EVALUATED = ("eval_return", "eval_std", "eval_episodes", "eval_version", "best_return", "lowest_return", "win_rate", "loss_rate",
             "exploitability")
LEARNED = ("env_steps", "learner_steps", "train_return")
BATCH_SECONDS = 30.0    # without an update, until it is said that the first batch is not full yet


@dataclass(frozen=True)
class Goals:
    """When to stop. None: never for this reason."""

    until_return: float | None = None
    max_env_steps: int | None = None
    max_learner_steps: int | None = None
    max_seconds: float | None = None
    until: str | None = None


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
                 outputs: Sequence[Output], base: Base | None = None, started: float | None = None,
                 autoscaler: Autoscaler | None = None, batch_slots: int = 0, algorithm_metrics: Sequence[Metric] = (),
                 role_metrics: Sequence[Metric] = (), policy: PolicyName = "best", last_env_steps: int | None = None,
                 scopes: Mapping[str, str] | None = None, commands: RunControl | None = None) -> None:
        """`scopes`: by the name of each policy that learns, what the names of its roles and files begin with."""
        self.rundir, self.labels, self.goals, self.base = rundir, dict(labels), goals, base or Base()
        self.checkpoints: Checkpoints = rundir.checkpoints(keep)
        self.summary: dict[str, Any] = {}
        self._checkpoint_seconds, self._outputs, self._batch_slots = checkpoint_seconds, list(outputs), batch_slots
        self._started = time.monotonic() if started is None else started
        self._scopes = dict(scopes or {"main": ""})
        self._window = ReadingWindow(algorithm_metrics=algorithm_metrics, role_metrics=role_metrics,
                                     policies=[name for name, scope in self._scopes.items() if scope])
        self._memory, self._autoscaler, self._commands = PeakMemory(), autoscaler, commands
        self._policy, self._last_env_steps = policy, last_env_steps
        self._first_step: float | None = None
        self._last_step: float | None = None  # when training ended
        self._trained: dict[str, Any] | None = None  # the whole run, as it was then
        self._last_began: float | None = None  # eval_env_steps when the last evaluation began
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
        self._checkpoint_at = time.monotonic() + (self._checkpoint_seconds if whole else 0.0)
        for watcher in self._watchers():
            watcher.begin(self.rundir.path, self.rundir.config())
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

    def save_soon(self) -> bool:
        self._checkpoint_at = 0.0
        return True

    def saved(self, folder: Path, ok: bool) -> None:
        """Every role has written its file, or one could not."""
        self._writing = None
        if not ok:
            self.checkpoints.abandon(folder)
            self._failed("not all roles could write")
            return
        shot = self._measure(time.monotonic())
        meta = {"totals": {name: shot[name] for name in self._window.counters if name in shot}, "env_steps": shot["env_steps"],
                "learner_steps": shot["learner_steps"], "weights_version": shot["weights_version"], "seconds": shot["seconds"],
                "time": time.time()}
        try:
            written = self.checkpoints.commit(folder, meta)
            self._checkpoint_failed = None
            if self._commands is not None:
                self._commands.saved(written)
            assert self._control is not None
            self._control.start_steps()  # not before the first checkpoint is whole
            for watcher in self._watchers():
                watcher.checkpoint(written)
            self._write_summary()
        except OSError as error:
            self._failed(str(error))

    def newest(self, instance: str | None = None) -> Path | None:
        if instance is None:
            return self.checkpoints.newest()
        found, damaged = self.checkpoints.newest_for(instance)
        if damaged and found is not None and self._control is not None:
            self._control.event("checkpoint", instance, f"{'; '.join(damaged)}; {found.name} is used instead")
        return found

    def end(self, control: Supervisor, reason: str, error: str | None) -> None:
        self._control = control  # where a role could not be made it ends before it has begun
        done = any(control.total(name) for name in ("env_steps", "learner_steps"))
        ended = reason != "failure" and (done or control.complete())  # else roles were still starting: there is nothing to keep
        if ended:
            self._save_last(control)
        self._last_step = time.monotonic()
        shown, self._trained = self._measure(self._last_step), self._measure(self._last_step, whole_run=True)
        if ended and done and reason not in ("interrupt", "stop", "return", "until"):  # what was confirmed stays the result
            self._evaluate_last(control)
        now = self._measure(time.monotonic())
        newer = {name: now[name] for name in (*EVALUATED, *self._window.counters) if name in now}  # a step may end after the stop
        self._trained |= newer
        self._write(control, {**shown, **newer, "evaluating": "", "last": True})
        self._outcome = reason, error
        self._try(self._write_summary)
        watchers = self._watchers()
        for watcher in watchers:
            watcher.end(self.summary)
            watcher.close()
            self._pass_on(watcher)
        for output in self._outputs:
            if output not in watchers:
                self._try(output.close)

    # ------------------------------------------------------------------ called by the experiment
    def interrupt(self) -> None:
        """Ctrl-C: stop at the next tick, with a checkpoint and a summary."""
        self._interrupted = True

    def abandon(self) -> None:
        """The run was refused before it began: nothing is to be reported any more."""
        for output in self._outputs:
            self._try(output.close)

    def announce(self, text: str) -> None:
        """Which layout was chosen before the run."""
        self._event({"kind": "layout", "text": text})

    # ------------------------------------------------------------------ called by those who carry out a user's commands
    def checkpoint_every(self, seconds: float) -> None:
        self._checkpoint_seconds = seconds
        self._checkpoint_at = min(self._checkpoint_at, time.monotonic() + seconds)

    def fix_actors(self) -> None:
        """The number of actors follows the learner no more."""
        if self._autoscaler is not None:
            self._autoscaler = None
            self._event({"kind": "scale", "text": "the number of actors follows the learner no more: it was set"})

    def note_change(self, text: str, values: Mapping[str, Any]) -> None:
        """What a user has changed, when."""
        assert self._control is not None
        steps = {name: int(self.base.totals.get(name, 0) + self._control.total(name)) for name in ("env_steps", "learner_steps")}
        self._event({"kind": "change", "text": f"{text} at {steps['env_steps']:,} env steps", "values": dict(values), **steps})

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
        if self._commands is not None and control.complete():
            self._commands.tick(control, self)
        limit = self.goals.max_seconds
        if limit is not None and self._seconds(now) >= limit:
            control.stop("seconds")

    def _seconds(self, now: float) -> float:
        """Wall time since the first environment step (offline: the first update), earlier parts included."""
        now = now if self._last_step is None else min(now, self._last_step)
        return self.base.seconds + (now - self._first_step if self._first_step is not None else 0.0)

    def _measure(self, now: float, whole_run: bool = False) -> dict[str, Any]:
        """A snapshot of this moment, with the totals of earlier parts."""
        assert self._control is not None
        self._window.push(Reading(now, self._control.snapshot(), self._control.wires()))
        shot = self._window.snapshot(whole_run)
        for name in self._window.counters:
            if name in shot:
                shot[name] += type(shot[name])(self.base.totals.get(name, 0))  # whole numbers stay whole
            elif name in self.base.totals:
                shot[name] = self.base.totals[name]
        shot["weights_version"] = max(shot["weights_version"], int(self.base.snapshot.get("weights_version", 0)))
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
        shot["seconds"], shot["time"], shot["training"] = self._seconds(now), time.time(), self._last_step is None
        shot["evaluating"] = self._evaluating(shot)
        shot.update(self._control.surroundings())
        shot["verdict"] = self._no_batch(shot) or verdict(shot, shot["seconds"] - self.base.seconds, self.labels["runtime"])
        return shot

    def _evaluating(self, shot: Mapping[str, Any]) -> str:
        """How far the evaluation is that is under way; empty without one."""
        planned, played = shot["eval_episodes_planned"], shot["eval_episodes_played"]
        if not planned > 0:  # nor where it is not known
            return ""
        episodes = int(played) if math.isfinite(played) else 0
        if self._last_began is None:
            return f"{episodes:,} of {planned:,.0f} episodes"
        steps = shot["eval_env_steps"] - self._last_began
        return f"the last version: {episodes:,} episodes in {steps:,.0f} of about {self._last_budget():,} env steps"

    def _last_budget(self) -> int:
        """Env steps of the last evaluation: a tenth of the run's own, or as many as an offline run has made updates."""
        assert self._trained is not None
        if self._last_env_steps is not None:
            return self._last_env_steps
        return max(1, int(self._trained["env_steps"]) // SHARE or int(self._trained["learner_steps"]))

    def _no_batch(self, shot: Mapping[str, Any]) -> str:
        """How far the first batch is, where it has been waited for long; else nothing."""
        seconds, come = shot["seconds"] - self.base.seconds, shot["slots"]["written"] - shot["slots"]["dropped"]
        updated = shot["learner_steps"] > self.base.totals.get("learner_steps", 0)
        if updated or seconds < BATCH_SECONDS or come >= self._batch_slots:
            return ""
        return (f"no batch yet: {come:,} of {self._batch_slots:,} unrolls after {seconds:.0f} s; a smaller "
                "--architecture.batch-slots is full sooner")

    def _report(self, control: Supervisor, now: float) -> None:
        self._write(control, {**self._measure(now), "last": False})

    def _write(self, control: Supervisor, shot: Mapping[str, Any]) -> None:
        self._memory.sample(time.monotonic(), force=shot["last"])
        for event in control.events():
            self._event(event)
        for output in list(self._outputs):
            self._try(lambda output=output: output.write(shot), output)
        for watcher in self._watchers():
            self._pass_on(watcher)

    def _watchers(self) -> list[Watcher]:
        return [output for output in self._outputs if isinstance(output, Watcher)]

    def _pass_on(self, watcher: Watcher) -> None:
        for text in watcher.complaints():
            self._event({"kind": "callback failed", "text": text})

    def _event(self, event: Mapping[str, Any]) -> None:
        for output in list(self._outputs):
            self._try(lambda output=output: output.event({"time": time.time(), **event}), output)

    def _try(self, action: Any, output: Output | None = None) -> None:
        """A full disk or a closed terminal must not end a run: drop that output."""
        try:
            action()
        except (OSError, ValueError) as error:
            if output in self._outputs:
                self._outputs.remove(output)
                with contextlib.suppress(OSError, ValueError):  # it may have something left to write
                    output.close()
                self._event({"kind": "note", "text": f"{type(output).__name__} stopped: {error}"})

    # ------------------------------------------------------------------ writing
    def _save(self, control: Supervisor) -> None:
        self._number += 1
        try:
            self._writing = self.checkpoints.begin(self._number)
        except OSError as error:
            self._failed(str(error))
            return
        control.checkpoint(self._writing)

    def _save_last(self, control: Supervisor) -> None:
        """The checkpoint at the end. Actors pause first, so that a run does not go beyond its budget while others write."""
        acting = [name for name, page in control.snapshot().items()
                  if page["env_steps"] and name in control.running and name not in control.stateful]
        for name in acting:
            control.pause(name)
        if self._writing is None:
            self._save(control)
        control.wait(lambda: self._writing is None, PAUSED_SECONDS)
        if self._writing is not None:
            for name in acting:
                control.resume(name)
            control.wait(lambda: self._writing is None, LAST_CHECKPOINT_SECONDS)
        if self._writing is not None:
            self._failed(f"not all roles could write within {LAST_CHECKPOINT_SECONDS:g} s")

    def _evaluate_last(self, control: Supervisor) -> None:
        """Evaluate the last version, and put what came out into the checkpoint that was just written."""
        def show() -> None:
            now = time.monotonic()
            if now >= self._snapshot_at:
                self._snapshot_at = now + SNAPSHOT_SECONDS
                self._report(control, now)

        last = LastEvaluation(control, lambda: self._interrupted, show)
        if not last.possible:
            return
        self._last_began = self._measure(time.monotonic())["eval_env_steps"]
        why = last.play(self._last_budget())
        if why is not None:
            self._event({"kind": "evaluation failed", "text": f"the last version was not evaluated: {why}"})
        elif self._checkpoint_failed is None:
            self._number += 1
            try:
                folder = self.checkpoints.begin(self._number)
                if last.save(folder):
                    self.checkpoints.amend(folder)
                else:
                    self.checkpoints.abandon(folder)
                    self._event({"kind": "evaluation failed", "text": "the evaluation of the last version could not be saved"})
            except (OSError, CheckpointError) as error:
                self._failed(str(error))

    def _failed(self, why: str) -> None:
        """The previous checkpoint, if there is one, is still whole; try again soon."""
        assert self._control is not None
        self._control.start_steps()  # training continues without
        self._checkpoint_at = time.monotonic() + min(RETRY_SECONDS, self._checkpoint_seconds)
        self._checkpoint_failed = why
        if self._commands is not None:
            self._commands.saved(None, f"the checkpoint could not be written: {why}")
        kept = "the previous one stays" if self.checkpoints.newest() is not None else "there is none yet"
        self._event({"kind": "checkpoint failed", "text": f"{why}; {kept}"})

    def _policies(self, shot: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """How far every policy is that learns, and the version of it that is handed back."""
        alone = {name: shot[name] for name in LEARNED}
        return {name: {**(self._own(scope, shot["policies"][name]) if scope else alone), **self._handed_back(scope)}
                for name, scope in self._scopes.items()}

    def _own(self, scope: str, shown: Mapping[str, Any]) -> dict[str, Any]:
        """What one of several policies has learned from, earlier parts included, as of the newest checkpoint."""
        choice = self._choice(scope)
        steps, updates = choice.trained if choice is not None and choice.trained is not None else (0, 0)
        return {"env_steps": steps, "learner_steps": updates, "train_return": shown["train_return"]}

    def _choice(self, scope: str) -> PolicyChoice | None:
        newest = self.checkpoints.newest()
        with contextlib.suppress(CheckpointError):  # damaged meanwhile
            return None if newest is None else choose_policy(newest, self._policy, scope)
        return None

    def _handed_back(self, scope: str) -> dict[str, Any]:
        """The version that `run.policy`, `shoal eval` and `shoal play` take of the newest checkpoint, and its evaluation."""
        choice = self._choice(scope)
        if choice is None:  # nothing is handed back
            return {"policy": None, "policy_version": None, "policy_env_steps": None, "eval_return": None, "eval_episodes": 0,
                    "eval_version": 0}
        evaluated = choice.version is not None and choice.eval_return is not None
        return {"policy": choice.name, "policy_version": choice.version, "policy_env_steps": choice.env_steps,
                "eval_return": choice.eval_return, "eval_episodes": choice.eval_episodes,
                "eval_version": choice.version if evaluated else 0, **choice.scores}

    def _write_summary(self) -> None:
        """At the end and with every checkpoint (before the end, as after a kill -9, it says nothing of a reason)."""
        now, (reason, error) = time.monotonic(), self._outcome
        shot = self._trained or self._measure(now, whole_run=True)
        lag, age = shot["policy_lag"], shot["data_age_seconds"]
        started, policies = self._first_step if self._first_step is not None else now, self._policies(shot)
        first = next(iter(policies.values()))
        handed_back = {name: value for name, value in first.items() if name not in LEARNED}
        surroundings = self._control.surroundings() if self._control is not None else {}
        summary = {
            **self.labels, "stopped_by": reason, "seconds": shot["seconds"],
            "startup_seconds": started - self._started,
            **{name: shot[name] for name in ("env_steps", "env_frames", "learner_steps", "episodes")},
            **{f"{name}_per_second": shot[name] / shot["seconds"] if shot["seconds"] else math.nan
               for name in ("env_steps", "learner_steps")},
            **{name: shot[name] for name in ("train_return", "learner_idle")}, **handed_back,
            "policies": policies,
            "policy_lag": lag, "data_age_seconds": {"mean": age["mean"], "p95": age["p95"]},
            **{name: shot[name] for name in ("samples_per_insert", "bytes_per_env_step", "bytes_per_second", "restarts",
                                             "env_restarts", "updates_skipped")}, **surroundings,
            "cpu_seconds": self.base.cpu_seconds + (cpu_seconds() - self._cpu_before if self._first_step is not None else 0.0),
            "peak_memory_mb": max(self.base.peak_memory_mb, self._memory.peak_mb),
            "verdict": shot["verdict"], "roles": shot["roles"], "wires": shot["wires"], "slots": shot["slots"], "error": error,
            "checkpoint_failed": self._checkpoint_failed, "checkpoint_bytes": self.checkpoints.sizes(),
        }
        self.summary = jsonable(summary)  # what it is, also where the disk is full
        self.rundir.save_summary(self.summary)
