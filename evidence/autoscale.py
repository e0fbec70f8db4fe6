"""The number of actors follows the learner: environments that sleep, and half-way sleep longer (specs/policy.md 13d).

Everything is as in `shoal train impala --actors auto --autoscale.start 1`, but for a learner that sleeps too, so that what it
can take is known on any machine.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from evidence.cluster import cluster
from evidence.lines import Line
from evidence.sleepers import learns, slow
from shoal import runtime
from shoal.experiment.auto_layout import laid_out
from shoal.experiment.prepare import plan_to_json, prepare
from shoal.experiment.run import _session, plan_of
from shoal.experiment.rundir import RunDir
from shoal.experiment.session import Base
from shoal.roles.learner import Learner
from shoal.telemetry.outputs import read_lines
from tests.architectures.graphs import Weights, go

__all__ = ["LINES"]

FAST, SLOW, LEARN_SECONDS = 0.02, 0.034, 0.035  # s of a step at first, of a step later, of an update
HALF_SECONDS, LAST_SECONDS, MOST = 45.0, 12.0, 16
RAY_HALF_SECONDS = 120.0


class Tiring(gym.Env[np.ndarray, int]):
    """Sleeps in every step; longer once a file is there."""

    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(SLOW if self.file.exists() else FAST)
        return np.zeros(2, np.float32), 0.0, False, False, {}


def following(seed: int, half: float = HALF_SECONDS, where_to: tuple[tuple[str, Any], ...] = ()) -> dict[str, Any]:
    """One run of two halves."""
    with tempfile.TemporaryDirectory() as folder:
        tired, where = Path(folder) / "tired", Path(folder) / "run"
        plan = plan_of("impala", Tiring, None, None, {
            "actors": "auto", "autoscale.start": 1, "autoscale.most": MOST, "seed": seed, "envs.kwargs": {"file": str(tired)},
            "architecture.envs_per_actor": 1, "architecture.batch_slots": 2, "algorithm.unroll": 5, "net.hidden": (8,),
            "max_seconds": 2 * half, "eval.enabled": False, "tensorboard": False, "console.mode": "none", **dict(where_to)})
        prepared = prepare(laid_out(plan, lambda line: None))
        program = prepared.program()
        program.nodes["learner"].role = slow(Learner, LEARN_SECONDS, learns)
        rundir = RunDir.create(where, plan_to_json(prepared.plan))
        session = _session(prepared, rundir, Base(), None, time.monotonic())  # type: ignore[arg-type]
        marks: dict[str, Any] = {}
        glance = session._glance

        def watched(control: Any, now: float, env_steps: float) -> None:
            """The file at half-time; all counters when the last seconds of each half begin and end."""
            seconds = session._seconds(now)
            for name, at in (("first", half - LAST_SECONDS), ("half", half), ("second", 2 * half - LAST_SECONDS),
                             ("end", 2 * half - 0.5)):
                if seconds >= at and name not in marks:
                    marks[name] = (now, control.snapshot())
                    if name == "half":
                        tired.touch()
            glance(control, now, env_steps)

        session._glance = watched  # type: ignore[method-assign]
        runtime.run(program, session, prepared.plan.experiment.runtime, rundir.logs, ray=prepared.plan.experiment.ray)
        rows = read_lines(rundir.metrics_file)
    halves = {name: judged(rows, marks[begin], marks[end], *span) for name, begin, end, span in (
        ("fast", "first", "half", (0.0, half)), ("slow", "second", "end", (half, 2 * half)))}
    events = [f"{row['time'] - rows[0]['time']:.0f} s: {row['text']}" for row in rows if row.get("event") == "autoscale"]
    conserved, restarts = session.summary["slots"]["conserved"], session.summary["restarts"]
    return {"met": all(half["met"] for half in halves.values()) and conserved and restarts == 0, **halves,
            "conserved": conserved, "restarts": restarts, "events": events}


def following_on_ray(seed: int) -> dict[str, Any]:
    """The same on two nodes; a new actor takes seconds to start there."""
    with cluster(2, cpus=10) as made:
        return following(seed, RAY_HALF_SECONDS, (("runtime", "ray"), ("ray.address", made.address)))


def judged(rows: list[dict[str, Any]], begin: Any, end: Any, start: float, stop: float) -> dict[str, Any]:
    """A half: where it ended, what was right by the rates measured then, and how it got there."""
    seconds, before, after = end[0] - begin[0], begin[1], end[1]
    names = [name for name in after if name.startswith("actor-") and after[name]["alive"]]

    def grown(instances: list[str], word: str) -> float:
        return sum(after[name][word] - before[name][word] for name in instances)

    demand = grown(["learner-0"], "samples_consumed") / grown(["learner-0"], "busy_seconds")
    rate = grown(names, "env_steps") / (seconds * len(names) - grown(names, "wait_seconds/unrolls"))
    idle = 1 - grown(["learner-0"], "busy_seconds") / seconds
    right, found = math.ceil(demand / rate), len(names)
    numbers = [row["roles"]["actor"]["instances"] for row in rows
               if row["kind"] == "snapshot" and start <= row["seconds"] < stop and "actor" in row["roles"]]
    steps = [b - a for a, b in itertools.pairwise(numbers) if a != b]
    reversals = sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))
    settled = len(set(numbers[-int(LAST_SECONDS) :])) == 1
    return {"met": idle < 0.05 and abs(found - right) <= 1 and reversals <= 1 and settled, "actors": found, "right": right,
            "learner_idle": round(idle, 4), "demand": round(demand, 1), "rate_per_actor": round(rate, 2), "reversals": reversals,
            "settled": settled, "numbers": [number for number, _ in itertools.groupby(numbers)]}


# ---------------------------------------------------------------------------------------------- conservation
EVENTS = 20


class Shaken(Weights):
    """Scales the actors up and down at random, one change after the other, and kills half of them half-way."""

    def __init__(self, seed: int) -> None:
        super().__init__(until=lambda control: self.count > EVENTS and control.total("learner_steps") > self.then + 20,
                         seconds=150.0)
        self.rng, self.count, self.then, self.changing, self.killed = np.random.default_rng(seed), 0, math.inf, False, 0

    def tick(self, control: Any) -> None:
        super().tick(control)
        actors = [name for name, (node, _) in control.running.items() if node == "actor"]
        begun, back = control.total("learner_steps") >= 2, control.total("restarts") == self.killed
        if self.changing or self.count > EVENTS or not begun or not back:
            return
        if self.count == EVENTS // 2 and not self.killed:
            for name in actors[: math.ceil(len(actors) / 2)]:
                pid = control.children[name].pid
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    self.killed += 1
            return
        self.count += 1
        self.then = control.total("learner_steps")
        if self.count <= EVENTS:
            self.changing = True
            others = [n for n in range(1, 7) if n != len(actors)]
            wanted = 6 if self.count == EVENTS // 2 and 6 in others else int(self.rng.choice(others))
            control.scale("actor", wanted, done=lambda result, error: setattr(self, "changing", False))


def shaken(seed: int) -> dict[str, Any]:
    plan = plan_of("impala", "CartPole-v1", None, None, {"actors": "auto", "autoscale.start": 3, "autoscale.most": 6, "seed": seed,
                                                         "eval.enabled": False})
    program = prepare(laid_out(plan, lambda line: None)).program()
    watch = Shaken(seed)
    with tempfile.TemporaryDirectory() as folder:
        go(program, "local", Path(folder), watch)
    wire, restarts = watch.wires["unrolls"], int(sum(page["restarts"] for page in watch.final.values()))
    balanced = wire["written"] == wire["consumed"] + wire["dropped"] + wire["occupied"]
    return {"met": watch.reason == "until" and watch.unbalanced == 0 and balanced and wire["dropped"] == 0 and
            restarts == watch.killed > 0, "scale_events": len(watch.texts("scale")), "killed": watch.killed, "restarts": restarts,
            "ended_by": watch.reason,
            "unrolls": {name: int(wire[name]) for name in ("written", "consumed", "dropped", "occupied", "torn")}}


LINES = [
    Line("autoscale-conservation", 7, f"{EVENTS} changes of the number of actors at random, half of them killed half-way: learning "
         "goes on, every unroll that was written is consumed or held, none is lost, the restarts are those of the killed", shaken,
         seeds=(1, 2, 3)),
    Line("autoscale", 7, f"--actors auto from 1 actor, environments that sleep {1000 * FAST:g} ms and half-way {1000 * SLOW:g} ms: "
         f"learner idle under 5 % in the last {LAST_SECONDS:g} s of each half, the number of actors within 1 of demand / rate, at "
         "most one step back in a half and none at its end", following, seeds=(1, 2, 3)),
    Line("ray-autoscale", 7, f"the line `autoscale` with --runtime ray on two nodes, in halves of {RAY_HALF_SECONDS:g} s",
         following_on_ray, seeds=(1,)),
]
