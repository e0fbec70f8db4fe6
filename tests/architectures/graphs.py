"""Small experiments, drawn and run directly: no configuration, no run directory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal import algorithms
from shoal.architectures import named
from shoal.architectures.parts import EnvSource, EvalPlan, Parts
from shoal.architectures.roles import Learner
from shoal.core import any_of
from shoal.nets import NetConfig
from shoal.runtime import Program, run
from tests.runtime.harness import Watch

__all__ = ["Weights", "train"]

SEATS = 4


class CountedLearner(Learner):
    """Stops the program after exactly `UPDATES` updates."""

    updates = 12

    async def step(self) -> None:
        if self.counts[1] >= self.updates:
            if self.leader:  # whose weights are the ones that count
                self.me.finish("counted")
            await any_of(timeout=60)
        await super().step()


class Weights(Watch):
    """A session that keeps the last published weights."""

    def end(self, control: Any, reason: str, error: str | None) -> None:
        super().end(control, reason, error)
        wire = control.program.wires["weights"]
        self.published = wire.layout.empty()
        self.version = wire.attach("reader", 0, 0).pull(self.published)

    @property
    def hash(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.published["params"]).tobytes()).hexdigest()


def train(folder: Path, algorithm: Any, architecture: str, env: str, kind: str, *, seed: int = 7, actors: int = 1, learners: int = 1,
          net: NetConfig | None = None, updates: int | None = 12, watch: Weights | None = None, eval: EvalPlan | None = None,
          max_env_steps: int | None = None, **config: Any) -> Weights:
    """Run one combination; with `updates`, for exactly that many learner steps."""
    torch.set_num_threads(1)
    module = named(architecture)
    source = EnvSource(env)
    seats = config.pop("envs_per_actor", SEATS)
    made = algorithms.make(algorithm, source.describe(), net or NetConfig(), seats)
    parts = Parts(made, source, seats, seed=seed, actors=actors, learners=learners, max_env_steps=max_env_steps,
                  eval=eval or EvalPlan(enabled=False))
    program = Program("test", seed=seed)
    module.draw(program, parts, module.Config(envs_per_actor=seats, **config))
    if updates is not None:
        for node in program.nodes.values():
            if node.role is Learner:
                node.role = type("Counted", (CountedLearner,), {"updates": updates})
    watch = watch or Weights()
    watch.reason = run(program, watch, kind, folder / "logs")
    return watch
