"""What an experiment hands to an architecture: an algorithm, environments, and how many of what."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal import envs
from shoal.acting import ItemRecord, StoredItems, UnrollRecord
from shoal.device.placement import Hardware
from shoal.envs.handling import Handling
from shoal.envs.multi_agent import GroupSpec
from shoal.envs.opponent_env import OpponentEnv, OpponentMaker, built_in_opponent
from shoal.errors import ConfigError
from shoal.league.matchmaking import LeaguePlan
from shoal.learning import Algorithm, DeviceLearn, Learn
from shoal.offline.data_config import DataConfig
from shoal.options import number
from shoal.population import ScoreRecord
from shoal.roles.goals import Goal
from shoal.roles.policies import NamedPolicies
from shoal.roles.replay_config import ReplayConfig

if TYPE_CHECKING:
    from shoal.envs.device import TensorEnv

__all__ = ["EnvSource", "EvalPlan", "Parts", "learner_places"]


@dataclass(frozen=True)
class EnvSource:
    """Makes the same kind of environments wherever it is asked to."""

    env: Any
    backend: str = "auto"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    varied: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Arguments that differ from actor to actor: a value for each, in turns. Who evaluates has none of them."""
    handling: Handling = field(default_factory=Handling)
    """Which numbers of `info` are read, and whether environments that raise are restarted."""
    opponent: OpponentMaker | None = None
    """Who sits on all seats but one (`against`)."""

    def of(self, index: int) -> EnvSource:
        """What the `index`-th actor makes its environments from."""
        if not self.varied:
            return self
        own = {name: values[index % len(values)] for name, values in self.varied.items()}
        return replace(self, kwargs={**self.kwargs, **own}, varied={})

    def make(self, num_envs: int) -> envs.BatchedEnv:
        made = envs.make(self.env, num_envs, backend=self.backend, handling=self.handling, **self.kwargs)
        return made if self.opponent is None else OpponentEnv(made, self.opponent)

    def against(self, opponent: str | OpponentMaker | None) -> EnvSource:
        """Matches against this opponent, one seat for each; None: the environments as they are."""
        if isinstance(opponent, str):
            opponent = built_in_opponent(opponent, envs.interface.env_name(self.env), self.kwargs)
        return replace(self, opponent=opponent)

    def make_multi_agent(self, num_envs: int) -> envs.MultiAgentEnv:
        """The same with every agent's own spaces."""
        return envs.make_multi_agent(self.env, num_envs, backend=self.backend, handling=self.handling, **self.kwargs)

    def describe_multi_agent(self) -> tuple[GroupSpec, ...]:
        return envs.describe_multi_agent(self.env, backend=self.backend, handling=self.handling, **self.kwargs)

    def tensors(self, num_envs: int, device: Any) -> TensorEnv:
        """The same environments as tensor code on a device."""
        from shoal.envs.device import make_tensor_env

        return make_tensor_env(self.env, num_envs, device, **self.kwargs)

    def describe(self) -> envs.EnvSpec:
        return envs.describe(self.env, backend=self.backend, handling=self.handling, **self.kwargs)


