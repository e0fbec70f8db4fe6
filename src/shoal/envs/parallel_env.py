"""Several agents per environment: PettingZoo-style ParallelEnvs, recognised by their attributes, one seat per possible agent.

Seats are ordered by environment, then by `possible_agents`. An agent that is not alive gives valid=False rows until the
environment ends (all its agents done), when every seat gets its first observation of the next episode. An agent that
enters in the middle of an episode begins with first=True on a row that is not valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from shoal.envs.adapter import EnvAdapter
from shoal.envs.interface import Step, Tree
from shoal.envs.single_envs import as_flag, as_number
from shoal.envs.space_codecs import BadValue
from shoal.errors import ConfigError

__all__ = ["ParallelEnvAdapter", "is_parallel"]


def is_parallel(env: Any) -> bool:
    """Whether this looks like a ParallelEnv. By attributes, so that pettingzoo need not be installed."""
    return hasattr(env, "possible_agents") and hasattr(env, "reset") and hasattr(env, "step")


def agent_space(env: Any, kind: str, agent: Any) -> Any:
    """observation_spaces[agent] or observation_space(agent): PettingZoo allows both."""
    by_name = getattr(env, kind + "s", None)
    if isinstance(by_name, dict) and agent in by_name:
        return by_name[agent]
    return getattr(env, kind)(agent)


class ParallelEnvAdapter(EnvAdapter):
    """A list of ParallelEnv as a BatchedEnv."""

    backend = "loop"

    def __init__(self, name: str, envs: Sequence[Any], *, check: bool = True, seed: int | None = None) -> None:
        self._agents = list(envs[0].possible_agents)
        self._index = {agent: k for k, agent in enumerate(self._agents)}
        pairs = [
            (agent_space(envs[0], "observation_space", a), agent_space(envs[0], "action_space", a))
            for a in self._agents
        ]
        for agent, pair in zip(self._agents, pairs, strict=True):
            if pair != pairs[0]:
                raise ConfigError(
                    f"{name}: agents {self._agents[0]!r} and {agent!r} have different spaces; pad them to be equal "
                    "(supersuit.pad_observations_v0, pad_action_space_v0)"
                )
        super().__init__(name, *pairs[0], len(envs), len(self._agents), check=check, seed=seed)
        self._envs = list(envs)
        self._buffers = self.observation_codec.buffers(self.num_seats)
        self._final = self.observation_codec.buffers(self.num_seats)
        self._tree = self.observation_codec.tree(self._buffers)
        self._alive = np.zeros(self.num_seats, bool)
        self._valid = np.zeros(self.num_seats, bool)
        self._final_masks: list[np.ndarray | None] = []  # of the rows truncated in this step

    def reset(self, seed: int | None = None) -> Step:
        for e, one in enumerate(self._begin_each(seed)):
            self._reset_env(e, one)
        if self.check:
            self._verify(self._buffers, self._reward)
        # An agent that is not there yet begins with all others, on rows that are not valid.
        return Step(
            self._tree, self._reward, self._discount, self._all, self._last, self._truncated, self._all, action_mask=self._mask
        )

    def step(self, action: Tree) -> Step:
        self._steps += 1
        self._clear_flags()
        self._reward.fill(0)
        self._valid[:] = self._alive
        self._final_masks.clear()
        truncated_rows: list[int] = []
        e = 0
        try:
            actions = self.action_codec.rows(action, self.num_seats)
            for e in range(self.num_envs):
                self._step_env(e, actions, truncated_rows)
        except BadValue as error:
            raise self._error(e * self.seats_per_env, error) from error
        self._totals.add(self._reward, self._valid)
        if self.check:
            self._verify(self._buffers, self._reward)
        step = Step(
            self._tree, self._reward, self._discount, self._first, self._last, self._truncated, self._valid, action_mask=self._mask
        )
        if self._last.any():
            step.episode_return, step.episode_length = self._totals.close(np.flatnonzero(self._last))
        if truncated_rows:
            arrays = [buffer[: len(truncated_rows)] for buffer in self._final]
            if self.check:
                self._verify_final(arrays, truncated_rows)
            step.final_rows, step.final_observation = np.array(truncated_rows, np.int64), self.observation_codec.tree(arrays)
            step.final_action_mask = self._stack_final_masks(self._final_masks)
        return step

    def _step_env(self, e: int, actions: Sequence[Any], truncated_rows: list[int]) -> None:
        base, env = e * self.seats_per_env, self._envs[e]
        chosen = {agent: actions[base + k] for k, agent in enumerate(self._agents) if self._alive[base + k]}
        with self._named(e, "step"):
            answer = env.step(chosen)
        if not (isinstance(answer, tuple) and len(answer) == 5):
            raise BadValue("step() must return (observations, rewards, terminations, truncations, infos)")
        observations, rewards, terminations, truncations, infos = answer
        for agent in chosen:
            row = base + self._index[agent]
            self._reward[row] = as_number(rewards.get(agent, 0.0))
            terminated = as_flag(terminations.get(agent, False), "terminated")
            truncated = as_flag(truncations.get(agent, False), "truncated") and not terminated
            if terminated or truncated:
                self._last[row] = True
                self._alive[row] = False
                self._discount[row] = not terminated
            elif agent not in observations:
                raise BadValue(f"agent {agent!r} is alive but got no observation")
            if truncated:
                if agent not in observations:
                    raise BadValue(f"agent {agent!r} was truncated without its last observation")
                self._truncated[row] = True
                self.observation_codec.write(self._final, len(truncated_rows), observations[agent])
                self._final_masks.append(self._final_mask(observations[agent], (infos or {}).get(agent)))
                truncated_rows.append(row)
        living = getattr(env, "agents", None)
        self._observe(base, observations, infos, living or ())
        ended = len(living) == 0 if living is not None else not self._alive[base : base + self.seats_per_env].any()
        if ended:
            still_alive = np.flatnonzero(self._alive[base : base + self.seats_per_env])
            if len(still_alive):
                agent = self._agents[still_alive[0]]
                raise BadValue(f"the episode is over, but agent {agent!r} was neither terminated nor truncated")
            self._reset_env(e, None)

    def _observe(self, base: int, observations: dict[Any, Any], infos: Any, living: Sequence[Any]) -> None:
        """Store what living agents see; one of `living` that was not there before begins its episode here."""
        for agent, observation in observations.items():
            if agent not in self._index:
                raise BadValue(f"agent {agent!r} is not one of possible_agents")
            row = base + self._index[agent]
            if not self._alive[row]:
                if agent not in living or self._last[row]:
                    continue  # the last observation of an agent that has left
                self._alive[row] = self._first[row] = True
            self.observation_codec.write(self._buffers, row, observation)
            self._read_mask(row, observation, (infos or {}).get(agent))

    def _reset_env(self, e: int, seed: int | None) -> None:
        base = e * self.seats_per_env
        rows = slice(base, base + self.seats_per_env)
        with self._named(e, "reset"):
            answer = self._envs[e].reset(seed=seed)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], dict)):
            raise self._error(base, "reset() must return (observations, infos), both dictionaries by agent")
        self._alive[rows] = False
        last = self._last[rows].copy()
        self._last[rows] = False
        try:
            self._observe(base, *answer, list(answer[0]))
        except BadValue as error:
            raise self._error(base, error) from error
        self._first[rows] = True
        self._last[rows] = last

    @contextmanager
    def _named(self, e: int, method: str) -> Iterator[None]:
        """Whatever an environment raises is reported with its name and step."""
        try:
            yield
        except Exception as error:
            raise self._error(e * self.seats_per_env, f"{method}() raised {type(error).__name__}: {error}") from error

    def close(self) -> None:
        for env in self._envs:
            env.close()
