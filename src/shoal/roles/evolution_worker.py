"""EvolutionWorker: one of the workers of an evolution strategy that tell each other returns and nothing else.

    the chunks of iteration k with number % workers == rank ──▶ scores, zeros elsewhere ── group.sum ──▶ everybody's scores
    everybody's scores ──▶ the same update at every worker ──▶ iteration k + 1

All workers hold the same parameters, optimiser state and statistics, to the bit. A checksum travels with the scores: a worker whose
parameters differ from the senior one's takes over its state, says so, and the iteration is played again.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import cast

import numpy as np

from shoal.core import GroupMember, Me, Publisher, Tree
from shoal.errors import GroupChanged
from shoal.population import Evolves, PopulationLearn
from shoal.roles.learner_group import agree, agree_again, state_bytes
from shoal.roles.learner_state import LearnerState
from shoal.roles.member_rollout import MemberRollout, random_observations, rows_of
from shoal.roles.parts import Parts

__all__ = ["EvolutionWorker", "group_bytes", "update"]

MARKS = 2  # a checksum of the parameters and one of the noise table, of each worker


def group_bytes(parts: Parts, workers: int) -> int:
    """What the group wire carries at most: a state for newcomers, or the scores of an iteration with everybody's checksums."""
    algorithm = cast(Evolves, parts.algorithm)
    learn, batch = algorithm.learn(parts.seed), algorithm.record.layout.empty()
    scores = MARKS * workers + 1 + len(learn.sums(batch)) + len(learn.moments(batch))
    return max(state_bytes(learn), 8 * scores)


class EvolutionWorker:
    """Plays its share of the perturbed policies of an iteration; all workers make the same update from everybody's returns."""

    shares_state = True  # a restarted worker may begin from any worker's checkpoint

    def __init__(self, me: Me, parts: Parts, group: GroupMember, weights: Publisher | None = None) -> None:
        algorithm = cast(Evolves, parts.algorithm)  # the architecture takes no others
        self.me, self.group, self.weights = me, group, weights
        self.learn = cast(PopulationLearn, parts.new_learn())
        self.learner_state = LearnerState(me, parts, self.learn)
        rows = rows_of(parts.envs_per_actor, algorithm.record)
        self.rollout = MemberRollout(me, parts.env.make(rows), algorithm.members(parts.seed, rows), algorithm.record, parts.seed)
        if self.learn.reference_wanted:
            self.learn.refer_to(random_observations(me, self.rollout.env, self.learn.reference_wanted, parts.seed))
        self.batch = algorithm.record.layout.empty()
        self.chunks: list[int] = []     # of this iteration, still to be played
        self.expected = rows            # decisions of an iteration, of this worker: as many as in the last one
        self.played = 0
        self.rng = me.rng("minibatches")
        self.greeted = self.begun = self.settled = False

    @property
    def leader(self) -> bool:
        """Whether this worker's state is published and saved."""
        return self.group.leader

    @property
    def iteration(self) -> int:
        return int(self.learner_state.totals[1])

    async def step(self) -> None:
        """Begin an iteration, play one chunk of it, or finish it: short steps, so that it can be stopped in the middle."""
        if self.greeted and self.group.changed():
            self._start_over()
        if not self.begun:
            await self._begin()
        elif self.chunks:
            self.played += self.rollout.play(self.iteration, self.chunks.pop(0), self.learn.longest_episode, self.batch)
        else:
            try:
                await self._finish()
            except GroupChanged:
                self._start_over()

    def _start_over(self) -> None:
        """Workers died or joined: agree anew, and share the iteration's members out among those that there are now."""
        self.me.stats.add("group_discarded")
        self.greeted = self.begun = False

    async def _begin(self) -> None:
        self.settled = True  # nothing changes before the others are here
        if not self.greeted:
            await agree(self.learner_state, self.group)
            self.greeted = True
            self._publish()
        await self.me.permit("learner_steps", 1 / self.group.size, self.iteration)
        await self.me.permit("env_steps", self.expected, self.iteration)
        self.settled = False
        if self.group.changed():
            return
        self.rollout.members.load(self.learn.published(self.learner_state.progress))
        for array in self.batch.values():
            for part in array.values() if isinstance(array, Mapping) else (array,):
                part[...] = 0
        self.chunks = list(range(self.group.rank, self.rollout.chunks, self.group.size))
        self.played, self.begun = 0, True

    async def _finish(self) -> None:
        """Hear how everybody's members did, and make the update."""
        sums, moments = self.learn.sums(self.batch), self.learn.moments(self.batch)
        head = np.zeros(MARKS * self.me.replicas + 1)
        head[MARKS * self.group.rank :][:MARKS] = self.checksum(), self.learn.fingerprint
        head[-1] = self.played
        joined = await self.group.sum(np.concatenate([head, sums, moments]))
        if not await self._alike(joined[: MARKS * self.group.size].reshape(-1, MARKS)):
            return
        decisions = int(joined[len(head) - 1])
        sums, moments = np.split(joined[len(head) :], [len(sums)])
        with self.me.stats.phase("learn"):
            metrics = update(self.learn, self.learner_state, self.batch, sums, moments, self.rng)
        self.learner_state.count(decisions, 1)
        self.expected, self.begun = max(1, decisions // self.group.size), False
        stats = self.me.stats
        stats.add("samples_consumed", self.played)
        stats.observe("policy_lag", 0.0)
        if self.leader:
            stats.add("learner_steps")
            self.learner_state.show(metrics)
            self._publish()

    def _publish(self) -> None:
        """For the Evaluator alone: workers need no parameters from each other."""
        if self.weights is not None and self.leader:
            with self.me.stats.phase("publish"):
                version = self.weights.publish(self.learn.published(self.learner_state.progress))
            self.me.stats.set("weights_version", version)

    # ------------------------------------------------------------------ replicas
    def checksum(self) -> int:
        """Of all that members are made of."""
        found = 0
        for tensor in self.learn.weights.values():
            found = zlib.crc32(tensor.numpy().reshape(-1).view(np.uint8).data, found)
        return found

    async def _alike(self, marks: np.ndarray) -> bool:
        """Whether all workers have the senior one's parameters and noise. If not, all take over its state."""
        if (marks == marks[0]).all():
            return True
        mine = marks[self.group.rank]
        if mine[1] != marks[0, 1]:
            self.me.fail("the noise table of this machine differs from that of the first worker: their libraries round "
                         "differently, and so would updates; use the same versions of NumPy and of the C library everywhere")
        await agree_again(self.learner_state, self.group)
        if mine[0] != marks[0, 0]:
            self.me.stats.add("replicas_resynchronised")
            self.me.note(f"the parameters of this worker had drifted from those of the first one in iteration {self.iteration}; "
                         "it has taken over that state, and the iteration is played again")
        self.begun = False
        return False

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray] | None:
        return self.learner_state.arrays() if self.leader or not self.greeted else None

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.learner_state.load(state)

    def close(self) -> None:
        self.rollout.close()


def update(learn: PopulationLearn, learner_state: LearnerState[PopulationLearn], batch: Tree, sums: np.ndarray, moments: np.ndarray,
           rng: np.random.Generator) -> list[Mapping[str, float]]:
    """One update from everybody's scores; returns its metrics."""
    metrics = []
    for minibatch in learn.minibatches(batch, sums, learner_state.progress, rng):
        for phase in learn.phases:
            gradient, found = learn.gradients(minibatch, phase)
            learner_state.apply(gradient, phase)
            metrics.append(found)
    learn.absorb(moments)
    return metrics
