"""Learners that act and learn on their own and average with their neighbours: GALA (Assran et al. 2019, 1906.04585).

      learner_0 ── params_0 (broadcast) ──▶ learner_1 ── params_1 ──▶ learner_2 ── params_2 ──▶ ... ──▶ learner_0
          └── weights (broadcast) ──▶ evaluator

One iteration of learner i: an unroll, a local update, publish x_i, and, if every in-peer j has published since the last
time, x_i <- (x_i + sum_j x_j) / (peers + 1). If one has not, it continues alone, at most `tau` times in a row; then it waits.
There is no barrier and no master.

                  paper and its source                        here
    messages      one buffer, skipped if it was not read      a broadcast: the newest always replaces the one before
    weights       scaled by the sender (out-degree)           by the receiver (in-degree): each row sums to 1 on any graph
    graph         ring, exponential, bipartite, rotating      ring or random regular, `peers` in-peers each, fixed
    statistics    -                                           running statistics are averaged with the parameters, Adam's not
    evaluation    average of all, or any one                  learner 0, whose deviation from the average is bounded
    a new life    -                                           a restarted learner begins with the average of its in-peers
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from shoal.errors import ConfigError
from shoal.learning import Architecture, ArchitectureOptions, Delivery, Tolerance
from shoal.options import number
from shoal.roles.evaluator import add_evaluator
from shoal.roles.gossip_link import gossip_learner, message_layout
from shoal.roles.parts import Parts
from shoal.runtime import Program

__all__ = ["Config", "Gossip", "in_peers"]


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Learners that gossip; there are as many as --actors."""

    envs_per_actor: int = number(8, at_least=1)
    """Environments that one learner steps together, E."""
    graph: Literal["ring", "random", "none"] = "ring"
    """Who listens to whom: the one before, somebody drawn from the seed, or nobody (for experiments)."""
    peers: int = number(1, at_least=1)
    """How many others each learner listens to."""
    tau: int = number(4, at_least=0)
    """How many iterations in a row a learner may continue without having heard from all its peers; 0 waits every time."""


class Gossip(Architecture):
    """See the module."""

    name = "gossip"
    config_class = Config

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.NOTHING, "every learner learns from what its own newest parameters did")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        if parts.learners != 1:
            raise ConfigError(f"--learners {parts.learners}: every actor of gossip is a learner; use --actors {parts.learners}")
        count = parts.actors
        if config.graph != "none" and count > 1 and config.peers >= count:
            raise ConfigError(f"--architecture.peers {config.peers}: {count} learners have at most {count - 1} peers each; "
                              "lower it, or raise --actors")
        listens = in_peers(count, config.graph, config.peers, parts.seed)
        spoken = sorted({j for peers in listens for j in peers})
        params = {j: program.broadcast(f"params_{j}", message_layout(parts)) for j in spoken}
        for i in range(count):
            ports: dict[str, Any] = {f"from_{j}": params[j].reader for j in listens[i]}
            if i in params:
                ports["params"] = params[i].publisher
            if i == 0 and parts.eval.enabled:
                weights = program.broadcast("weights", parts.algorithm.published_layout())
                add_evaluator(program, parts, weights)
                ports["weights"] = weights.publisher
            program.add(f"learner_{i}", gossip_learner, parts=replace(parts, env=parts.env.of(i)), index=i, count=count,
                        tau=config.tau, compute_threads=parts.learner_threads,
                        private_bytes=parts.algorithm.record.layout.nbytes, **ports)


def in_peers(count: int, graph: str, peers: int, seed: int) -> list[list[int]]:
    """For each learner those it listens to. `random` lays `peers` random cycles through all: strongly connected, regular."""
    if count == 1 or graph == "none":
        return [[] for _ in range(count)]
    if graph == "ring":
        return [[(i - k) % count for k in range(1, peers + 1)] for i in range(count)]
    rng = np.random.default_rng(seed)
    found: list[set[int]] = [set() for _ in range(count)]
    for _ in range(peers):
        order = rng.permutation(count)
        for k in range(count):
            found[order[k]].add(int(order[k - 1]))
    return [sorted(one) for one in found]
