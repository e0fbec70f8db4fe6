"""The evaluator of one policy among several: its seats are played by one published version, the others by the newest ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from shoal.core import Me, Reader
from shoal.envs import BatchedEnv
from shoal.envs.opponent_env import Opponent, OpponentMaker, Seats
from shoal.learning import Algorithm
from shoal.roles.evaluator import Evaluator
from shoal.roles.parts import Parts
from shoal.roles.policies import NamedPolicies
from shoal.roles.policy_opponent import PolicyOpponent
from shoal.roles.policy_seats import PolicySeats

__all__ = ["PolicyEvaluator"]


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
