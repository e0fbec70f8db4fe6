"""Several named policies in one program: who plays for which agent, and what each of them is.

    policy_of(agent, episode) -> name       asked for every agent at the start of every episode
    NamedPolicy                             one that learns (with the Parts of its learner and evaluator), or one that does not

A policy plays for agents with equal spaces: those of one group (shoal.envs.multi_agent).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shoal.envs.opponent_env import OpponentMaker
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.roles.parts import Parts

__all__ = ["NamedPolicies", "NamedPolicy", "PolicyOf"]

PolicyOf = Callable[[str, int], str]
"""(agent, number of the episode) -> name of the policy that plays for it."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy of a program that has several."""

    name: str
    group: int
    """Which group of agents it plays for."""
    parts: Parts | None = None
    """What its learner and its evaluator are made of; none: it does not learn."""
    fixed: OpponentMaker | None = None
    """What acts where it does not learn."""


@dataclass(frozen=True)
class NamedPolicies:
    """All policies of a program, those that learn first."""

    policies: tuple[NamedPolicy, ...]
    policy_of: PolicyOf = lambda agent, episode: ""
    """Not asked where a coordinator says who plays."""

    @property
    def learning(self) -> dict[str, Parts]:
        """Those that learn, by name."""
        return {policy.name: policy.parts for policy in self.policies if policy.parts is not None}

    @cached_property
    def _places(self) -> dict[str, int]:
        return {policy.name: place for place, policy in enumerate(self.policies)}

    def number_of(self, agent: str, episode: int, group: int) -> int:
        """The place in `policies` of the one that plays for an agent in an episode."""
        name = self.policy_of(agent, episode)
        found = self._places.get(name)
        if found is None:
            names = ", ".join(policy.name for policy in self.policies)
            raise ConfigError(f"the mapping gave agent {agent!r} the policy {name!r} in episode {episode}, and there are {names}; "
                              "name only policies that the run has")
        if self.policies[found].group != group:
            raise ConfigError(f"the mapping gave agent {agent!r} the policy {name!r} in episode {episode}, which plays for agents "
                              "with other spaces; give it a policy of its own")
        return found
