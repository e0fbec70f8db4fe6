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

import math
from dataclasses import dataclass
from typing import Any, Literal

from shoal.architectures.parts import Parts
from shoal.architectures.shards import draw_server
from shoal.core import Delivery, Tolerance
from shoal.errors import ConfigError
from shoal.runtime import Program

__all__ = ["Config", "delivers", "draw", "has_replay", "has_unrolls"]

has_replay, has_unrolls = True, False


@dataclass(frozen=True)
class Config:
    """Bundles and a parameter server."""

    envs_per_actor: int = 8
    """Environments that one bundle's actor steps together, E."""
    shards: int = 2
    """Processes that the parameters are cut into slices for."""
    table: Literal["local", "global"] = "local"
    """A replay table in every bundle, or one for all of them."""
    max_staleness: int | None = None
    """Refuse gradients of parameters more than this many updates old; none takes all."""
    outlier_width: float | None = 4.0
    """Drop gradients whose loss is so many standard deviations above the mean of their learner's; none drops none."""

    def validate(self) -> None:
        for name in ("envs_per_actor", "shards"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--architecture.{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigError(f"--architecture.max-staleness is {self.max_staleness}; it must not be negative")
        if self.outlier_width is not None and not 0 < self.outlier_width < math.inf:
            raise ConfigError(f"--architecture.outlier-width is {self.outlier_width}; it must be above 0, or none")


def delivers(config: Config) -> Delivery:
    return Delivery(Tolerance.REPLAY, f"learners draw from a {config.table} replay table, and others change the parameters "
                    "meanwhile")


def draw(program: Program, parts: Parts, config: Config) -> None:
    from shoal.architectures.bundle import BundleLearner, bundle_actor, piecewise_evaluator  # only now: they bring Numba
    from shoal.architectures.replay import Replay, make_limiter, replay_wires

    if parts.learners != 1:
        raise ConfigError(f"--learners {parts.learners}: every bundle of parameter_server has an actor and a learner; use --actors")
    if parts.replay.publish_updates != 1:
        raise ConfigError(f"--replay.publish-updates {parts.replay.publish_updates} with --architecture parameter_server does not "
                          "fit: shards publish their slice after every update; leave it out")
    alone = config.table == "local"
    if alone and parts.replay.shards > 1:
        raise ConfigError(f"--replay.shards {parts.replay.shards} does not fit here: every bundle has a table of its own; leave it "
                          "out, or give --architecture.table global")
    turns = alone and parts.replay.samples_per_insert is not None
    make_limiter(parts, turns)  # a band that could block both sides is refused here
    inserts, samples = replay_wires(program, parts, turns)
    count, place = parts.actors, "bundle-{}".format
    clients, readers, cuts = draw_server(program, parts, config.shards, config.max_staleness)
    weights: dict[str, Any] = {f"weights_{k}": port for k, port in enumerate(readers)}
    servers: dict[str, Any] = {f"server_{k}": port for k, port in enumerate(clients)}
    program.add("actor", bundle_actor, parts=parts, cuts=cuts, inserts=inserts.client, replicas=count, place=place, **weights)
    program.add("replay", Replay, parts=parts, inserts=inserts.server, samples=samples.server, turns=turns,
                replicas=count if alone else parts.replay.shards, place=place if alone else None)
    program.add("learner", BundleLearner, parts=parts, cuts=cuts, samples=samples.client, weights=readers[0],
                outlier_width=config.outlier_width, replicas=count, place=place, **servers)
    if parts.eval.enabled:
        program.add("evaluator", piecewise_evaluator, parts=parts, cuts=cuts, **weights)
