"""The model of the pipeline against runs that it has not seen: calibrated on 1 and 2 actors, judged on more and on two learners.

Two workloads in which the number of actors matters on few cores: one that sleeps (environments that wait for a simulator, a
learner that waits for a device) and one that computes (CartPole: cores are what everybody shares). Learner idle and lag are judged
where nobody waits for a core. Where all do, a learner that needs about its share of the cores mostly waits or is always behind, and
a little decides which.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from typing import Any

from evidence.lines import Line
from evidence.sleepers import Sleeper, learns, slow
from shoal.algorithms import a2c, vtrace
from shoal.experiment.preload import PRELOAD
from shoal.nets import NetConfig
from shoal.planning.measure import both, fitted, observe
from shoal.planning.pipeline import simulate
from shoal.planning.terms import Cluster
from shoal.roles.learner import Learner
from shoal.roles.parts import EnvSource, EvalPlan
from shoal.runtime import Program
from shoal.runtime.fork_server_client import ForkServerClient
from tests.architectures.graphs import draw

__all__ = ["LINES"]

SECONDS = 6.0
WITHIN = 0.15
STEP_SECONDS, LEARN_SECONDS = 0.01, 0.04
DEPTH = 2


def sleeping(actors: int, learners: int, seed: int) -> Program:
    """10 ms a step, 10 steps an unroll, 40 ms an update of two unrolls: about five actors keep a learner busy."""
    program, _ = draw(vtrace.Config(unroll=10), "actor_learner", EnvSource(Sleeper, kwargs={"seconds": STEP_SECONDS}), seed=seed,
                      net=NetConfig(hidden=(8,)), eval=EvalPlan(enabled=False), envs_per_actor=1, actors=actors, learners=learners,
                      batch_slots=2, slots_per_actor=DEPTH)
    program.nodes["learner"].role = slow(Learner, LEARN_SECONDS, learns)
    return program


def computing(actors: int, learners: int, seed: int) -> Program:
    """CartPole with 16 environments an actor and the 64 x 64 net: everything computes."""
    program, _ = draw(vtrace.Config(unroll=20), "actor_learner", "CartPole-v1", seed=seed, eval=EvalPlan(enabled=False),
                      envs_per_actor=16, actors=actors, learners=learners, batch_slots=2, slots_per_actor=DEPTH)
    return program


def lockstep(actors: int, learners: int, seed: int) -> Program:
    """The same sleepers in lock step: every update has one unroll of each worker, and all wait for it."""
    program, _ = draw(a2c.Config(unroll=10), "synchronous", EnvSource(Sleeper, kwargs={"seconds": STEP_SECONDS}), seed=seed,
                      net=NetConfig(hidden=(8,)), eval=EvalPlan(enabled=False), envs_per_actor=1, actors=actors, learners=learners)
    program.nodes["trainer"].role = slow(Learner, LEARN_SECONDS, learns)
    return program


SIZES = {"sleeping": ((4, 1), (8, 1), (16, 1), (8, 2), (16, 2)), "lockstep": ((4, 1), (8, 1), (8, 2)),
         "computing": ((4, 1), (8, 1), (4, 2))}
WORKLOADS = {"sleeping": sleeping, "lockstep": lockstep, "computing": computing}


def judged(name: str, seed: int) -> dict[str, Any]:
    make, turns = WORKLOADS[name], name == "lockstep"
    batch, depth = (1, 1) if turns else (2, DEPTH)
    cores = len(os.sched_getaffinity(0))
    fork_server = ForkServerClient((*PRELOAD, "shoal.architectures.actor_learner", "shoal.architectures.synchronous",
                                    "evidence.sleepers"))
    try:
        known = both(partial(make, seed=seed), fork_server, SECONDS, lambda line: None)
        costs = fitted(*known, batch=batch, depth=depth, cores=cores, lockstep=turns)
        rows = []
        for actors, learners in SIZES[name]:
            seen = observe(make(actors, learners, seed), fork_server, seconds=SECONDS)
            said = simulate(costs, Cluster(cores), actors, learners, batch, depth, lockstep=turns)
            off = said.env_steps_per_second / seen.env_steps_per_second - 1
            close = abs(said.learner_idle - seen.learner_idle) <= WITHIN and \
                abs(said.policy_lag - seen.policy_lag) <= max(1.0, WITHIN * seen.policy_lag)
            cpu = (seen.actor_seconds["cpu"] + seen.learner_seconds["cpu"]) / seen.env_steps
            rows.append({"actors": actors, "learners": learners, "off": round(off, 3), "idle_and_lag_close": close,
                         "met": abs(off) <= WITHIN and (close or name == "computing"),
                         "measured": {**_short(seen), "cpu_seconds_per_million": round(1e6 * cpu, 1)},
                         "predicted": {**_short(said), "bottleneck": said.bottleneck}})
    finally:
        fork_server.close()
    return {"met": all(row["met"] for row in rows), "worst": max((row["off"] for row in rows), key=abs), "judged": rows,
            "calibration": [{**asdict(one), "env_steps_per_second": one.env_steps_per_second, "learner_idle": one.learner_idle}
                            for one in known], "costs": asdict(costs),
            "cores": cores, "batch": batch, "depth": depth, "lockstep": turns}


def _short(one: Any) -> dict[str, float]:
    return {"env_steps_per_second": round(one.env_steps_per_second, 1), "learner_idle": round(one.learner_idle, 3),
            "policy_lag": round(one.policy_lag, 2)}


def statement(name: str) -> str:
    sizes = ", ".join(f"{n} + {k}" for n, k in SIZES[name])
    also = "; learner idle within 15 points, lag within 15 % or one version" if name != "computing" else ""
    return (f"the discrete-event model, calibrated with 1 and 2 actors of the {name} workload, predicts the env steps/s of {sizes} "
            f"(actors + learners) within 15 %{also}")


LINES = [Line(f"scaling-{name}", 7, statement(name), partial(judged, name), seeds=(1, 2, 3)) for name in WORKLOADS]
