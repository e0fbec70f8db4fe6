"""`--actors auto`: how many actors, of how many environments, in which processes; found by trying.

The composition of every batch stays what it was: `rows` environments in all, cut into 1, 2, ... actors. Each candidate runs
for real, for about a second after its first updates, on the same fork server or cluster, and those that are close to the best a
second time; the fastest in environment steps per second wins. On few cores with a cheap environment that is usually one process per
core that does everything, an actor and a learner that shares gradients with the others (no batch is copied between cores);
with a slow environment it is one actor per core.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.coordination.trial_session import TrialSession
from shoal.errors import ShoalError
from shoal.runtime import Faults, Program, RayConfig, Supervisor, run
from shoal.runtime.fork_server_client import ForkServerClient

__all__ = ["ActorLayout", "Trial", "calibrate", "candidates"]

WARM_UPDATES = 2
TRIAL_SECONDS = 1.0
START_SECONDS = 60.0
CLOSE = 0.75  # candidates with at least this share of the best rate are tried again: one second on a busy machine is a noisy look


@dataclass(frozen=True)
class ActorLayout:
    """How many actors there are, of how many environments, and where they run."""

    actors: int
    """How many; 0 where the learner itself acts."""
    envs_per_actor: int
    one_place: bool
    learner_threads: int
    learners: int = 1
    inline: bool = False
    """All roles in one thread."""

    def __str__(self) -> str:
        threads = f", learner with {self.learner_threads} threads" if self.learner_threads > 1 else ""
        if not self.actors:
            return f"no actors: the learner itself acts in {self.envs_per_actor} environments{threads}"
        if self.learners > 1 and self.one_place:
            return f"{self.learners} processes, each with a learner and {self.actors // self.learners} actor of " \
                   f"{self.envs_per_actor} environments"
        where = "in the learner's process" if self.one_place else "in one thread" if self.inline else "in processes of their own"
        learners = f", {self.learners} learners" if self.learners > 1 else ""
        return f"{self.actors} actor{'s' * (self.actors > 1)} of {self.envs_per_actor} environments {where}{learners}{threads}"


@dataclass(frozen=True)
class Trial:
    """What a candidate achieved."""

    layout: ActorLayout
    env_steps_per_second: float


def candidates(rows: int, cores: int) -> list[ActorLayout]:
    """Everything in one process, with one or all cores for its kernels; a process per core that does everything and shares
    gradients with the others; or 1, 2, ... actors beside a learner, up to one per core."""
    together = [ActorLayout(1, rows, True, threads) for threads in sorted({1, cores})]
    if cores > 1 and rows % cores == 0:
        together.append(ActorLayout(cores, rows // cores, True, 1, cores))
    counts = sorted({n for n in (1, 2, cores // 2, cores - 1, cores) if 1 <= n <= rows and rows % n == 0})
    return together + [ActorLayout(n, rows // n, False, 1) for n in counts]


class Stopwatch(TrialSession):
    """Measures the env steps/s of one candidate."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._started = time.monotonic()
        self._mark: tuple[float, float] | None = None

    def tick(self, control: Supervisor) -> None:
        now, steps = time.monotonic(), control.total("env_steps")
        if self._mark is None:
            if control.total("learner_steps") >= WARM_UPDATES:
                self._mark = now, steps
            elif now - self._started > START_SECONDS:
                control.stop("slow")
        elif now - self._mark[0] >= TRIAL_SECONDS and steps > self._mark[1]:
            self.rate = (steps - self._mark[1]) / (now - self._mark[0])
            control.stop("measured")


def calibrate(layouts: Sequence[ActorLayout], draw: Callable[[ActorLayout], Program], say: Callable[[str], None],
              faults: Faults | None = None, fork_server: ForkServerClient | None = None,
              ray: RayConfig | None = None) -> list[Trial]:
    """Try every layout; the trials, fastest first, and none where all were too slow to be measured. `draw` makes the program of a
    layout, without an evaluator. With `ray` they run on the cluster that this process is connected to, else on this machine, all
    of them on one `fork_server`."""
    rates: dict[ActorLayout, list[float]] = {}
    slow = False

    def attempt(layout: ActorLayout) -> None:
        nonlocal slow
        watch = Stopwatch()
        try:
            with tempfile.TemporaryDirectory(prefix="shoal-calibration-") as folder:
                reason = run(draw(layout), watch, "local" if ray is None else "ray", Path(folder), faults, fork_server, ray)
        except ShoalError as error:
            say(f"  {layout}: failed ({str(error).splitlines()[0]})")
            rates.pop(layout, None)
            return
        if reason == "interrupt":
            raise KeyboardInterrupt  # of the whole, not of a trial
        if not watch.rate > 0:
            slow = True
            say(f"  {layout}: not measured: fewer than {WARM_UPDATES} updates in {START_SECONDS:g} s")
            return
        say(f"  {layout}: {watch.rate:,.0f} env steps/s")
        rates.setdefault(layout, []).append(watch.rate)

    for layout in layouts:
        attempt(layout)
    best = max((rate for (rate,) in rates.values()), default=0.0)
    close = [layout for layout, (rate,) in rates.items() if rate >= CLOSE * best]
    for layout in close if len(close) > 1 else ():
        attempt(layout)
    if not rates and not slow:
        raise ShoalError("no layout could be run; look with `shoal doctor --env`, or try --actors 1 without calibration")
    trials = [Trial(layout, sum(seen) / len(seen)) for layout, seen in rates.items()]
    return sorted(trials, key=lambda trial: -trial.env_steps_per_second)
