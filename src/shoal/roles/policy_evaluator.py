"""The evaluator of one policy among several: its seats are played by one published version, the others by the newest ones.

    env = PolicySeats(multi_agent_env, policies, "walker", partners)
    step = env.reset(seed=1)              # one row for each seat of the walker; its partners act in between

Environment e is seated like episode e, whatever the number of its own episode, so that the rows never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from shoal.core import Me, Reader
from shoal.envs import BatchedEnv, MultiAgentEnv, Step
from shoal.envs.interface import Tree
from shoal.envs.opponent_env import Opponent, OpponentMaker, Seats, SomeSeats
from shoal.errors import ConfigError
from shoal.learning import Algorithm
from shoal.roles.evaluator import Evaluator
from shoal.roles.parts import Parts
from shoal.roles.player import asked
from shoal.roles.policies import NamedPolicies
from shoal.roles.policy_opponent import PolicyOpponent, no_actions

__all__ = ["PolicyEvaluator", "PolicySeats"]


class PolicySeats(SomeSeats):
    """All seats of one policy in E environments, the others played by its partners, as a BatchedEnv of its own."""

    def __init__(self, env: MultiAgentEnv, policies: NamedPolicies, name: str, partners: Mapping[str, OpponentMaker]) -> None:
        self._all, self._partners = env, partners
        self._names = [policy.name for policy in policies.policies]
        self._group = next(policy.group for policy in policies.policies if policy.name == name)
        self._acting = [np.array([policies.number_of(env.agents[agent], int(game), k)
                                  for game, agent in zip(group.env_id, group.agent_id, strict=True)])
                        for k, group in enumerate(env.groups)]  # place of the policy, by group and row
        rows = np.flatnonzero(self._acting[self._group] == self._names.index(name))
        if not len(rows):
            raise ConfigError(f"policy {name} plays for no agent in the first {env.num_envs} episodes, so it cannot be evaluated; "
                              "let the mapping give it a seat earlier")
        super().__init__(env, env.groups[self._group], rows)
        self._actions = [no_actions(group) for group in env.groups]
        self._acts: list[tuple[int, int, Opponent]] = []  # place of a partner, its group, what acts

    def reset(self, seed: int | None = None) -> Step:
        if seed is not None:
            self._seeds = np.random.default_rng(seed)
        self._acts = []
        for group, acting in enumerate(self._acting):
            for place in np.unique(acting):
                home = group == self._group and place == self._acting[group][self._rows[0]]
                if not home:
                    make = self._partners[self._names[place]]
                    self._acts.append((int(place), group, make(self._all.groups[group], int(self._seeds.integers(2**31)))))
        self._now = self._all.reset(seed)
        return self._of_home(self._now.groups[self._group])

    def step(self, action: Tree) -> Step:
        self._actions[self._group][self._rows] = action
        for place, group, choose in self._acts:
            rows = asked(self._now.groups[group]) & (self._acting[group] == place)
            if rows.any():
                self._actions[group][rows] = choose(self._now.groups[group], rows)[rows]
        self._now = self._all.step(self._actions)
        return self._of_home(self._now.groups[self._group])


class PolicyEvaluator(Evaluator):
    """Evaluates one of several policies in the company of the others."""

    def __init__(self, me: Me, parts: Parts, policies: NamedPolicies, policy: str, weights: Mapping[str, Reader]) -> None:
        self.policies, self.name = policies, policy
        self.readers = {other: reader for other, reader in weights.items() if other != policy}
        self.company = {other: policies.learning[other].algorithm for other in self.readers}
        self.companions = {other: algorithm.published_layout().empty() for other, algorithm in self.company.items()}
        super().__init__(me, parts, weights[policy])

    def _make(self, rows: int) -> BatchedEnv:
        env = self.source.make_multi_agent(rows)
        partners: dict[str, OpponentMaker] = {policy.name: policy.fixed for policy in self.policies.policies
                                              if policy.fixed is not None}
        partners |= {other: partial(self._companion, other, algorithm) for other, algorithm in self.company.items()}
        return PolicySeats(env, self.policies, self.name, partners)

    def _remake(self, rows: int, cores: int) -> None:
        """The environments stay: with fewer of them a policy might have no seat."""

    def _companion(self, name: str, algorithm: Algorithm, seats: Seats, seed: int) -> Opponent:
        made = PolicyOpponent(algorithm, seats, seed, self.plan.greedy)
        made.load(self.companions[name])
        return made

    async def _await_version(self) -> None:
        self.settled = True
        for reader in self.readers.values():
            await reader.newer_than(0)
        await super()._await_version()

    def _load(self) -> None:
        super()._load()
        for name, reader in self.readers.items():
            if reader.version:
                reader.pull(self.companions[name])
