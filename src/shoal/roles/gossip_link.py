"""A learner that averages its parameters with those of its neighbours (GALA): the link of a Worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shoal.acting import Progress
from shoal.core import Me, Publisher, Reader, Tree
from shoal.roles.learner_state import LearnerState
from shoal.roles.parts import Parts
from shoal.roles.worker import Origin, Worker
from shoal.slots import Layout

__all__ = ["GossipLink", "gossip_learner", "message_layout", "mix"]


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
    return Worker(me, parts, GossipLink(me, parts, tau, params, weights, list(peers.values()), count), index, count, joint=True)


class GossipLink:
    """Gradients are applied at home; after each unroll parameters are sent and received."""

    def __init__(self, me: Me, parts: Parts, tau: int, params: Publisher | None, weights: Publisher | None, peers: Sequence[Reader],
                 count: int) -> None:
        self.me, self.tau, self.params, self.weights, self.peers = me, tau, params, weights, peers
        self.learner_state = LearnerState(me, parts, parts.learn(), peers=count)
        self.learn = self.learner_state.learn
        self.heard = [0] * len(peers)  # the newest version used of each peer
        layout = Layout.of(self._message())
        self.inbox: list[Tree] = [layout.empty() for _ in peers]
        self.alone = 0  # iterations since it last heard from all
        self.begun = False

    @property
    def version(self) -> int:
        return int(self.learner_state.counts[0, 1])

    @property
    def progress(self) -> Progress:
        return self.learner_state.progress

    def _message(self) -> Tree:
        return {name: tensor.numpy() for name, tensor in self.learn.weights.items()}

    async def begin(self) -> None:
        await self.me.permit("learner_steps", 1)
        if self.begun:
            return
        self.begun = True
        if self.me.incarnation and self.peers and all(peer.version for peer in self.peers):
            self._receive(instead=True)
        self._publish()

    async def push(self, gradient: np.ndarray, phase: str, origin: Origin) -> None:
        with self.me.stats.phase("learn"):
            self.learner_state.apply(gradient, phase)
        self.me.stats.add("learner_steps", int(origin.completes))
        self.me.stats.observe("policy_lag", 0.0)
        if not origin.last:
            self.learner_state.count(0, int(origin.completes))
            return
        self.learn.absorb(self.learn.moments(origin.batch))
        self.learner_state.count(origin.decisions, 1)
        self._send()
        await self._hear()
        self._publish()

    def _send(self) -> None:
        if self.params is not None:
            with self.me.stats.phase("publish"):
                self.params.publish(self._message())

    async def _hear(self) -> None:
        """Average if all in-peers have spoken since the last time; if not, continue alone, but not for ever."""
        if not self.peers:
            return
        spoken = [peer.version > version for peer, version in zip(self.peers, self.heard, strict=True)]
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

    def show(self, metrics: Sequence[Mapping[str, float]]) -> None:
        self.learner_state.show(metrics)

    def state(self) -> dict[str, np.ndarray] | None:
        return self.learner_state.arrays()

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.learner_state.load(state)
