"""Measures the costs of the model in two short runs, with one actor and with two.

A run's telemetry says how long each phase took, and the kernel says how much of that was computing. The rest is time in which an
environment (or a learner) waited for something that needs no core. How much processor time a second actor adds tells how much
slower cores are when all of them are busy. At the end of that run all processes are put on one core, and what an unroll then takes
tells what a change of turns costs. Nothing else is fitted.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shoal.coordination.trial_session import TrialSession
from shoal.errors import ShoalError
from shoal.planning.pipeline import simulate
from shoal.planning.terms import Cluster, Cost, Costs
from shoal.runtime import Program, run
from shoal.runtime.fork_server_client import ForkServerClient
from shoal.runtime.wires.broadcast import BroadcastWire

__all__ = ["Observation", "both", "costs_of", "fitted", "observe", "reduce_cost", "spread_of"]

WARM_UPDATES = 3
START_SECONDS = 120.0
WAITING = 0.1        # of a role's time: less than that is a core it did not get at once, not a wait
SQUEEZED_SECONDS = 1.0  # after which all have found their place on one core
SEEN_BUSY = 0.5      # of the cores, with two actors: less says nothing about their speed when all are busy
WAKE_SECONDS = 1e-4  # assumed: from a learner's last gradient to the others' hearing of it
SPEEDS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
FINER = (-0.075, -0.05, -0.025, 0.0, 0.025, 0.05, 0.075)
ACTING = ("env", "inference", "pull")


@dataclass(frozen=True)
class Observation:
    """What a run did in a stretch of time. Seconds of roles are sums over their instances."""

    actors: int
    learners: int
    seconds: float
    env_steps: float
    unrolls: float
    updates: float
    """Batches of one learner."""
    slots: float
    """Unrolls that were learned from."""
    optimiser_steps: float
    actor_seconds: Mapping[str, float]
    """By phase, `busy` for all of them; `cpu` is what the kernel saw."""
    learner_seconds: Mapping[str, float]
    policy_lag: float
    blocked: float
    slot_bytes: float
    weights_bytes: float
    spread: float = 0.0
    """Of an unroll's time: standard deviation over mean."""
    squeezed_unroll: float = 0.0
    """Processor seconds that an actor takes for an unroll while all share one core; 0 where it was not measured."""

    @property
    def env_steps_per_second(self) -> float:
        return self.env_steps / self.seconds

    @property
    def learner_idle(self) -> float:
        return max(0.0, 1.0 - self.learner_seconds["busy"] / self.seconds / self.learners)


class Meter(TrialSession):
    """A session that looks at a stretch of a run, at a second one on a single core if it is to `squeeze`, and keeps nothing."""

    def __init__(self, warm_seconds: float, seconds: float, squeeze: bool = False) -> None:
        self.warm_seconds, self.seconds = warm_seconds, seconds
        self.stretches = 1 + squeeze
        self._started, self._warm = time.monotonic(), 0.0
        self._before: Any = None
        self.seen: list[Any] = []
        self.ticks: list[dict[str, tuple[float, float]]] = []

    def tick(self, control: Any) -> None:
        now = time.monotonic()
        if len(self.seen) == self.stretches:
            return
        if not self._warm:
            if control.total("learner_steps") >= WARM_UPDATES:
                self._warm = now + self.warm_seconds
            elif now - self._started > START_SECONDS:
                control.stop("slow")
        elif self._before is None:
            if now >= self._warm:
                self._before = self._look(control, now)
        elif now - self._before[0] >= self.seconds:
            self.seen.append((self._before, self._look(control, now)))
            if len(self.seen) == self.stretches:
                control.stop("measured")
            else:
                _squeeze(child.pid for child in control.children.values() if child.pid)
                self._before, self._warm = None, now + SQUEEZED_SECONDS
        elif not self.seen:
            self.ticks.append({name: (page["steps"], page["busy_seconds"]) for name, page in control.snapshot().items()})

    @staticmethod
    def _look(control: Any, now: float) -> tuple[float, dict[str, dict[str, float]], dict[str, dict[str, float]], dict[str, float]]:
        import psutil

        times = {place: psutil.Process(child.pid).cpu_times() for place, child in control.children.items() if child.pid}
        return now, control.snapshot(), control.wires(), {place: spent.user + spent.system for place, spent in times.items()}


def _squeeze(processes: Iterable[int]) -> None:
    """All their threads onto one core."""
    import psutil

    core = min(os.sched_getaffinity(0))
    for process in processes:
        for thread in psutil.Process(process).threads():
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(thread.id, {core})


def spread_of(ticks: Sequence[tuple[float, float]]) -> float:
    """Standard deviation over mean of a step's seconds, from (steps, busy seconds) at some moments: between two of them, the
    deviations of k steps have added up to one with k times the variance."""
    steps, busy = np.diff(np.array(ticks, float).reshape(-1, 2), axis=0).T
    count = steps.sum()
    if count < 2:
        return 0.0
    mean = busy.sum() / count
    return float(np.sqrt(np.square(busy - mean * steps).sum() / count) / max(mean, 1e-9))


