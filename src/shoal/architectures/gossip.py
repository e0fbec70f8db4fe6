"""Learners that act and learn on their own and average with their neighbours: GALA (Assran et al. 2019, 1906.04585).

      learner_0 ── params_0 (broadcast) ──▶ learner_1 ── params_1 ──▶ learner_2 ── params_2 ──▶ ... ──▶ learner_0
          └── weights (broadcast) ──▶ evaluator

One iteration of learner i: an unroll, a local update, publish x_i, and, if every in-peer j has published since the last
time, x_i <- (x_i + sum_j x_j) / (peers + 1). If one has not, it goes on alone, at most `tau` times in a row; then it waits.
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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from shoal.architectures.books import Books
from shoal.architectures.parts import Parts
from shoal.architectures.roles import Evaluator
from shoal.architectures.worker import Origin, Worker
from shoal.core import Delivery, Me, Progress, Publisher, Reader, Tolerance, Tree
from shoal.errors import ConfigError
from shoal.runtime import Program
from shoal.slots import Layout

__all__ = ["Config", "delivers", "draw", "gossip_learner", "in_peers", "mix"]


@dataclass(frozen=True)
class Config:
    """Learners that gossip; there are as many as --actors."""

    envs_per_actor: int = 8
    """Environments that one learner steps together, E."""
    graph: Literal["ring", "random", "none"] = "ring"
    """Who listens to whom: the one before, somebody drawn from the seed, or nobody (for experiments)."""
    peers: int = 1
    """How many others each learner listens to."""
    tau: int = 4
    """How many iterations in a row a learner may go on without having heard from all its peers; 0 waits every time."""

    def validate(self) -> None:
        for name in ("envs_per_actor", "peers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--architecture.{name} is {getattr(self, name)}; it must be at least 1".replace("_", "-"))
        if self.tau < 0:
            raise ConfigError(f"--architecture.tau is {self.tau}; it must not be negative")


def delivers(config: Config) -> Delivery:
    return Delivery(Tolerance.NOTHING, "every learner learns from what its own newest parameters did")


def draw(program: Program, parts: Parts, config: Config) -> None:
    if parts.learners != 1:
        raise ConfigError(f"--learners {parts.learners}: every actor of gossip is a learner; use --actors {parts.learners}")
    count = parts.actors
    if config.graph != "none" and count > 1 and config.peers >= count:
        raise ConfigError(f"--architecture.peers {config.peers}: {count} learners have at most {count - 1} peers each; lower it, "
                          "or raise --actors")
    listens = in_peers(count, config.graph, config.peers, parts.seed)
    spoken = sorted({j for peers in listens for j in peers})
    params = {j: program.broadcast(f"params_{j}", message_layout(parts)) for j in spoken}
    for i in range(count):
        ports: dict[str, Any] = {f"from_{j}": params[j].reader for j in listens[i]}
        if i in params:
            ports["params"] = params[i].publisher
        if i == 0 and parts.eval.enabled:
            weights = program.broadcast("weights", parts.algorithm.published_layout())
            program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)
            ports["weights"] = weights.publisher
        program.add(f"learner_{i}", gossip_learner, parts=replace(parts, env=parts.env.of(i)), index=i, count=count, tau=config.tau,
                    compute_threads=parts.learner_threads, **ports)


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


def mix(mine: torch.Tensor, messages: Sequence[torch.Tensor]) -> None:
    """x <- x / (peers + 1) + sum(messages) / (peers + 1), in place. The weights sum to 1, whatever the graph."""
    share = 1.0 / (len(messages) + 1)
    with torch.no_grad():
        mine.mul_(share)
        for message in messages:
            mine.add_(message, alpha=share)


def message_layout(parts: Parts) -> Layout:
    """Parameters and running statistics; the optimiser's moments stay at home."""
    return Layout.of({name: tensor.numpy() for name, tensor in parts.algorithm.learn(parts.seed).weights.items()})


def gossip_learner(me: Me, parts: Parts, index: int, count: int, tau: int, params: Publisher | None = None,
                   weights: Publisher | None = None, **peers: Reader) -> Worker:
    """Acts and learns on its own, and averages its parameters with those of its in-peers."""
    return Worker(me, parts, Gossip(me, parts, tau, params, weights, list(peers.values()), count), index, count)


class Gossip:
    """Gradients are applied at home; after each unroll parameters are sent and received."""

    def __init__(self, me: Me, parts: Parts, tau: int, params: Publisher | None, weights: Publisher | None, peers: Sequence[Reader],
                 count: int) -> None:
        self.me, self.tau, self.params, self.weights, self.peers = me, tau, params, weights, peers
        self.books = Books(me, parts, share=count)  # the others are about as far
        self.learn = self.books.learn
        self.heard = [0] * len(peers)  # the newest version used of each peer
        layout = Layout.of(self._message())
        self.inbox: list[Tree] = [layout.empty() for _ in peers]
        self.alone = 0  # iterations since it last heard from all
        self.begun = False

    @property
    def version(self) -> int:
        return int(self.books.counts[0, 1])

    @property
    def progress(self) -> Progress:
        return self.books.progress

    def _message(self) -> Tree:
        return {name: tensor.numpy() for name, tensor in self.learn.weights.items()}

    async def begin(self) -> None:
        if self.begun:
            return
        self.begun = True
        if self.me.incarnation and self.peers and all(peer.version for peer in self.peers):  # type: ignore[attr-defined]
            self._receive(instead=True)
        self._publish()

    async def push(self, gradient: np.ndarray, phase: str, origin: Origin) -> None:
        with self.me.stats.phase("learn"):
            self.books.apply(gradient, phase)
        self.me.stats.add("learner_steps")
        self.me.stats.observe("policy_lag", 0.0)
        if not origin.last:
            self.books.count(0, 1)
            return
        self.learn.absorb(self.learn.moments(origin.batch))
        self.books.count(origin.decisions, 1)
        self._send()
        await self._hear()
        self._publish()

    def _send(self) -> None:
        if self.params is not None:
            with self.me.stats.phase("publish"):
                self.params.publish(self._message())

    async def _hear(self) -> None:
        """Average if all in-peers have spoken since the last time; if not, go on alone, but not for ever."""
        if not self.peers:
            return
        spoken = [peer.version > version for peer, version in zip(self.peers, self.heard, strict=True)]  # type: ignore[attr-defined]
        if not all(spoken):
            self.alone += 1
            if self.alone <= self.tau:
                return
            for peer, version in zip(self.peers, self.heard, strict=True):
                await peer.newer_than(version)
        self.alone = 0
        self._receive()

    def _receive(self, instead: bool = False) -> None:
        """Average with the newest messages of all in-peers; `instead` of the own parameters, where these are worth nothing."""
        with self.me.stats.phase("pull"):
            for k, peer in enumerate(self.peers):
                self.heard[k] = peer.pull(self.inbox[k])
            for name, tensor in self.learn.weights.items():
                messages = [torch.from_numpy(message[name]) for message in self.inbox]
                if instead:
                    tensor.copy_(messages[0])
                    mix(tensor, messages[1:])
                else:
                    mix(tensor, messages)

    def _publish(self) -> None:
        if self.weights is not None:
            self.me.stats.set("weights_version", self.weights.publish(self.learn.published(self.progress)))

    def show(self, metrics: dict[str, float]) -> None:
        self.books.show(metrics)

    def state(self) -> dict[str, np.ndarray] | None:
        return self.books.bundle()

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.books.unbundle(state)
