"""Mechanisms that two busy cores would hide: environments and models that sleep instead of working (specs/policy.md 15).

Also the split-column Catch of gossip, and the lag behind a learner that is too slow.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from evidence.lines import Line
from shoal.algorithms import a2c, vtrace
from shoal.core import any_of
from shoal.nets import NetConfig
from shoal.roles.learner import Learner
from shoal.roles.parts import EnvSource, EvalPlan
from tests.architectures.graphs import Weights, draw, go

__all__ = ["LINES"]

NET = NetConfig(hidden=(8,))
SILENT = EvalPlan(enabled=False)


class Sleeper(gym.Env[np.ndarray, int]):
    """Every step takes the same time and no processor."""

    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return np.zeros(2, np.float32), 0.0, False, False, {}


def slow(make: Callable[..., Any], seconds: float, reach: Callable[[Any], tuple[Any, str]]) -> Callable[..., Any]:
    """A role in which one method takes `seconds` longer."""

    def made(me: Any, **arguments: Any) -> Any:
        role = make(me, **arguments)
        owner, name = reach(role)
        method = getattr(owner, name)

        def sleeping(*values: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return method(*values, **named)

        setattr(owner, name, sleeping)
        return role

    return made


def thinks(role: Any) -> tuple[Any, str]:
    return role.policy, "act"


def learns(role: Any) -> tuple[Any, str]:
    return role.learn, "gradients"


class Between(Weights):
    """Counts between a settled beginning and the end."""

    def __init__(self, counter: str, settle: float, measure: float) -> None:
        super().__init__()
        self.counter, self.settle, self.measure = counter, settle, measure
        self.begun: tuple[float, float] | None = None
        self.rate = 0.0

    def tick(self, control: Any) -> None:
        self.events += control.events()
        now, count = time.monotonic(), control.total(self.counter)
        if self.begun is None:
            if count and self.age > self.settle:
                self.begun = now, count
        elif now - self.begun[0] >= self.measure:
            self.rate = (count - self.begun[1]) / (now - self.begun[0])
            control.stop("until")


# ---------------------------------------------------------------------------------------------- double buffering
ENVS, STEP_SECONDS = 4, 0.02  # long enough that scheduling on a busy machine hardly counts


class Distant:
    """The asking end of a call whose replies come `seconds` after they were asked for, at the earliest."""

    def __init__(self, call: Any, seconds: float) -> None:
        self.call, self.seconds = call, seconds

    async def slot(self) -> Any:
        draft = await self.call.slot()
        send, seconds = draft.send, self.seconds

        def sent() -> Any:
            pending, due = send(), time.monotonic() + seconds
            result = pending.result

            async def late() -> Any:
                reply = await result()
                await any_of(timeout=max(0.0, due - time.monotonic()))
                return reply

            pending.result = late
            return pending

        draft.send = sent
        return draft


def distant(make: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """An actor far from its server."""
    return lambda me, steps, **arguments: make(me, steps=Distant(steps, seconds), **arguments)


def expected_gain(k: int, e: float, i: float, kind: str) -> float:
    """specs/policy.md 6d. One group: a round takes k e + i. Two: the actor steps for k e, a group's own round is k e / 2 + i, and
    the longer one counts. That is so if i is a latency. If it occupies the server, two groups occupy it for 2 i.
    """
    return (k * e + i) / max(k * e, k * e / 2 + i if kind == "latency" else 2 * i)


def steps_per_second(groups: int, inference: float, kind: str, seed: int) -> float:
    program, _ = draw(vtrace.Config(unroll=10), "central_inference", EnvSource(Sleeper, kwargs={"seconds": STEP_SECONDS}),
                      seed=seed, net=NET, eval=SILENT, envs_per_actor=ENVS // groups, groups=groups, batch_slots=1)
    actor, server = program.nodes["actor"], program.nodes["inference"]
    if kind == "latency":
        actor.role = distant(actor.role, inference)
    else:
        server.role = slow(server.role, inference, thinks)
    with tempfile.TemporaryDirectory() as folder:
        watch = Between("env_steps", settle=1.0, measure=6.0)
        go(program, "local", Path(folder), watch)
    return watch.rate


DELAYS = (("server occupied", 0.01), ("server occupied", 0.02), ("server occupied", 0.04), ("server occupied", 0.08),
          ("latency", 0.04), ("latency", 0.08), ("latency", 0.16))


def double_buffering(seed: int) -> dict[str, Any]:
    cases = {}
    for kind, inference in DELAYS:
        one, two = (steps_per_second(groups, inference, kind, seed) for groups in (1, 2))
        expected = expected_gain(ENVS, STEP_SECONDS, inference, kind)
        cases[f"{1000 * inference:g} ms, {kind}"] = {
            "one_group": round(one, 1), "two_groups": round(two, 1), "gain": round(two / one, 3), "formula": round(expected, 3),
            "met": abs(two / one / expected - 1) <= 0.15}
    return {"met": all(case["met"] for case in cases.values()), "inference": cases}


# ---------------------------------------------------------------------------------------------- GA3C's adjuster
MOST_AGENTS, MOST_THREADS, TRIAL, CLIMB = 5, 3, 1.0, 45.0


def ga3c(seed: int, numbers: dict[str, int], watch: Weights, **config: Any) -> Weights:
    """Sleeping: 8 ms a step, 4 ms a prediction, 30 ms a training; 5 steps an unroll."""
    program, _ = draw(a2c.Config(unroll=5), "predictor_trainer", EnvSource(Sleeper, kwargs={"seconds": 0.008}), seed=seed, net=NET,
                      eval=SILENT, envs_per_actor=1, actors=numbers["agent"], predictors=numbers["predictor"],
                      trainers=numbers["trainer"], **config)
    program.nodes["predictor"].role = slow(program.nodes["predictor"].role, 0.004, thinks)
    program.nodes["trainer"].role = slow(program.nodes["trainer"].role, 0.03, learns)
    with tempfile.TemporaryDirectory() as folder:
        return go(program, "local", Path(folder), watch)


def trainings(seed: int, numbers: dict[str, int]) -> float:
    watch = Between("learner_steps", settle=0.7, measure=2.0)
    ga3c(seed, numbers, watch)
    return watch.rate


def adjusting(seed: int) -> dict[str, Any]:
    """From one of each. Then every hand setting is measured; then the best of them and the one found, in turns, three times."""
    one = {"agent": 1, "predictor": 1, "trainer": 1}
    run = ga3c(seed, one, Weights(seconds=CLIMB), adjust_seconds=TRIAL, most_agents=MOST_AGENTS, most_threads=MOST_THREADS)
    notes = [text for text in run.texts("note") if "trainings/s" in text]
    kept = dict(one)
    for text in notes:  # "12.0 trainings/s with 2 agents, 1 predictor, 1 trainer: kept; now ..."
        with_, verdict = re.search(r"with (.*?): (kept|taken back)", text).groups()  # type: ignore[union-attr]
        if verdict == "kept":
            kept = {role: int(re.search(rf"(\d+) {role}", with_)[1]) for role in one}  # type: ignore[index]
    grid = [dict(zip(one, numbers, strict=True))
            for numbers in itertools.product((3, MOST_AGENTS), (1, 2), (1, 2, MOST_THREADS))]
    hand = [round(trainings(seed, numbers), 1) for numbers in grid]
    best = grid[hand.index(max(hand))]
    turns = [(trainings(seed, kept), trainings(seed, best)) for _ in range(3)]
    found, reference = (statistics.median(rates) for rates in zip(*turns, strict=True))
    return {"met": found >= 0.85 * reference, "found": kept, "best_by_hand": best, "trainings_per_second": round(found, 1),
            "of_best_by_hand": round(reference, 1), "share": round(found / reference, 3),
            "in_turns": [[round(rate, 1) for rate in rates] for rates in turns], "began_with": round(trainings(seed, one), 1),
            "trials": len(notes), "by_hand": [[*numbers.values(), rate] for numbers, rate in zip(grid, hand, strict=True)],
            "notes": notes}


# ---------------------------------------------------------------------------------------------- lag behind a slow learner
class Dated(Learner):
    """Tells apart how many versions were published while an unroll was written, and how many while it waited for the learner."""

    def __init__(self, me: Any, parts: Any, **arguments: Any) -> None:
        super().__init__(me, parts, **arguments)
        self.published_at: list[float] = []
        self.most = {"written": 0, "waited": 0}

    def _publish(self, *arguments: Any) -> None:
        super()._publish(*arguments)
        self.published_at.append(time.time())

    async def _update(self, batch: Any) -> bool:
        seats = batch["weights_version"].shape[1] // batch["time"].shape[1]
        for sent, first in zip(batch["time"][-1], batch["weights_version"][0, ::seats], strict=True):
            waited = len(self.published_at) - bisect.bisect_right(self.published_at, sent)
            now = {"written": self.version - int(first) - waited, "waited": waited}
            if any(now[part] > self.most[part] for part in now):
                self.most = {part: max(now[part], self.most[part]) for part in now}
                self.me.note(json.dumps(self.most))
        return await super()._update(batch)


def wire_bound(slots: int, batch: int) -> int:
    """Versions that may be published while a finished unroll waits in a stream of this many slots.

    Lanes are served in turns, so at most all other slots of the stream are taken before it: it is in the ceil(slots / batch)-th
    batch begun after it was sent at the latest. The updates of the batches before that one, and the one that was being made when
    it was sent, are the versions it misses.
    """
    return math.ceil(slots / batch)


def slow_learner(seed: int) -> dict[str, Any]:
    cases, actors, batch = {}, 2, 2
    for architecture, depth in itertools.product(("actor_learner", "predictor_trainer", "central_inference"), (1, 4, 8)):
        key = "slots_per_actor" if architecture == "actor_learner" else "queue_slots"
        program, _ = draw(vtrace.Config(unroll=5), architecture, "CartPole-v1", seed=seed, net=NET, eval=SILENT, actors=actors,
                          batch_slots=batch, **{key: depth})
        role = "trainer" if architecture == "predictor_trainer" else "learner"
        program.nodes[role].role = slow(Dated, 0.05, learns)
        with tempfile.TemporaryDirectory() as folder:
            done = go(program, "local", Path(folder), Weights(until=lambda c: c.total("learner_steps") >= 100, seconds=30))
        learner = done.final[f"{role}-0"]
        bound = wire_bound(int(done.wires["unrolls"]["slots"]), batch)
        most = json.loads(done.texts("note")[-1])
        cases[f"{architecture} {depth}"] = {"mean": round(learner["policy_lag/sum"] / learner["policy_lag/count"], 2),
                                            "max": learner["policy_lag/max"], **most, "bound": bound,
                                            "met": most["waited"] <= bound and learner["learner_steps"] >= 100}
    return {"met": all(case["met"] for case in cases.values()), "lag": cases}


# ---------------------------------------------------------------------------------------------- split-column Catch
COLUMNS = EnvSource("shoal/Catch-v0", varied={"ball_column": range(5)})
CATCH = a2c.Config(unroll=18, lr=2e-3, lambda_=1.0)
SPLIT_STEPS = 60_000  # of each learner


class Returns(Weights):
    def end(self, control: Any, reason: str, error: str | None) -> None:
        super().end(control, reason, error)
        self.best = max((page["eval_return"] for page in self.final.values() if page.get("evaluations")), default=math.nan)


def split(seed: int, graph: str) -> dict[str, Any]:
    """Learner i sees the ball in column i only; evaluated in all columns, greedily, is what learner 0 has."""
    plan = EvalPlan(episodes=200, every_env_steps=20_000, until_return=0.9)
    program, _ = draw(CATCH, "gossip", COLUMNS, seed=seed, actors=5, graph=graph, eval=plan, envs_per_actor=8)
    watch = Returns(until=lambda c: c.total("env_steps") >= 5 * SPLIT_STEPS, seconds=240)
    with tempfile.TemporaryDirectory() as folder:
        run = go(program, "local", Path(folder), watch)
    return {"reached": run.reason == "return", "eval_return": watch.best, "env_steps": int(sum(
        page.get("env_steps", 0) for page in run.final.values())), "ended_by": run.reason}


def split_columns(seed: int) -> dict[str, Any]:
    ring, alone = split(seed, "ring"), split(seed, "none")
    return {"met": ring["reached"] and ring["eval_return"] >= 0.9 and not alone["reached"] and alone["eval_return"] <= 0,
            "ring": ring, "alone": alone, "eval_return": ring["eval_return"]}


LINES = [
    Line("mechanism-split-catch", 5, "five learners, each sees one column of Catch: ring >= 0.9 on all columns within 60,000 env "
         "steps of each, without gossip <= 0", split_columns, seeds=(0, 1, 2, 3, 4)),
    Line("mechanism-double-buffering", 5, "central_inference, 4 sleeping environments of 20 ms: two groups gain what the formula "
         "says, within 15 %: (k e + i) / max(k e, k e / 2 + i) for a latency i, (k e + i) / max(k e, 2 i) for an occupied server",
         double_buffering),
    Line("mechanism-adjuster", 5, "GA3C's adjuster, from (1, 1, 1), sleeping environments and model: trainings per second within "
         "15 % of the best hand setting", adjusting),
    Line("mechanism-slow-learner", 5, "a learner that sleeps 50 ms per update: of the versions an unroll is behind, those "
         "published while it waited in the wire are at most ceil(slots of the stream / batch)", slow_learner),
]
