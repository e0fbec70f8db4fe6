"""The PolicyActor: environments whose seats belong to different policies.

    weights.P (broadcast) ──▶ PolicyActor ──▶ unrolls.P (stream)         for each policy P that learns

At the start of an episode every seat is given a policy. At every step each policy acts once, for those of its seats that are asked,
and what it decided goes into the columns of its own slot. A slot is sent when its columns are full, whatever the state of the
others: so a policy that plays seldom holds nobody up. In lock step the actor plays until the slots of all policies are full, and
then waits for new weights of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.records.step_view import rows_of_view
from shoal.core import Me, Reader, Slot, StreamEnd
from shoal.envs import MultiAgentEnv, MultiAgentStep, Step
from shoal.envs.multi_agent import AgentGroup
from shoal.envs.opponent_env import Opponent
from shoal.errors import ConfigError
from shoal.roles.asked_seats import AskedSeats
from shoal.roles.parts import Parts
from shoal.roles.player import asked, seat_record
from shoal.roles.policies import NamedPolicies
from shoal.roles.policy_opponent import no_actions
from shoal.roles.step_report import StepReport

__all__ = ["LearningSeats", "PolicyActor", "episode_return_of"]

LONG = 10  # a round is looked at each time that its slots' decisions were made so often


def episode_return_of(policy: str) -> str:
    """The metric with the training returns of one policy's seats."""
    return f"{policy}.episode_return"


class LearningSeats:
    """A policy that learns, in one actor: its weights, the decisions of its seats, and the slot that they go to."""

    def __init__(self, me: Me, name: str, parts: Parts, group: AgentGroup, sink: StreamEnd, weights: Reader, seed: int) -> None:
        self.me, self.name, self.algorithm, self.sink, self.weights = me, name, parts.algorithm, sink, weights
        self.policy, self.count = self.algorithm.policy(), group.num_seats
        self.recorder = seat_record(self.algorithm.name, parts.unroll_record).columns(group.num_seats)
        self.seats = AskedSeats(self.policy.act, self.policy.initial_state(group.num_seats))
        self.rng = torch.Generator().manual_seed(seed)
        self.published = self.algorithm.published_layout().empty()
        self.explore: np.ndarray | None = None
        self.slot: Slot | None = None
        self.begun = False  # whether the recorder fills it
        self.version = self.recorded = self.sent = 0
        self.decided = 0  # decisions that were written down

    def refresh(self) -> None:
        """Take newer weights, if there are any."""
        if self.weights.version == self.version:
            return
        with self.me.stats.phase("pull"):
            self.version, self.sent = self.weights.pull(self.published), 0
            self.policy.load(self.published)
            progress = Progress.of(self.published["progress"])
            self.explore = self.algorithm.explore(self.me.index, self.me.replicas, self.count, progress)
        self.me.stats.observe("publish_to_use_seconds", self.weights.age_seconds)

    async def take_slot(self) -> None:
        """Wait for a slot, unless one is under way."""
        if self.slot is None:
            self.slot, self.begun = await self.sink.slot(), False

    def begin(self, lock_step: bool) -> None:
        """Act with the newest weights from now on. In lock step decisions that were made with older ones are dropped."""
        self.refresh()
        if lock_step and self.recorded != self.version:
            self.recorder.forget()
        self.recorded = self.version
        if not self.begun:
            assert self.slot is not None
            self.begun = True
            self.recorder.begin(self.slot.data)

    def leave(self) -> None:
        """Drop what is under way: nobody learns from it. The slot stays for later."""
        self.recorder.forget()
        self.begun = False

    def act(self, step: Step, rows: np.ndarray, learns: np.ndarray) -> np.ndarray:
        """Decide for the seats `rows` [B]; of those with `learns` [B] it is written down."""
        seats, recorder = self.seats, self.recorder
        with self.me.stats.phase("inference"):
            action = seats.act(recorder.view(step), rows, self.explore, self.rng)
        with self.me.stats.phase("write"):
            kept = np.flatnonzero(learns[seats.rows])
            self.decided += len(kept)
            if len(kept) == len(seats.rows):
                recorder.act(seats.rows, seats.view, seats.of_rows(seats.before), action[seats.rows], seats.of_rows(seats.extras),
                             self.version)
            elif len(kept):
                seats.rows, seats.view = seats.rows[kept], rows_of_view(seats.view, kept)
                recorder.act(seats.rows, seats.view, seats.of_rows(seats.before), action[seats.rows], seats.of_rows(seats.extras),
                             self.version)
        return action

    @property
    def full(self) -> bool:
        return self.slot is not None and self.recorder.full

    def send(self) -> None:
        if self.full:
            assert self.slot is not None
            self.slot.send()
            self.slot = None
            self.sent += 1


