"""Trains the members of a study: each for an interval, then it may copy a better one and explore, then for another interval.

    the member that is least far ──▶ `shoal train` or `shoal resume` in a process of its own, up to the next interval
    its record ──▶ exploit: whom does it copy? ──▶ explore: other values ──▶ again

Nobody waits for anybody: a member is compared with what is known of the others by then. `workers` members train at the same time,
so any number of members fits on any number of cores. A member ends its interval with a checkpoint and an evaluation, so no data of
an old policy are in flight at a copy. Learning rates are read from the configuration: the copied optimiser does not undo exploring.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shoal.coordination.population.exploit import Fitness, to_copy
from shoal.coordination.population.priors import explored
from shoal.errors import RoleFailed
from shoal.experiment.checkpoints import read_meta
from shoal.tuning.member_run import slice_words
from shoal.tuning.report import write_report
from shoal.tuning.searches import first_values, next_member, until_env_steps
from shoal.tuning.slices import LocalSlices, RunningSlice, Slices
from shoal.tuning.study import Member, Study

__all__ = ["StudyCoordinator"]

LOOK_SECONDS = 0.1
END_SECONDS = 60.0  # for the last checkpoints of members
RESCUES = 3  # copies that a member makes because it has failed
DEATHS = 5  # of a member in a row from the same checkpoint: it ends itself, and would do so for ever


@dataclass
class Slice:
    """A member that trains."""

    member: Member
    process: RunningSlice
    values: dict[str, Any]
    begun_at: int
    """Env steps of the checkpoint that it began from."""


class StudyCoordinator:
    """Runs a study to its end; made anew it continues where another one was killed."""

    def __init__(self, study: Study, say: Callable[[str], None]) -> None:
        self.study, self.settings, self.say = study, study.settings, say
        self.priors = self.settings.priors
        self.training: dict[int, Slice] = {}
        self.deaths: dict[int, list[int]] = {}  # by member: where its slices began that were ended from outside, in a row
        self.reached: int | None = None  # the member that has reached the return

    def run(self) -> None:
        slices = self._slices()
        workers = self.settings.workers or slices.workers
        try:
            self._begin()
            while self.reached is None:
                while len(self.training) < workers and (member := self._next()) is not None:
                    self._train(member, slices)
                if not self.training:
                    break
                time.sleep(LOOK_SECONDS)
                ended = {number: code for number, found in self.training.items() if (code := found.process.poll()) is not None}
                for number, code in ended.items():
                    self._ended(self.training.pop(number), code)
        finally:
            self._end_all()
            slices.close()

    def _slices(self) -> Slices:
        if self.settings.cluster is None:
            return LocalSlices()
        from shoal.tuning.ray_slices import RaySlices  # Ray may be missing, and takes a second to import

        return RaySlices(self.settings.cluster)

    def _begin(self) -> None:
        """First records of all members, and what a predecessor had begun."""
        known = {member.number: member for member in self.study.members()}
        for number in range(self.settings.population):
            self.study.restore(number)
            if number not in known:
                values = first_values(self.settings, number)
                self.study.log("start", number, values=values)
                self.study.save(Member(number, values, ancestor=number))
            else:
                member = self.study.save(replace(known[number], failed=False, failures=[]))  # its cause may be gone
                if member.copying:
                    self.study.finish_copy(member)
                if member.stopped_by == "return":  # the study had ended
                    self.reached = number

    def _next(self) -> Member | None:
        return next_member(self.settings, self.study.members(), self.training)

    # ------------------------------------------------------------------ one interval
    def _train(self, member: Member, slices: Slices) -> None:
        settings, run = self.settings, self.study.run(member.number)
        newest = run.checkpoints().sound(tables=False)
        if newest is None and run.path.exists():
            run.remove()  # it was ended before its first checkpoint: nothing of it is worth keeping
        done = member.env_steps if newest is None else max(member.env_steps, int(read_meta(newest).get("env_steps", 0)))
        words = partial(slice_words, (settings.preset, settings.env, *settings.options), member.values,
                        settings.seed + member.number, until=until_env_steps(settings, member, done), goal=settings.until_return)
        process = slices.start(words, run.path, self.study.log_file(member.number))
        self.training[member.number] = Slice(member, process, member.values, done)

    def _ended(self, done: Slice, code: int) -> None:
        number = done.member.number
        if code in (1, 2, 3):
            log = self.study.log_file(number).read_text(encoding="utf-8", errors="replace")
            self._failed(done.member, " ".join(log.strip().splitlines()[-1:]))
            return
        if code != 0:  # killed from outside: it continues from its newest checkpoint
            self._killed(done, code)
            return
        self.deaths.pop(number, None)
        member = self.study.measured(done.member)
        if self.settings.search == "halving":
            member = replace(member, rungs=[*member.rungs, member.fitness])
        self.study.save(member)
        self.study.log("slice", number, values=done.values, env_steps=member.env_steps, fitness=member.fitness)
        self.say(f"member {number}: {member.env_steps:,} env steps, fitness {member.fitness}, {_words(member.values)}")
        if member.stopped_by == "return":
            self.reached = number
        elif self.settings.search == "population":
            if member.env_steps < self.settings.max_env_steps:
                self._exploit(member)
            self._rescue()
        write_report(self.study)

    def _killed(self, lost: Slice, code: int) -> None:
        number = lost.member.number
        deaths = self.deaths[number] = [*(at for at in self.deaths.get(number, []) if at == lost.begun_at), lost.begun_at]
        if len(deaths) == DEATHS:
            del self.deaths[number]
            self._failed(lost.member, f"its process died {DEATHS} times after {lost.begun_at:,} env steps (exit code {code})")
        else:
            self.say(f"member {number} was ended from outside (exit code {code}); it continues from its newest checkpoint")

    def _failed(self, member: Member, why: str) -> None:
        """A member whose values make training fail costs no more than itself. The study ends when nobody else is left."""
        log = self.study.log_file(member.number)
        self.study.save(replace(member, failed=True, failures=[*member.failures, why], fitness=None, std=0.0, episodes=0,
                                rungs=[*member.rungs, None] if self.settings.search == "halving" else member.rungs))
        if all(one.failed for one in self.study.members()):
            raise RoleFailed(f"member {member.number} of {self.study.path} failed, and so did all others: {why}; see {log}")
        self.say(f"member {member.number} failed ({_words(member.values)}), and the others continue: {why}; see {log}")
        if self.settings.search == "population":
            self._rescue()

    def _rescue(self) -> None:
        """Let members that have failed copy one of the best, whatever the rule says of others."""
        for member in self.study.members():
            checkpoints = self.study.run(member.number).checkpoints()
            if member.failed and len(member.failures) <= RESCUES and checkpoints.newest() is not None:
                self._exploit(member)

    def _exploit(self, member: Member) -> None:
        """Copy a better member, where the rule says so, and explore around its values."""
        members = {one.number: one for one in self.study.members()}
        known = {number: found for number, one in members.items() if (found := one.known) is not None}
        rng = np.random.default_rng([self.settings.seed, member.number, member.env_steps])
        if member.failed:
            parent = to_copy(member.number, {**known, member.number: Fitness(-math.inf)}, "truncation", rng)
        else:
            parent = to_copy(member.number, known, self.settings.exploit, rng) if member.number in known else None
        if parent is None:
            return
        values = explored(members[parent].values, self.priors, self.settings.resample, rng)
        self.study.finish_copy(self.study.begin_copy(member, members[parent], values))
        self.say(f"member {member.number} copies member {parent}, and continues with {_words(values)}")

    def _end_all(self) -> None:
        """Members that still train write a checkpoint and end. One that does not continues from its newest one: it ends with its
        server."""
        for found in self.training.values():
            found.process.terminate()
        left, deadline = list(self.training.values()), time.monotonic() + END_SECONDS
        while (left := [found for found in left if found.process.poll() is None]) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items())
