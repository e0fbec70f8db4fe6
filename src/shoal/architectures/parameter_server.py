"""Bundles that learn for themselves, parameters in one place: GORILA (Nair et al. 2015, 1507.04296, figures 1 and 2).

      bundle 0 (one process)                                       ┌────────────────────────┐
        actor 0 ── inserts ──▶ replay 0 ◀── samples ── learner 0 ──┤ gradients (call)       │
      bundle 1                                                     │   server: first slice, │ ── weights (broadcast), a slice each
        actor 1 ── inserts ──▶ replay 1 ◀── samples ── learner 1 ──┤   counts, judges       │        │
      ...                                                          │   shard_1, shard_2 ... │        ▼
         ▲                                                         └────────────────────────┘   actors, evaluator
         └──────────────────────────────────────────────────────────────────────────────────────────┘

A learner computes a gradient of a batch from its replay with parameters that it has from the server, and does not apply it: it
sends it there, and gets the newest parameters and the newest target net back. With `table = "global"` all actors write
to one table, and all learners draw from it. A bundle takes turns as DQN does (an actor waits for the updates that its
items are due), so one bundle is DQN; a global table has a rate limiter instead.

                    paper                                        here
    too old         the server drops it; limit not published     more than `max_staleness` updates of the first shard
    outlier loss    the learner drops it; mean + several sd      `outlier_width` (4) sd, with the statistics of ops/gates.py
    decision        by each shard                                by the first shard, for all: never half a gradient
    target net      fetched after every N updates of the server  refreshed at the server after N updates, sent with every reply
    exploration     annealed over the updates of all             over the env steps of all
    restart         not described                                each shard from its slice in the newest checkpoint
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shoal.errors import ConfigError
from shoal.learning import Architecture, ArchitectureOptions, Delivery, Tolerance
from shoal.options import number
from shoal.roles.data_path import data_path
from shoal.roles.parameter_shards import draw_server
from shoal.roles.parts import Parts
from shoal.runtime import Program

__all__ = ["Config", "ShardedParameterServer"]


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Bundles and a parameter server."""

    envs_per_actor: int = number(8, at_least=1)
    """Environments that one bundle's actor steps together, E."""
    shards: int = number(2, at_least=1)
    """Processes that share the parameters, a slice each."""
    table: Literal["local", "global"] = "local"
    """A replay table in every bundle, or one for all of them."""
    max_staleness: int | None = number(None, at_least=0)
    """Refuse gradients of parameters more than this many updates old; none takes all."""
    outlier_width: float | None = number(4.0, above=0)
    """Drop gradients whose loss is this many standard deviations above the mean of their learner's losses; none drops none."""


class ShardedParameterServer(Architecture):
    """See the module."""

    name = "parameter_server"
    config_class = Config
    takes_unrolls, takes_replay = False, True
    process_options = ("shards",)

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.REPLAY, f"learners draw from a {config.table} replay table, and others change the parameters "
                        "meanwhile")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        from shoal.roles.gradient_learner import GradientLearner, sharded_actor, sharded_evaluator  # only now: it imports Numba

        alone = config.table == "local"
        self._check(parts, alone)
        path = data_path(program, parts, depth=1, turns=alone and parts.replay.samples_per_insert is not None, each=alone)
        place = "bundle-{}".format
        clients, readers, cuts = draw_server(program, parts, config.shards, config.max_staleness)
        weights: dict[str, Any] = {f"weights_{k}": port for k, port in enumerate(readers)}
        servers: dict[str, Any] = {f"server_{k}": port for k, port in enumerate(clients)}
        program.add("actor", sharded_actor, parts=parts, cuts=cuts, experience=path.producer, replicas=parts.actors, place=place,
                    **weights)
        path.add_tables(place if alone else None)
        program.add("learner", GradientLearner, parts=parts, cuts=cuts, samples=path.consumer, weights=readers[0],
                    outlier_width=config.outlier_width, replicas=parts.actors, place=place, **servers)
        if parts.eval.enabled:
            program.add("evaluator", sharded_evaluator, parts=parts, cuts=cuts, **weights)

    def _check(self, parts: Parts, alone: bool) -> None:
        if parts.learners != 1:
            raise ConfigError(f"--learners {parts.learners}: every bundle of parameter_server has an actor and a learner; use "
                              "--actors")
        if parts.replay.publish_updates != 1:
            raise ConfigError(f"--replay.publish-updates {parts.replay.publish_updates} with --architecture parameter_server does "
                              "not fit: shards publish their slice after every update; leave it out")
        if alone and parts.replay.shards > 1:
            raise ConfigError(f"--replay.shards {parts.replay.shards} does not fit here: every bundle has a table of its own; "
                              "leave it out, or give --architecture.table global")
