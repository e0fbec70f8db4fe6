"""Small experiments, drawn and run directly: no configuration, no run directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal import algorithms
from shoal.architectures import named
from shoal.core import any_of
from shoal.nets import NetConfig
from shoal.roles.device_learner import DeviceLearner
from shoal.roles.evolution_master import EvolutionMaster
from shoal.roles.evolution_worker import EvolutionWorker
from shoal.roles.gossip_link import gossip_learner
from shoal.roles.hogwild import hogwild_worker
from shoal.roles.learner import Learner
from shoal.roles.parameter_server import ParameterServer
from shoal.roles.parameter_shards import first_shard
from shoal.roles.parts import EnvSource, EvalPlan, Parts
from shoal.roles.replay_config import ReplayConfig
from shoal.roles.representation import EncodedLearner
from shoal.runtime import Program, Supervisor, run
from tests.runtime.harness import PATIENCE, Farm, Killer, Watch

__all__ = ["Weights", "counted", "draw", "train"]

SEATS = 4


class NeverBackwards:
    """Sees to it that neither these counters nor the version of the weights run backwards."""

    def __init__(self, *names: str) -> None:
        self.highest = dict.fromkeys(names, 0.0)
        self._version = 0

    def __call__(self, control: Supervisor) -> None:
        for name, before in self.highest.items():
            self.highest[name] = control.total(name)
            assert self.highest[name] >= before, f"{name} ran backwards"
        before, self._version = self._version, control.program.wires["weights"].attach("reader", 0, 0).version
        assert self._version >= before, "the version of the weights ran backwards"


class WorksAgain:
    """Kills as `killer` does; done when every victim has also counted further, in a counter of its own, since it was killed."""

    def __init__(self, killer: Killer, counters: Mapping[str, str]) -> None:
        self.killer, self._counters = killer, counters
        self._marks: dict[str, float] = {}

    def __call__(self, control: Supervisor) -> None:
        before = self.killer.kills
        self.killer(control)
        if self.killer.kills > before:
            victim = self.killer.victims[before % len(self.killer.victims)]
            self._marks[victim] = self._count(control, victim)

    def done(self, control: Supervisor) -> bool:
        return self.killer.done(control) and all(self._count(control, name) > mark for name, mark in self._marks.items())

    def _count(self, control: Supervisor, victim: str) -> float:
        return control.counted(self._counters[victim])[victim]


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
    EncodedLearner: lambda role: role.counts[1],
    ParameterServer: lambda role: role.version,
    first_shard: lambda role: role.version,
    hogwild_worker: lambda role: role.link.model.version,
    gossip_learner: lambda role: role.link.version,
    DeviceLearner: lambda role: role.learner_state.totals[1],
    EvolutionWorker: lambda role: role.iteration,
    EvolutionMaster: lambda role: role.iteration,
}


NEEDS_EVALUATOR = ("async_gradients", "gossip", "device", "evolution", "evolution_master")  # for weights to be published


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
         max_learner_steps: int | None = None, replay: ReplayConfig | None = None, demos: str | None = None, offline: bool = False,
         **config: Any) -> tuple[Program, Parts]:
    """The program of one combination."""
    torch.set_num_threads(1)
    chosen = named(architecture)
    source = env if isinstance(env, EnvSource) else EnvSource(env)
    seats = config.pop("envs_per_actor", SEATS)
    if architecture == "device":
        config.setdefault("updates_per_step", 1)  # so that updates can be counted one by one
    made = algorithms.make(algorithm, source.describe(), net or NetConfig(), seats)
    parts = Parts(made, source, seats, seed=seed, actors=actors, learners=learners, max_env_steps=max_env_steps,
                  max_learner_steps=max_learner_steps, replay=replay or ReplayConfig(), demos=demos, offline=offline,
                  eval=eval or EvalPlan(enabled=architecture in NEEDS_EVALUATOR, episodes=1, every_env_steps=10**9))
    program = Program("test", seed=seed, metrics=made.metrics)
    made_config = chosen.config_class(envs_per_actor=seats, **config)
    made_config.validate()
    chosen.draw(program, parts, made_config)
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
    watch = watch or Weights(seconds=PATIENCE)  # it ends by itself; this is for one that hangs
    watch.reason = run(program, watch, kind, folder / "logs", fork_server=Farm.get() if kind == "local" else None)
    return watch