def observe(program: Program, fork_server: ForkServerClient, warm_seconds: float = 2.0, seconds: float = 5.0,
            squeeze: bool = False) -> Observation:
    """Run a program of actors and learners, each in a process of its own, and look at it."""
    meter = Meter(warm_seconds, seconds, squeeze)
    with tempfile.TemporaryDirectory(prefix="shoal-plan-") as folder:
        reason = run(program, meter, "local", Path(folder), fork_server=fork_server)
    if reason == "interrupt":
        raise KeyboardInterrupt
    if len(meter.seen) < meter.stretches:
        raise ShoalError(f"the run made fewer than {WARM_UPDATES} updates within {START_SECONDS:g} s, so there is nothing to plan "
                         "with; see what it does with `shoal train`")
    (began, pages, wires, cpu), (ended, later, after, spent) = meter.seen[0]
    elapsed = ended - began

    def grown(role: str, word: str) -> float:
        return float(sum(later[name][word] - pages[name][word] for name in later if name.rpartition("-")[0] == role))

    def seconds_of(role: str) -> dict[str, float]:
        words = [word for word in next(iter(later.values())) if word.startswith("phase_seconds/")]
        phases = {word.partition("/")[2]: grown(role, word) for word in words}
        used = sum(spent[place] - cpu.get(place, 0.0) for place in spent if place.rpartition("-")[0] == role)
        return {**{name: value for name, value in phases.items() if value > 0}, "busy": grown(role, "busy_seconds"), "cpu": used}

    acts, learns = ("actor", "learner") if "actor" in program.nodes else ("worker", "trainer")
    actors, learners = program.nodes[acts].start, program.nodes[learns].start
    lags, weights = grown(learns, "policy_lag/count"), program.wires["weights"]
    assert isinstance(weights, BroadcastWire)
    spreads = [spread_of([tick[name] for tick in meter.ticks]) for name in later if name.rpartition("-")[0] == acts]
    return Observation(
        actors, learners, elapsed, grown(acts, "env_steps"), grown(acts, "steps"), grown(learns, "steps") / learners,
        after["unrolls"]["consumed"] - wires["unrolls"]["consumed"], grown(learns, "learner_steps"), seconds_of(acts),
        seconds_of(learns), grown(learns, "policy_lag/sum") / lags if lags else 0.0,
        grown(acts, "wait_seconds/unrolls") / elapsed / actors, after["unrolls"]["slot_bytes"],
        float(weights.layout.nbytes),
        sum(spreads) / len(spreads), _squeezed(meter.seen[1], acts) if squeeze else 0.0)


def _squeezed(seen: tuple[Any, Any], acts: str) -> float:
    """Processor seconds of an unroll, in a stretch."""
    (_, pages, _, cpu), (_, later, _, spent) = seen
    names = [name for name in later if name.rpartition("-")[0] == acts]
    unrolls = sum(later[name]["steps"] - pages[name]["steps"] for name in names)
    return float(sum(spent[name] - cpu[name] for name in names) / max(1.0, unrolls))


# ---------------------------------------------------------------------------------------------- costs
def costs_of(seen: Observation, reduce: Cost | None = None) -> Costs:
    """What the parts cost in one run, as its cores were then."""
    actor, learner = seen.actor_seconds, seen.learner_seconds
    acting, idling = _split(actor)
    learning, resting = _split(learner)
    pulls = max(1.0, min(seen.unrolls, seen.actors * seen.updates))
    rest = max(0.0, actor["busy"] - sum(actor.get(name, 0.0) for name in ACTING))
    parts = {**{name: actor.get(name, 0.0) for name in ACTING}, "put": rest}
    parts["env"] = max(0.0, parts["env"] - idling)  # whatever needs no core is taken to be the environment's
    share = {name: acting * seconds / max(sum(parts.values()), 1e-9) for name, seconds in parts.items()}
    get, publish = learner.get("gather", 0.0), learner.get("publish", 0.0)
    computing = max(learner["busy"] - resting, 1e-9)
    batches = seen.updates * seen.learners
    return Costs(
        decisions=seen.env_steps / seen.unrolls,
        env=Cost(share["env"] / seen.unrolls, idling / seen.unrolls),
        inference=Cost(share["inference"] / seen.unrolls),
        put=Cost(share["put"] / seen.unrolls),
        pull=Cost(share["pull"] / pulls),
        get=Cost(learning * get / computing / seen.slots),
        update=Cost(learning * max(0.0, computing - get - publish) / computing / batches, resting / batches),
        publish=Cost(learning * publish / computing / seen.updates),
        reduce=reduce or Cost(0.0), slot_bytes=seen.slot_bytes, weights_bytes=seen.weights_bytes)