@dataclass
class GroupSeats:
    """The seats of one group: who acts for each, and whether that policy learns from it."""

    group: AgentGroup
    acting: np.ndarray  # [B]: place of the policy
    learns: np.ndarray  # [B]
    actions: np.ndarray  # [B, ...]: every seat's last decision


class SeatAssigner(Protocol):
    """Gives every seat its policy."""

    async def begin(self, games: np.ndarray, ended: MultiAgentStep | None) -> None: ...
    """An episode begins in these environments; `ended` is the step that closed the last ones."""


class MappedSeats:
    """Gives every seat its policy at the start of an episode, by the mapping of the program."""

    def __init__(self, me: Me, policies: NamedPolicies, env: MultiAgentEnv, tables: list[GroupSeats]) -> None:
        self._me, self._policies, self._agents, self._tables = me, policies, env.agents, tables
        self._episode = me.index * env.num_envs + np.arange(env.num_envs)
        self._stride = me.replicas * env.num_envs

    async def begin(self, games: np.ndarray, ended: MultiAgentStep | None) -> None:
        """An episode begins in these environments. Episodes of different environments and actors have different numbers. A name
        that the run does not have ends it: started again, an actor begins with its first episodes, and would get there again."""
        try:
            self._seat(games)
        except ConfigError as error:
            self._me.fail(str(error))
        self._episode[games] += self._stride

    def _seat(self, games: np.ndarray) -> None:
        for table, seats in enumerate(self._tables):
            for row in np.flatnonzero(np.isin(seats.group.env_id, games)):
                agent = self._agents[seats.group.agent_id[row]]
                place = self._policies.number_of(agent, int(self._episode[seats.group.env_id[row]]), table)
                seats.acting[row], seats.learns[row] = place, self._policies.policies[place].parts is not None


