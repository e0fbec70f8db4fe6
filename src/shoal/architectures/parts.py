"""What an experiment hands to an architecture: an algorithm, environments, and how many of what."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shoal import envs
from shoal.algorithms.hardware import Hardware
from shoal.architectures.replay_config import ReplayConfig

if TYPE_CHECKING:
    from shoal.core import Algorithm, Learn

__all__ = ["EnvSource", "EvalPlan", "Parts"]


@dataclass(frozen=True)
class EnvSource:
    """Makes the same kind of environments wherever it is asked to."""

    env: Any
    backend: str = "auto"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    varied: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Arguments that differ from actor to actor: a value for each, in turns. Who evaluates has none of them."""

    def of(self, index: int) -> EnvSource:
        """What the `index`-th actor makes its environments from."""
        if not self.varied:
            return self
        own = {name: values[index % len(values)] for name, values in self.varied.items()}
        return replace(self, kwargs={**self.kwargs, **own}, varied={})

    def make(self, num_envs: int) -> envs.BatchedEnv:
        return envs.make(self.env, num_envs, backend=self.backend, **self.kwargs)

    def tensors(self, num_envs: int, device: Any) -> Any:
        """The same environments as tensor code on a device: a shoal.envs.device.TensorEnv."""
        from shoal.envs.device import make_tensors

        return make_tensors(self.env, num_envs, device, **self.kwargs)

    def describe(self) -> envs.EnvSpec:
        return envs.describe(self.env, backend=self.backend, **self.kwargs)


@dataclass(frozen=True)
class EvalPlan:
    """How the Evaluator works; `until_return` is where the run may stop."""

    enabled: bool = True
    episodes: int = 100
    every_env_steps: int = 20_000
    every_learner_steps: int | None = None
    """Count updates instead: where nobody acts there are no env_steps."""
    greedy: bool = True
    until_return: float | None = None


@dataclass(frozen=True)
class Parts:
    """Everything that roles are made of."""

    algorithm: Algorithm
    env: EnvSource
    envs_per_actor: int
    seed: int = 0
    actors: int = 1
    most_actors: int | None = None
    """How many there may be where their number follows the learner; none: it does not."""
    learners: int = 1
    learner_threads: int = 1
    max_env_steps: int | None = None
    max_learner_steps: int | None = None
    eval: EvalPlan = field(default_factory=EvalPlan)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Of use where the algorithm learns from replay."""
    spread: bool = False
    """Whether the shards of a replay table may be on different machines."""
    demos: str | None = None
    """Folder of demonstrations: a second table to draw from."""
    offline: bool = False
    """Nobody acts: the demonstrations are all there is to learn from."""
    hardware: Hardware = field(default_factory=Hardware)
    """Where learners and inference servers compute; actors and evaluators use the CPU."""

    @property
    def actor_replicas(self) -> tuple[int, int, int]:
        """Least, at first, most."""
        return 1, self.actors, max(self.actors, self.most_actors or 0)

    @property
    def core_each(self) -> bool:
        """Whether actors are kept on a core each: with a GPU the cores are theirs, where they are about as many."""
        cores = len(os.sched_getaffinity(0))
        return self.hardware.on_gpu and self.hardware.gpu.core_each and cores - 2 <= self.actors <= cores

    def on(self, index: int) -> Parts:
        """The same for the `index`-th of a kind, with the GPU of its learner: several learners take the GPUs in turns."""
        if self.learners == 1 or not self.hardware.on_gpu:
            return self
        return replace(self, hardware=self.hardware.at(index % self.learners))

    @property
    def together(self) -> bool:
        """Whether an inference server and its learner share a process, where each has one of the other."""
        return self.hardware.on_gpu and self.hardware.gpu.together and self.learners == 1

    def learn(self) -> Learn:
        """A new learning side, where it is to compute."""
        learn = self.algorithm.learn(self.seed)
        if self.hardware.on_gpu:
            learn.to(self.hardware)  # type: ignore[attr-defined]  # an algorithm that never sees a GPU needs none
            if self.hardware.gpu.graphs and hasattr(learn, "capture"):
                learn.capture()
        return learn
