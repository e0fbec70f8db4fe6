"""`shoal play` in environments with several agents: every decision in a line, boards drawn, and a human on one side."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO, Any

import gymnasium as gym
import numpy as np

from shoal.envs import MultiAgentEnv, MultiAgentStep, Step
from shoal.envs.builtin.games import GAMES, GameSpec, game_spec
from shoal.envs.opponent_env import Opponent, OpponentMaker, Seats
from shoal.errors import ConfigError
from shoal.experiment.loaded_run import Run
from shoal.roles.player import asked
from shoal.roles.policy_opponent import no_actions, policy_opponent
from shoal.slots import map_tree

__all__ = ["has_several_agents", "human_opponent", "show_matches"]


def has_several_agents(run: Run) -> bool:
    return run.prepared.spec.seats_per_env > 1 or bool(run.prepared.several)


def show_matches(run: Run, policy: str | None, against: OpponentMaker | None, episodes: int, seed: int, out: IO[str]) -> None:
    """Play games and write down every decision. Without an opponent the run's own policies play for all agents."""
    env = run.prepared.source.make_multi_agent(1)
    try:
        if against is not None and len(env.groups) > 1:
            raise ConfigError(f"--against does not fit {env.name}, whose agents have different spaces: nobody can change sides; "
                              "leave it out")
        _GameTable(run, env, policy, against, seed, out).play(episodes, seed)
    finally:
        env.close()


class _GameTable:
    """One game at a time."""

    def __init__(self, run: Run, env: MultiAgentEnv, policy: str | None, against: OpponentMaker | None, seed: int,
                 out: IO[str]) -> None:
        self._env, self._out, self._picture = env, out, board_of(run)
        prepared = run.prepared
        own = {name: policy_opponent(one.algorithm, run.published_by(name), run.greedy) for name, one in prepared.policies.items()}
        name = policy or next(iter(own))
        self._home = {k: own[name](group, seed) for k, group in enumerate(env.groups)} if against is not None else {}
        self._away = against(env.groups[0], seed + 1) if against is not None else None
        self._named: dict[str, dict[int, Opponent]] = {}
        if against is None and prepared.seating is not None:
            named = prepared.named()
            makers = {**own, **{one.name: one.fixed for one in named.policies if one.fixed is not None}}
            self._named = {one.name: {one.group: makers[one.name](env.groups[one.group], seed)} for one in named.policies}
        elif against is None:
            self._named = {"": {0: own[name](env.groups[0], seed)}}
        self._policy_of = prepared.seating.policy_of if prepared.seating is not None else None

    def play(self, episodes: int, seed: int) -> None:
        now, game = self._env.reset(seed), 0
        actions = [no_actions(group) for group in self._env.groups]
        while game < episodes:
            for k, (group, step) in enumerate(zip(self._env.groups, now.groups, strict=True)):
                for row in np.flatnonzero(asked(step)):
                    agent = int(group.agent_id[row])
                    self._out.write(self._picture(step, row))
                    actions[k][row] = self._who(k, agent, game)(step, np.arange(group.num_seats) == row)[row]
                    self._out.write(f"{self._env.agents[agent]}: {actions[k][row]}\n")
            now = self._env.step(actions)
            if len(now.ended):
                game += 1
                self._say(now, game)

    def _who(self, group: int, agent: int, game: int) -> Opponent:
        """Who decides for an agent; with an opponent the run's policy has every side in turn."""
        if self._away is not None:
            return self._home[group] if agent == game % len(self._env.agents) else self._away
        name = self._policy_of(self._env.agents[agent], game) if self._policy_of is not None else ""
        return self._named[name][group]

    def _say(self, now: MultiAgentStep, game: int) -> None:
        returns = ", ".join(f"{agent} {value:g}" for agent, value in zip(self._env.agents, now.returns[0], strict=True))
        mine = self._env.agents[(game - 1) % len(self._env.agents)]
        self._out.write(f"game {game}: {returns}{f'; the run was {mine}' if self._away is not None else ''}\n")


def human_opponent(run: Run, out: IO[str]) -> OpponentMaker:
    """Asks a person for every action, as the number of a legal one; what is not drawn is written down."""
    board = board_of(run)

    def make(env: Seats, seed: int) -> Opponent:
        actions = no_actions(env)
        size = env.action_space.n if isinstance(env.action_space, gym.spaces.Discrete) else None
        if size is None:
            raise ConfigError(f"--against human needs one number for an action, and this environment has {env.action_space}; leave "
                              "it out")

        def choose(step: Step, rows: np.ndarray) -> np.ndarray:
            for row in np.flatnonzero(rows):
                legal = range(int(size)) if step.action_mask is None else np.flatnonzero(step.action_mask[row]).tolist()
                actions[row] = _asked_for(list(legal), step, row)
            return actions

        def _asked_for(legal: list[int], step: Step, row: Any) -> int:
            if not board(step, row):
                out.write(f"you see {map_tree(lambda x: x[row], step.observation)}\n")
            while True:
                out.write(f"your action ({', '.join(map(str, legal))})? ")
                out.flush()
                word = sys.stdin.readline()
                if not word:
                    raise ConfigError("the input has ended before the game; give an action a line")
                if word.strip().isdigit() and int(word) in legal:
                    return int(word)

        return choose

    return make


def board_of(run: Run) -> Callable[[Step, Any], str]:
    """Draws the board, where the environment is one of shoal's: the first player has x."""
    name = run.prepared.plan.env.target
    spec: GameSpec | None = game_spec(name, dict(run.prepared.source.kwargs)) if isinstance(name, str) and name in GAMES else None
    if spec is None or spec.kernel != "board":
        return lambda step, row: ""
    rows, columns = (int(size) for size in spec.params[:2])

    def draw(step: Step, row: Any) -> str:
        mine, theirs = np.asarray(step.observation)[row].reshape(2, rows, columns) > 0
        cells = np.select([mine, theirs], ["x", "o"] if row % 2 == 0 else ["o", "x"], ".")  # the two seats of a game alternate
        return "".join(f"{' '.join(line)}\n" for line in cells)

    return draw
