"""Environments with several agents: the steps of interface.py for seats that take turns, come and go, or have different spaces.

    env = envs.make_multi_agent("pettingzoo:pettingzoo.classic.tictactoe_v3", num_envs=8)
    now = env.reset(seed=1)
    while True:
        actions = [choose(step) for step in now.groups]     # of each group, for all its rows; only those with `acts` count
        now = env.step(actions)

A **seat** is one agent of one environment. Seats with equal spaces form a **group**: one Step with a row for each, ordered by
environment, then by agent. Most environments have one group. Beside the rules of interface.py:

- `acts` says which seats are asked for an action now, on their `observation` and `action_mask`. The rows of the others keep the
  observation and mask of their last decision, and the actions given for them are ignored;
- a row with `valid` closes the seat's last decision. Its `reward` is everything that the seat got since then, whichever seat
  acted in between; rewards before the first decision of an episode belong to no decision and are in `returns` only;
- a seat's first decision of an episode is asked for with `first`. A seat that decides nothing in an episode has no rows of it;
- so the valid rows of a seat follow each other by its own decisions, and what is learned from them needs no other rule for games
  with turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from shoal.envs.interface import BatchedEnv, EnvSpec, Step, Tree

__all__ = ["AgentGroup", "GameTotals", "GroupEnv", "GroupSpec", "MultiAgentEnv", "MultiAgentStep", "PlainGroup"]

NO_ENVS = np.zeros(0, np.int64)


@dataclass(slots=True)
class MultiAgentStep:
    """One step of E environments. As with a Step, the next call may overwrite its arrays."""

    groups: tuple[Step, ...]
    ended: np.ndarray  # [N] int64: the environments whose episode just ended
    returns: np.ndarray  # [N, agents] float64: all rewards of each agent in it, in the order of MultiAgentEnv.agents
    lengths: np.ndarray  # [N] int64: decisions of all agents in it


class AgentGroup(Protocol):
    """Agents with equal spaces. Fields as in BatchedEnv; the rows are those of the group's Steps."""

    agents: tuple[str, ...]
    num_seats: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    raw_observation_space: gym.Space[Any]
    raw_action_space: gym.Space[Any]
    mask_size: int
    env_id: np.ndarray  # [B] int64
    agent_id: np.ndarray  # [B] int64: place in MultiAgentEnv.agents


@dataclass(frozen=True)
class GroupSpec:
    """What you must know about agents with equal spaces to build a network and a recorder for them."""

    agents: tuple[str, ...]
    spec: EnvSpec
    raw_observation_space: gym.Space[Any]
    raw_action_space: gym.Space[Any]


class MultiAgentEnv(Protocol):
    """E environments that step together, each with the same agents."""

    name: str
    num_envs: int
    agents: tuple[str, ...]
    takes_turns: bool
    max_episode_steps: int | None
    backend: str
    backend_reason: str

    @property
    def groups(self) -> Sequence[AgentGroup]: ...
    def reset(self, seed: int | None = None) -> MultiAgentStep: ...
    def step(self, actions: Sequence[Tree]) -> MultiAgentStep: ...  # [B, ...] for each group
    def close(self) -> None: ...


class GroupEnv:
    """A MultiAgentEnv of one group as a BatchedEnv."""

    frame_skip = 1
    has_executed_action = False

    def __init__(self, env: MultiAgentEnv) -> None:
        (group,) = env.groups
        self.multi_agent = env
        self.name, self.num_envs, self.seats_per_env = env.name, env.num_envs, len(env.agents)
        self.num_seats, self.mask_size = group.num_seats, group.mask_size
        self.observation_space, self.action_space = group.observation_space, group.action_space
        self.raw_observation_space, self.raw_action_space = group.raw_observation_space, group.raw_action_space
        self.env_id, self.agent_id = group.env_id, group.agent_id
        self.takes_turns, self.max_episode_steps = env.takes_turns, env.max_episode_steps
        self.backend, self.backend_reason = env.backend, env.backend_reason

    def reset(self, seed: int | None = None) -> Step:
        return self.multi_agent.reset(seed).groups[0]

    def step(self, action: Tree) -> Step:
        return self.multi_agent.step((action,)).groups[0]

    def close(self) -> None:
        self.multi_agent.close()


class PlainGroup:
    """A BatchedEnv of one seat per environment as a MultiAgentEnv with the single agent "agent"."""

    agents: tuple[str, ...] = ("agent",)
    takes_turns = False

    def __init__(self, env: BatchedEnv) -> None:
        self._env = env
        self.name, self.num_envs, self.num_seats, self.mask_size = env.name, env.num_seats, env.num_seats, env.mask_size
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.raw_observation_space, self.raw_action_space = env.raw_observation_space, env.raw_action_space
        self.env_id, self.agent_id = env.env_id, env.agent_id
        self.groups = (self,)
        self.max_episode_steps, self.backend, self.backend_reason = env.max_episode_steps, env.backend, env.backend_reason
        self._alive = np.ones(self.num_seats, bool)

    def reset(self, seed: int | None = None) -> MultiAgentStep:
        return self._step(self._env.reset(seed))

    def step(self, actions: Sequence[Tree]) -> MultiAgentStep:
        return self._step(self._env.step(actions[0]))

    def _step(self, step: Step) -> MultiAgentStep:
        """Between `last` and a later `first` (autoreset mode NEXT_STEP) a row is not asked for anything."""
        np.logical_or(step.first, self._alive & ~step.last, out=self._alive)
        step.acts = self._alive
        ended = np.flatnonzero(step.last & step.valid)
        return MultiAgentStep((step,), ended, step.episode_return.astype(np.float64)[:, None], step.episode_length)

    def close(self) -> None:
        self._env.close()


class GameTotals:
    """Returns of all agents and the decisions of the episodes under way, for MultiAgentStep."""

    def __init__(self, num_envs: int, agents: int) -> None:
        self._returns, self._lengths = np.zeros((num_envs, agents)), np.zeros(num_envs, np.int64)
        self._ended: list[tuple[int, np.ndarray, int]] = []

    def clear(self) -> None:
        self._returns.fill(0)
        self._lengths.fill(0)
        self._ended.clear()

    def pay(self, env: int, agent: int, reward: float) -> None:
        self._returns[env, agent] += reward

    def decide(self, env: int, decisions: int) -> None:
        self._lengths[env] += decisions

    def end(self, env: int) -> None:
        self._ended.append((env, self._returns[env].copy(), int(self._lengths[env])))
        self._returns[env] = 0
        self._lengths[env] = 0

    def step(self, groups: tuple[Step, ...]) -> MultiAgentStep:
        """The step with what ended since the last one."""
        if not self._ended:
            return MultiAgentStep(groups, NO_ENVS, np.zeros((0, self._returns.shape[1])), NO_ENVS)
        ended, returns, lengths = zip(*self._ended, strict=True)
        self._ended.clear()
        return MultiAgentStep(groups, np.array(ended), np.stack(returns), np.array(lengths))