class PolicyActor:
    """Acts with several policies in the same environments and sends each learner what its own has decided."""

    def __init__(self, me: Me, parts: Parts, experience: Mapping[str, StreamEnd], weights: Mapping[str, Reader],
                 per_version: int = 0) -> None:
        """`experience` and `weights` by the names of the policies that learn. It sends `per_version` slots of each with each
        version of its weights, then waits for the next one (0: never waits)."""
        assert parts.policies is not None
        self.me, self.per_version, policies = me, per_version, parts.policies
        self.env = parts.env.of(me.index).make_multi_agent(parts.envs_per_actor)
        own, world, *others = me.rng("actor").integers(2**31, size=1 + len(policies.policies)).tolist()
        seeds = [own, *others]  # with one policy, those of a Player
        groups = self.env.groups
        self.learning: dict[int, LearningSeats] = {}
        self.fixed: dict[int, Opponent] = {}
        for place, policy in enumerate(policies.policies):
            group = groups[policy.group]
            if policy.parts is not None:
                self.learning[place] = LearningSeats(me, policy.name, policy.parts, group, experience[policy.name],
                                                     weights[policy.name], seeds[place])
            elif policy.fixed is not None:
                self.fixed[place] = policy.fixed(group, seeds[place])
        self.group_of = {place: policy.group for place, policy in enumerate(policies.policies)}
        self.tables = [GroupSeats(group, np.zeros(group.num_seats, np.int64), np.zeros(group.num_seats, bool), no_actions(group))
                       for group in groups]
        self.reports = [StepReport(me, parts, group.env_id, group=k if len(groups) > 1 else None) for k, group in enumerate(groups)]
        self.seating = self._seating(policies)
        self.seated = False
        records = [policy.unroll_record for policy in policies.learning.values()]
        self.expected = sum(record.length * record.seats for record in records)
        self.now: MultiAgentStep = self.env.reset(world)

    def _seating(self, policies: NamedPolicies) -> SeatAssigner:
        return MappedSeats(self.me, policies, self.env, self.tables)

    async def _prepared(self) -> list[LearningSeats]:
        """Those that are to learn from what follows; each has weights and a slot."""
        learning = list(self.learning.values())
        for one in learning:
            if one.version == 0 or (self.per_version and one.sent >= self.per_version):
                await one.weights.newer_than(one.version)
        for one in learning:
            await one.take_slot()
        return learning

    async def step(self) -> None:
        learning = await self._prepared()
        for one in learning:
            one.begin(self.per_version > 0)
        await self._permit(learning[0].version)
        if not self.seated:
            await self.seating.begin(np.arange(self.env.num_envs), None)
            self.seated = True
        decisions, enough = 0, all if self.per_version else any
        looked, before = 0, [one.decided for one in learning]
        while not enough(one.full for one in learning):
            decisions += self._play()
            if len(self.now.ended):
                await self.seating.begin(self.now.ended, self.now)
            if self.per_version and decisions - looked >= LONG * self.expected:
                if not self._goes_on(learning, before, decisions - looked, first=not looked):
                    return
                looked, before = decisions, [one.decided for one in learning]
        self.me.stats.add("env_steps", decisions)
        self.me.stats.add("env_frames", decisions)
        for one in learning:
            one.send()

    def _goes_on(self, learning: list[LearningSeats], before: list[int], decisions: int, first: bool) -> bool:
        """Tell of a round that takes long. It would take for ever where the mapping seats a policy no more."""
        idle = [(one.name, one.decided - known) for one, known in zip(learning, before, strict=True) if not one.full]
        told = ", ".join(f"{name} with {made:,}" for name, made in idle)
        text = f"all policies wait for {told} of the last {decisions:,} decisions: the mapping seats it seldom, or never; use " \
               "--architecture actor_learner, where nobody waits"
        if not all(made for _, made in idle):
            self.me.fail(text)
            return False
        if first:
            self.me.note(text)
        return True

    async def _permit(self, version: int) -> None:
        """Wait for the rest of the env_steps budget, if there is any. In lock step a round is allowed to all actors or to none."""
        if self.per_version:
            await self.me.permit("env_steps", self.per_version * self.expected, version)
        else:
            await self.me.permit("env_steps", self.expected)

    def _play(self) -> int:
        """One step of all environments; returns how many decisions were closed by it."""
        stats, now, tables = self.me.stats, self.now, self.tables
        for place, learner in self.learning.items():
            self._decide(place, learner, now)
        for place, opponent in self.fixed.items():
            self._decide(place, opponent, now)
        with stats.phase("env"):
            now = self.env.step([table.actions for table in tables])
        with stats.phase("write"):
            for place, learner in self.learning.items():
                group = self.group_of[place]
                learner.recorder.settle(now.groups[group], tables[group].actions)
        self.now = now
        decisions = 0
        for table, report, step in zip(tables, self.reports, now.groups, strict=True):
            report.note(step)
            decisions += int(np.count_nonzero(step.valid))
            if len(step.episode_return):
                self._note_returns(table, step)
        self.me.beat()
        return decisions

    def _decide(self, place: int, policy: LearningSeats | Opponent, now: MultiAgentStep) -> None:
        """Let one policy act for those of its seats that are asked."""
        table, step = self.tables[self.group_of[place]], now.groups[self.group_of[place]]
        rows = asked(step) & (table.acting == place)
        if not rows.any():
            return
        chosen = policy.act(step, rows, table.learns) if isinstance(policy, LearningSeats) else policy(step, rows)
        table.actions[rows] = chosen[rows]

    def _note_returns(self, table: GroupSeats, step: Step) -> None:
        """Report the returns of every policy's own seats."""
        ended = table.acting[np.flatnonzero(step.last & step.valid)]
        for place, learner in self.learning.items():
            if (mine := ended == place).any():
                self.me.stats.observe(episode_return_of(learner.name), step.episode_return[mine])

    def close(self) -> None:
        for report in self.reports:
            report.close()
        self.env.close()
