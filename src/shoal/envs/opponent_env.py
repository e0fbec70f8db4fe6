"""Matches: one seat of each environment against opponents that do not learn, as a BatchedEnv of its own.

    env = OpponentEnv(envs.make("shoal/TicTacToe-v0", 100), random_opponent)
    step = env.reset(seed=1)              # one row for each game; home sits on every side equally often

Its seat is asked only when it is its turn (`Step.acts`); in between the opponents move. So whatever plays and counts episodes plays
matches with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from shoal.envs.builtin.game_trees import BoardTree, tree_of
from shoal.envs.exploitability import perfect_moves
from shoal.envs.interface import BatchedEnv, Step, Tree
from shoal.envs.multi_agent import AgentGroup, MultiAgentEnv
from shoal.envs.random_policy import RandomPolicy
from shoal.errors import ConfigError
from shoal.slots import map_tree

__all__ = ["OPPONENTS", "Opponent", "OpponentEnv", "OpponentMaker", "Seats", "SomeSeats", "built_in_opponent", "perfect_opponent",
           "random_opponent"]


class Seats(Protocol):
    """What an opponent knows of the seats that it may be asked for: those of a BatchedEnv, or of an AgentGroup."""

    num_seats: int
    action_space: gym.Space[Any]
    raw_action_space: gym.Space[Any]


Opponent = Callable[[Step, np.ndarray], np.ndarray]
"""(step of all seats, which of them are its own and asked) -> actions of all seats; only those count."""
OpponentMaker = Callable[[Seats, int], Opponent]
"""(all seats, seed) -> an opponent that plays there from a reset on."""


class SomeSeats:
    """Some of the seats of several agents, as a BatchedEnv of their own; a subclass lets others play the rest."""

    takes_turns = True
    seats_per_env = frame_skip = 1
    has_executed_action = False

    def __init__(self, env: BatchedEnv | MultiAgentEnv, seats: BatchedEnv | AgentGroup, rows: np.ndarray) -> None:
        """`rows` of these `seats` of the environment."""
        self._rows, self._is_home = rows, np.isin(np.arange(seats.num_seats), rows)
        self._place = np.cumsum(self._is_home) - 1  # of one of all seats among those of this environment
        self.name, self.num_seats, self.mask_size = env.name, len(rows), seats.mask_size
        self.env_id, self.agent_id = seats.env_id[rows], seats.agent_id[rows]
        self.observation_space, self.action_space = seats.observation_space, seats.action_space
        self.raw_observation_space, self.raw_action_space = seats.raw_observation_space, seats.raw_action_space
        self.backend, self.backend_reason, self.max_episode_steps = env.backend, env.backend_reason, env.max_episode_steps
        self._env, self._seeds = env, np.random.default_rng()

    def _of_home(self, step: Step) -> Step:
        """What a step of all seats is to these."""
        rows = self._rows
        mine = self._is_home[np.flatnonzero(step.last & step.valid)] if len(step.episode_return) else slice(0)
        kept = np.flatnonzero(self._is_home[step.final_rows])
        return Step(
            map_tree(lambda x: x[rows], step.observation),
            step.reward[rows],
            step.discount[rows],
            step.first[rows],
            step.last[rows],
            step.truncated[rows],
            step.valid[rows],
            self._place[step.final_rows[kept]],
            map_tree(lambda x: x[kept], step.final_observation) if len(kept) else None,
            None if step.action_mask is None else step.action_mask[rows],
            None,
            step.episode_return[mine],
            step.episode_length[mine],
            step.final_action_mask[kept] if step.final_action_mask is not None and len(kept) else None,
            np.ones(len(rows), bool) if step.acts is None else step.acts[rows],
        )

    def close(self) -> None:
        self._env.close()


class OpponentEnv(SomeSeats):
    """One seat of each environment of `env`, all others played by an opponent."""

    def __init__(self, env: BatchedEnv, opponent: OpponentMaker) -> None:
        if env.seats_per_env == 1:
            raise ConfigError(f"{env.name} has one agent; there is no opponent to play against")
        games = np.arange(env.num_seats // env.seats_per_env)
        super().__init__(env, env, games * env.seats_per_env + games % env.seats_per_env)
        self._all, self._make = env, opponent

    def reset(self, seed: int | None = None) -> Step:
        if seed is not None:
            self._seeds = np.random.default_rng(seed)
        self._opponent = self._make(self._all, int(self._seeds.integers(2**31)))
        self._now = self._all.reset(seed)
        return self._of_home(self._now)

    def step(self, action: Tree) -> Step:
        acts = np.ones(self._all.num_seats, bool) if self._now.acts is None else self._now.acts
        actions = np.array(self._opponent(self._now, acts & ~self._is_home))
        actions[self._rows] = action
        self._now = self._all.step(actions)
        return self._of_home(self._now)


def random_opponent(env: Seats, seed: int) -> Opponent:
    """Legal actions, uniformly."""
    choose = RandomPolicy(env.action_space, np.random.default_rng(seed))
    return lambda step, rows: choose(step)


def perfect_opponent(name: str, options: Mapping[str, Any]) -> OpponentMaker:
    """The best moves, one of them at random; of games in which everything is seen and that are small enough."""
    try:
        tree = tree_of(name, options)
    except ConfigError:
        raise ConfigError(f"there is no perfect player of {name}: there is one of shoal/TicTacToe-v0 and of shoal's other boards "
                          "of at most 9 cells; play against random") from None
    if not isinstance(tree, BoardTree):
        raise ConfigError(f"there is no perfect player of {name}: not everything is seen there; play against random")
    moves = perfect_moves(tree)

    def make(env: Seats, seed: int) -> Opponent:
        rng = np.random.default_rng(seed)

        def choose(step: Step, rows: np.ndarray) -> np.ndarray:
            actions, seen = np.zeros(len(rows), np.int64), np.asarray(step.observation)
            for row in np.flatnonzero(rows):
                actions[row] = rng.choice(moves[seen[row].tobytes()])
            return actions

        return choose

    return make


OPPONENTS = ("random", "perfect")


def built_in_opponent(word: str, name: str, options: Mapping[str, Any]) -> OpponentMaker:
    """The opponent of this name in this environment."""
    if word == "random":
        return random_opponent
    if word == "perfect":
        return perfect_opponent(name, options)
    raise ConfigError(f"--against {word}: use one of {', '.join(OPPONENTS)}")
