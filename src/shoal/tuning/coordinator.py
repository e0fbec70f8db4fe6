"""Trains the members of a study: each for an interval, then it may copy a better one and explore, then for another interval.

    the member that is least far ──▶ `shoal train` or `shoal resume` in a process of its own, up to the next interval
    its record ──▶ exploit: whom does it copy? ──▶ explore: other values ──▶ again

Nobody waits for anybody: a member is compared with what is known of the others by then. `workers` members train at the same time,
so any number of members fits on any number of cores. A member ends its interval with a checkpoint and an evaluation, so no data of
an old policy are in flight at a copy. Learning rates are read from the configuration: the copied optimiser does not undo exploring.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.bench.parent_death import tied_to_parent
from shoal.coordination.population.exploit import to_copy
from shoal.coordination.population.priors import explored
from shoal.errors import RoleFailed
from shoal.experiment.checkpoints import read_meta
from shoal.tuning.study import Member, Study

__all__ = ["StudyCoordinator"]

LOOK_SECONDS = 0.1


@dataclass
class Slice:
    """A member that trains."""

    member: Member
    process: subprocess.Popen[bytes]
    values: dict[str, Any]


class StudyCoordinator:
    """Runs a study to its end; made anew it continues where another one was killed."""

    def __init__(self, study: Study, say: Callable[[str], None]) -> None:
        self.study, self.settings, self.say = study, study.settings, say
        self.priors = self.settings.priors
        self.training: dict[int, Slice] = {}
        self.reached: int | None = None  # the member that has reached the return

    def run(self) -> None:
        try:
            self._begin()
            while self.reached is None and (self.training or self._waiting()):
                while len(self.training) < self.settings.workers and (waiting := self._waiting()):
                    self._train(waiting[0])
                time.sleep(LOOK_SECONDS)
                for number in [one for one, found in self.training.items() if found.process.poll() is not None]:
                    self._ended(self.training.pop(number))
        finally:
            self._end_all()

    def _begin(self) -> None:
        """First records of all members, and copies that a predecessor had begun."""
        known = {member.number: member for member in self.study.members()}
        for number in range(self.settings.population):
            if number not in known:
                rng = np.random.default_rng([self.settings.seed, number])
                values = {name: prior.draw(rng) for name, prior in self.priors.items()}
                self.study.log("start", number, values=values)
                self.study.save(Member(number, values, ancestor=number))
            elif known[number].copying:
                self.study.finish_copy(known[number])

    def _waiting(self) -> list[Member]:
        """Members with something left to do, the one that is least far first."""
        left = [member for member in self.study.members() if member.number not in self.training
                and member.env_steps < self.settings.max_env_steps and member.stopped_by != "return"]
        return sorted(left, key=lambda member: (member.env_steps, member.number))

    # ------------------------------------------------------------------ one interval
    def _train(self, member: Member) -> None:
        settings, run = self.settings, self.study.run(member.number)
        newest = run.checkpoints().newest()
        done = member.env_steps if newest is None else max(member.env_steps, int(read_meta(newest).get("env_steps", 0)))
        alone = settings.population == 1  # nobody to be compared with: one run without a break
        until = settings.max_env_steps if alone else min(settings.max_env_steps, done + settings.every_env_steps)
        goal = [] if settings.until_return is None else ["--until-return", str(settings.until_return)]
        if newest is None:
            if run.path.exists():
                run.remove()  # it was ended before its first checkpoint: nothing of it is worth keeping
            values = [word for name, value in member.values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
            words = ["train", settings.preset, settings.env, *settings.options, *values, "--run-dir", str(run.path), "--seed",
                     str(settings.seed + member.number), "--policy", "last", *goal]
        else:
            words = ["resume", str(run.path), *goal]
        words += ["--max-env-steps", str(until), "--console.mode", "none"]
        log = (self.study.path / "members" / f"{member.number:02d}.log").open("ab")
        with log:
            process = subprocess.Popen(tied_to_parent([sys.executable, "-m", "shoal.cli", *words]), stdout=log, stderr=log,
                                       stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.training[member.number] = Slice(member, process, member.values)

    def _ended(self, done: Slice) -> None:
        number, code = done.member.number, done.process.returncode
        if code in (2, 3):
            log = self.study.path / "members" / f"{number:02d}.log"
            tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise RoleFailed(f"member {number} of {self.study.path} failed: {' '.join(tail)}; see {log}")
        if code != 0:  # killed from outside: it continues from its newest checkpoint
            self.say(f"member {number} was ended from outside (exit code {code}); it continues from its newest checkpoint")
            return
        member = self.study.save(self.study.measured(done.member))
        self.study.log("slice", number, values=done.values, env_steps=member.env_steps, fitness=member.fitness)
        self.say(f"member {number}: {member.env_steps:,} env steps, fitness {member.fitness}, {_words(member.values)}")
        if member.stopped_by == "return":
            self.reached = number
        elif member.env_steps < self.settings.max_env_steps:
            self._exploit(member)

    def _exploit(self, member: Member) -> None:
        """Copy a better member, where the rule says so, and explore around its values."""
        members = {one.number: one for one in self.study.members()}
        known = {number: one.known for number, one in members.items()}
        rng = np.random.default_rng([self.settings.seed, member.number, member.env_steps])
        parent = to_copy(member.number, {number: found for number, found in known.items() if found is not None},
                         self.settings.exploit, rng) if member.fitness is not None else None
        if parent is None:
            return
        values = explored(members[parent].values, self.priors, self.settings.resample, rng)
        self.study.finish_copy(self.study.begin_copy(member, members[parent], values))
        self.say(f"member {member.number} copies member {parent}, and continues with {_words(values)}")

    def _end_all(self) -> None:
        """Members that still train write a checkpoint and end."""
        for found in self.training.values():
            found.process.terminate()
        for found in self.training.values():
            found.process.wait()


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items())
