"""A master and its workers: evolution strategies in which parameters travel and nobody waits for a slow worker.

    EvolutionMaster ── tasks (broadcast: task, iteration, parameters, limit of episodes) ──▶ TaskWorkers
    TaskWorkers ── results (stream: task, members, returns) ──▶ EvolutionMaster, until `population` members have come

Worker w of W plays chunks w, w + W, w + 2W, ... of a task until there is another one: a worker that is slow or dies only means that
others play more of the members. Results of an older task are refused. A task's id is the version of the broadcast, which never
decreases, so a master that was restarted cannot take a result of its predecessor's for one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import cast

import numpy as np

from shoal.algorithms.records.moments import observation_moment_fields
from shoal.core import Me, Publisher, Reader, Sink, Source, Tree
from shoal.population import Evolves, PopulationLearn, ScoreRecord
from shoal.roles.evolution_worker import update
from shoal.roles.learner_state import LearnerState
from shoal.roles.member_rollout import MemberRollout, random_observations, rows_of
from shoal.roles.parts import Parts
from shoal.slots import Field, Layout

__all__ = ["EvolutionMaster", "TaskWorker", "result_layout", "task_layout"]

PAIR = 2  # chunks hold whole pairs of mirrored members


def chunk_rows(parts: Parts) -> int:
    """Episodes of a chunk: in whole pairs of members."""
    record = cast(Evolves, parts.algorithm).record
    pair = PAIR * record.episodes
    return max(1, rows_of(parts.envs_per_actor, record) // pair) * pair


def task_layout(parts: Parts) -> Layout:
    one = Field((1,), "i8")
    return Layout({"published": parts.algorithm.published_layout().fields, "iteration": one, "longest_episode": one})


def result_layout(parts: Parts) -> Layout:
    """What a chunk's members did."""
    record = cast(Evolves, parts.algorithm).record
    members = chunk_rows(parts) // record.episodes
    one = Field((members,), "float64")
    moments = record.layout.fields.get("observation_moments")
    size = moments["sum"].shape[1] if isinstance(moments, Mapping) else 0
    return Layout({"task": Field((1,), "i8"), "chunk": Field((1,), "i8"), "number": Field((members,), "i8"), "score": one,
                   "decisions": one, **observation_moment_fields(size)})


class EvolutionMaster:
    """Hands out tasks, collects the returns of perturbed policies, and updates the parameters from them."""

    def __init__(self, me: Me, parts: Parts, tasks: Publisher, results: Source, weights: Publisher | None = None) -> None:
        algorithm = cast(Evolves, parts.algorithm)  # the architecture takes no others
        self.me, self.tasks, self.results, self.weights = me, tasks, results, weights
        self.record: ScoreRecord = algorithm.record
        self.learn = cast(PopulationLearn, parts.new_learn())
        self.learner_state = LearnerState(me, parts, self.learn)
        if self.learn.reference_wanted:
            with closing(parts.env.make(chunk_rows(parts))) as env:
                self.learn.refer_to(random_observations(me, env, self.learn.reference_wanted, parts.seed))
        self.collected: dict[int, Tree] = {}  # by chunk
        self.moments = self._no_moments = np.zeros(0)
        self.rng = me.rng("minibatches")
        self.task = 0
        self.settled = False

    @property
    def iteration(self) -> int:
        return int(self.learner_state.totals[1])

    async def step(self) -> None:
        """Take in one result."""
        if self.task == 0:
            self._publish()
        self.settled = True  # what it has collected is played again after a restart
        await self.me.permit("learner_steps", 1)
        result = await self.results.take(1)
        self.settled = False
        chunk = int(result["chunk"][0])
        if int(result["task"][0]) != self.task or chunk in self.collected:
            self.me.stats.add("results_refused")
            return
        found = self.learn.moments(result)
        self.moments = found if not len(self.moments) else self.moments + found
        self.collected[chunk] = {name: result[name].copy() for name in ("number", "score", "decisions")}
        if sum(len(one["number"]) for one in self.collected.values()) >= self.record.members:
            self._update()

    def _update(self) -> None:
        parts = [self.collected[chunk] for chunk in sorted(self.collected)]  # by who they are, not by who came first
        batch = {name: np.concatenate([part[name] for part in parts]) for name in ("number", "score", "decisions")}
        with self.me.stats.phase("learn"):
            metrics = update(self.learn, self.learner_state, batch, self.learn.sums(batch), self.moments, self.rng)
        decisions = int(batch["decisions"].sum())
        self.learner_state.count(decisions, 1)
        stats = self.me.stats
        stats.add("learner_steps")
        stats.add("samples_consumed", decisions)
        stats.observe("policy_lag", 0.0)
        self.learner_state.show(metrics)
        self._publish()

    def _publish(self) -> None:
        """The next task, and the same parameters for the Evaluator."""
        self.collected, self.moments = {}, self._no_moments
        with self.me.stats.phase("publish"):
            published = self.learn.published(self.learner_state.progress)
            self.task = self.tasks.publish({"published": published, "iteration": np.array([self.iteration]),
                                            "longest_episode": np.array([self.learn.longest_episode])})
            if self.weights is not None:
                self.me.stats.set("weights_version", self.weights.publish(published))

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray]:
        return self.learner_state.arrays()

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.learner_state.load(state)
        self.task = 0  # a new task: results of an earlier one are not of these parameters


class TaskWorker:
    """Plays perturbed policies of the newest task, chunk by chunk, and sends the returns."""

    def __init__(self, me: Me, parts: Parts, tasks: Reader, results: Sink) -> None:
        algorithm = cast(Evolves, parts.algorithm)
        self.me, self.tasks, self.results = me, tasks, results
        rows = chunk_rows(parts)
        self.rollout = MemberRollout(me, parts.env.make(rows), algorithm.members(parts.seed, rows), algorithm.record, parts.seed)
        self.task, self.chunk, self.told = 0, 0, task_layout(parts).empty()
        self.expected = rows  # decisions of a chunk: as many as in the last one

    async def step(self) -> None:
        if self.task == 0:
            await self.tasks.newer_than(0)
        slot = await self.results.slot()
        if self.tasks.version != self.task:
            with self.me.stats.phase("pull"):
                self.task, self.chunk = self.tasks.pull(self.told), self.me.index
                self.rollout.members.load(self.told["published"])
        await self.me.permit("env_steps", self.expected)
        slot.data["task"][0], slot.data["chunk"][0] = self.task, self.chunk
        first = self.chunk == self.me.index  # the observations of each worker's first chunk count
        if "observation_moments" in slot.data and not first:
            for part in slot.data["observation_moments"].values():
                part[...] = 0
        iteration, longest = int(self.told["iteration"][0]), int(self.told["longest_episode"][0])
        self.expected = max(1, self.rollout.play_any(iteration, self.chunk, longest, first, slot.data))
        slot.send()
        self.chunk += self.me.replicas

    def close(self) -> None:
        self.rollout.close()