def _split(seconds: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of computing, and seconds in which a role was in the middle of its work but needed no core."""
    busy, cpu = seconds["busy"], seconds["cpu"]
    waited = busy - cpu
    return (cpu, waited) if waited > WAITING * busy else (min(cpu, busy), 0.0)


def reduce_cost(nbytes: float, rounds: float) -> Cost:
    """What one more learner costs each of them in an update: its vector is written, read and added, `rounds` times."""
    mine, other = np.ones(max(1, int(nbytes) // 4), np.float32), np.ones(max(1, int(nbytes) // 4), np.float32)
    began, times = time.perf_counter(), 20
    for _ in range(times):
        total = mine.copy()
        total += other
        other[:] = total
    return Cost(rounds * (time.perf_counter() - began) / times, rounds * WAKE_SECONDS)


def scaled(costs: Costs, factor: float, full_speed: float) -> Costs:
    """The same work on cores of another speed."""
    parts = ("env", "inference", "put", "pull", "get", "update", "update_slot", "publish", "reduce")
    slower = {name: replace(getattr(costs, name), cpu=factor * getattr(costs, name).cpu) for name in parts}
    return replace(costs, full_speed=full_speed, **slower)


def per_slot(one: Cost, two: Cost) -> tuple[Cost, Cost]:
    """Updates of one slot and of two -> what is the same for all, and what each slot adds."""
    more = Cost(min(max(two.cpu - one.cpu, 0.0), one.cpu), min(max(two.wait - one.wait, 0.0), one.wait))
    return Cost(one.cpu - more.cpu, one.wait - more.wait), more


def turn_cost(costs: Costs, seen: Observation, batch: int, depth: int, lockstep: bool) -> float:
    """What an actor loses with every turn: what an unroll took on one core beyond what it takes alone, by the turns it then has."""
    if not seen.squeezed_unroll:
        return 0.0
    pulls = min(1.0, seen.actors * seen.updates / max(seen.unrolls, 1.0))
    alone = costs.unroll.cpu + pulls * costs.pull.cpu
    turn = 0.0
    for _ in range(2):  # what is lost makes for more turns
        tight = replace(scaled(costs, 1.0, 1.0), turn=turn)
        turns = simulate(tight, Cluster(1), seen.actors, seen.learners, batch, depth, lockstep=lockstep).turns
        turn = max(0.0, seen.squeezed_unroll - alone) / max(turns, 1.0)
    return turn


def fitted(one: Observation, two: Observation, batch: int, depth: int, cores: int | None = None, lockstep: bool = False) -> Costs:
    """Costs from the run with one actor, the speed of busy cores from what two of them did to it. In lock step a batch grows with
    the actors, so two runs tell what a slot costs, too."""
    cluster = Cluster(cores or len(os.sched_getaffinity(0)))
    rounds = 1 + one.optimiser_steps / max(one.updates, 1e-9)
    raw = replace(costs_of(one, reduce_cost(one.weights_bytes, rounds)), spread=one.spread)
    if lockstep:
        update, update_slot = per_slot(raw.update, costs_of(two).update)
        raw = replace(raw, update=update, update_slot=update_slot)
    per_step = [(seen.actor_seconds["cpu"] + seen.learner_seconds["cpu"]) / seen.env_steps for seen in (one, two)]

    @cache
    def misfit(speed: float) -> tuple[float, Costs]:
        known = scaled(raw, 1.0, speed)
        known = scaled(raw, 1 / simulate(known, cluster, 1, 1, batch, depth, lockstep=lockstep).inflation, speed)
        known = replace(known, turn=turn_cost(known, two, batch, depth, lockstep))
        said = [simulate(known, cluster, seen.actors, seen.learners, batch, depth, lockstep=lockstep) for seen in (one, two)]
        off = [np.log(one_.env_steps_per_second / seen.env_steps_per_second) for one_, seen in zip(said, (one, two), strict=True)]
        off.append(np.log(said[1].inflation / said[0].inflation) - np.log(per_step[1] / per_step[0]))
        return float(np.square(off).sum()), known

    if two.actor_seconds["cpu"] + two.learner_seconds["cpu"] < SEEN_BUSY * cluster.cores_per_node * two.seconds:
        return misfit(1.0)[1]
    near = min(SPEEDS, key=lambda speed: misfit(speed)[0])
    return min((misfit(near + step) for step in FINER if near + step <= 1.0), key=lambda pair: pair[0])[1]


def both(draw: Callable[[int, int], Program], fork_server: ForkServerClient, seconds: float,
         say: Callable[[str], None]) -> list[Observation]:
    """The two runs: `draw(actors, learners)` makes their programs."""
    seen = []
    for actors in (1, 2):
        squeeze = actors == 2 and len(os.sched_getaffinity(0)) > 1
        seen.append(observe(draw(actors, 1), fork_server, seconds / 2, seconds, squeeze))
        say(f"measured with {actors} actor{'s' * (actors > 1)}: {seen[-1].env_steps_per_second:,.0f} env steps/s, learner idle "
            f"{100 * seen[-1].learner_idle:.0f} %, lag {seen[-1].policy_lag:.1f}")
    return seen