@dataclass(frozen=True)
class EvalPlan:
    """How the Evaluator works."""

    enabled: bool = True
    episodes: int = 100
    every_env_steps: int = number(20_000, live=True)
    every_learner_steps: int | None = None
    """Count updates instead: without actors there are no env_steps."""
    greedy: bool = True
    goal: Goal | None = None
    """Where the run may stop."""
    fitted: Goal | None = None
    """The same by fitted Q on the recording that is learned from."""
    against: str | None = None
    """Whom it plays against; none: the policy sits on all seats itself."""
    max_episode_steps: int = 10_000
    """Where an episode is cut off, unless the environment's own limit is higher."""
    free_cores: int = 1
    """Cores that nobody else computes on while it trains; an evaluation of slow environments uses as many processes."""
    last_cores: int = 1
    """The same for the evaluation at the end of a run, when everybody else has stopped."""


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
    anneal_env_steps: int | None = None
    """When what is annealed has its final value, where there is no max_env_steps."""
    max_learner_steps: int | None = None
    eval: EvalPlan = field(default_factory=EvalPlan)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Replay algorithms only."""
    spread: bool = False
    """Whether the shards of a replay table may be on different machines."""
    table: str = "replay"
    """The replay table that these parts speak of, where a graph has several (`of_table`)."""
    items: StoredItems | None = None
    """What that table holds; none: the items of the algorithm's record."""
    inserters: int | None = None
    """How many roles insert into it; none: the actors."""
    demos: str | None = None
    """Folder of demonstrations: a second table to draw from."""
    data: DataConfig = field(default_factory=DataConfig)
    """How they are read where they are all there is."""
    offline: bool = False
    """No actors run: the demonstrations are all there is to learn from."""
    counted_readers: int = 0
    """Readers of them whose observations a learner counts (recorded_moments.py)."""
    policies: NamedPolicies | None = None
    """Several policies, each with Parts of its own; none: `algorithm` plays for all agents."""
    league: LeaguePlan | None = None
    """Who takes part in a league; its players are `policies`."""
    log_episodes: bool = False
    """Whether actors write their episodes to a file each (roles/step_report.py)."""
    initial: Mapping[str, np.ndarray] | None = None
    """The weights that learning begins with, by their names in `Learn.weights`; none: random ones."""
    hardware: Hardware = field(default_factory=Hardware)
    """Where learners, workers and inference servers compute; actors and evaluators use the CPU."""

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

    @property
    def record(self) -> UnrollRecord | ItemRecord:
        """What actors write down of their steps."""
        record = self.algorithm.record
        if isinstance(record, ScoreRecord):
            raise ConfigError(f"--algorithm {self.algorithm.name} learns from the returns of whole episodes, and actors write down "
                              "single steps; use --architecture evolution")
        return record

    @property
    def step_record(self) -> UnrollRecord:
        """The record of single steps, as a wire carries them: of an item record's steps, or of the unrolls themselves."""
        record = self.record
        return record.steps if isinstance(record, ItemRecord) else record

    @property
    def item_record(self) -> ItemRecord:
        """The record of an algorithm that learns from replay."""
        record = self.algorithm.record
        if not isinstance(record, ItemRecord):
            raise ConfigError(f"--algorithm {self.algorithm.name} does not learn from replay tables: its record is a "
                              f"{type(record).__name__}, not an ItemRecord")
        return record

    def of_table(self, name: str, config: ReplayConfig, *, items: StoredItems | None = None, inserters: int | None = None) -> Parts:
        """The same for the roles around one of several tables: `config` is its own, and no demonstrations lie beside it."""
        return replace(self, table=name, replay=config, items=items, inserters=inserters, demos=None)

    @property
    def stored(self) -> StoredItems:
        """What the replay table holds."""
        return self.item_record if self.items is None else self.items

    @property
    def unroll_record(self) -> UnrollRecord:
        """The record of an algorithm that learns from unrolls as they come."""
        record = self.algorithm.record
        if not isinstance(record, UnrollRecord):
            raise ConfigError(f"--algorithm {self.algorithm.name} does not learn from unrolls: its record is a "
                              f"{type(record).__name__}, not an UnrollRecord")
        return record

    def new_learn(self) -> Learn:
        """A new learning side on the CPU, with the weights that the run begins with."""
        learn = self.algorithm.learn(self.seed)
        if self.initial is not None:
            with torch.no_grad():
                for name, array in self.initial.items():
                    learn.weights[name].copy_(torch.from_numpy(array))
        return learn

    def learn(self) -> Learn:
        """The same where it is to compute."""
        learn = self.new_learn()
        if self.hardware.on_gpu and isinstance(learn, DeviceLearn):
            learn.to(self.hardware)
            if self.hardware.gpu.graphs:
                learn.capture()
        return learn


def learner_places(parts: Parts) -> Callable[[int], str]:
    """A place for every learner and the actors that serve it (a paired stream): data never leave their process."""
    if parts.actors < parts.learners:
        raise ConfigError(f"--architecture.one-place with {parts.learners} learners and {parts.actors} actors: every learner needs "
                          f"an actor in its process; give --actors {parts.learners}")
    return lambda index: "main" if parts.learners == 1 else f"main-{index % parts.learners}"
