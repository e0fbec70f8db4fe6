"""Small experiments, drawn and run directly: no configuration, no run directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal import algorithms
from shoal.architectures import ARCHITECTURES, named
from shoal.architectures.async_gradients import hogwild_worker
from shoal.architectures.device import DeviceLearner
from shoal.architectures.gossip import gossip_learner
from shoal.architectures.master import ParameterServer
from shoal.architectures.parts import EnvSource, EvalPlan, Parts
from shoal.architectures.replay_config import ReplayConfig
from shoal.architectures.replaying import ReplayLearner
from shoal.architectures.roles import Learner
from shoal.architectures.shards import first_shard
from shoal.core import any_of
from shoal.nets import NetConfig
from shoal.runtime import Program, run
from shoal.runtime.nursery import PRELOAD, Nursery
from tests.runtime.harness import Watch

__all__ = ["Farm", "Weights", "counted", "draw", "train"]

SEATS = 4


class Farm:
    """One fork server for all tests, started when the first one needs it."""

    nursery: Nursery | None = None

    @classmethod
    def get(cls) -> Nursery:
        if cls.nursery is None:
            cls.nursery = Nursery((*PRELOAD, *ARCHITECTURES.values(), "tests.architectures.graphs"))
        return cls.nursery

    @classmethod
    def close(cls) -> None:
        if cls.nursery is not None:
            cls.nursery.close()
            cls.nursery = None


def counted(make: Callable[..., Any], updates: int, count: Callable[[Any], int]) -> Callable[..., Any]:
    """A role that stops the program once `count(role)` is `updates`."""

    def made(me: Any, **arguments: Any) -> Any:
        role = make(me, **arguments)
        step = role.step

        async def counting() -> None:
            if count(role) >= updates:
                if getattr(role, "leader", True):  # whose weights are the ones that count
                    me.finish("counted")
                await any_of(timeout=60)
            await step()

        role.step = counting
        return role

    return made


COUNTS: dict[Any, Callable[[Any], int]] = {
    Learner: lambda role: role.counts[1],
    ReplayLearner: lambda role: role.counts[1],
    ParameterServer: lambda role: role.version,
    first_shard: lambda role: role.version,
    hogwild_worker: lambda role: role.link.model.version,
    gossip_learner: lambda role: role.link.version,
    DeviceLearner: lambda role: role.books.totals[1],
}


class Weights(Watch):
    """A session that keeps the last published weights."""

    def end(self, control: Any, reason: str, error: str | None) -> None:
        wires, wire = control.wires(), control.program.wires["weights"]
        self.published = wire.layout.empty()
        self.version = wire.attach("reader", 0, 0).pull(self.published)
        super().end(control, reason, error)  # after it: roles still run, and counters must not be older than the weights
        self.wires = wires  # in which this pull is not counted

    @property
    def hash(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.published["params"]).tobytes()).hexdigest()


def draw(algorithm: Any, architecture: str, env: Any, *, seed: int = 7, actors: int = 1, learners: int = 1,
         net: NetConfig | None = None, eval: EvalPlan | None = None, max_env_steps: int | None = None,
         replay: ReplayConfig | None = None,
         **config: Any) -> tuple[Program, Parts]:
    """The program of one combination."""
    torch.set_num_threads(1)
    module = named(architecture)
    source = env if isinstance(env, EnvSource) else EnvSource(env)
    seats = config.pop("envs_per_actor", SEATS)
    if architecture == "device":
        config.setdefault("updates_per_step", 1)  # so that updates can be counted one by one
    made = algorithms.make(algorithm, source.describe(), net or NetConfig(), seats)
    parts = Parts(made, source, seats, seed=seed, actors=actors, learners=learners, max_env_steps=max_env_steps,
                  replay=replay or ReplayConfig(),
                  eval=eval or EvalPlan(enabled=architecture in ("async_gradients", "gossip", "device"), episodes=1,
                                        every_env_steps=10**9))
    program = Program("test", seed=seed)
    made_config = module.Config(envs_per_actor=seats, **config)
    made_config.validate()
    module.draw(program, parts, made_config)
    return program, parts


def train(folder: Path, algorithm: Any, architecture: str, env: Any, kind: str, *, updates: int | None = 12,
          watch: Weights | None = None, **options: Any) -> Weights:
    """Run one combination; with `updates`, for exactly that many learner steps."""
    program, _ = draw(algorithm, architecture, env, **options)
    if updates is not None:
        for node in program.nodes.values():
            if node.role in COUNTS:
                node.role = counted(node.role, updates, COUNTS[node.role])
    return go(program, kind, folder, watch)


def go(program: Program, kind: str, folder: Path, watch: Weights | None = None) -> Weights:
    watch = watch or Weights()
    watch.reason = run(program, watch, kind, folder / "logs", nursery=Farm.get() if kind == "local" else None)
    return watch
