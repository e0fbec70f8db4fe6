"""What the adapters of PettingZoo-style environments share: the rows of agents with equal spaces, and environments in a list."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.acting import SEEN, STATE
from shoal.envs.adapter import EnvAdapter
from shoal.envs.handling import Restarts
from shoal.envs.interface import Step, Tree, split_seed
from shoal.envs.multi_agent import GameTotals, MultiAgentStep
from shoal.envs.single_envs import as_flag, as_number
from shoal.envs.space_codecs import BadValue, ObservationCodec
from shoal.errors import ConfigError, EnvironmentError_

__all__ = ["AgentEnvs", "SeatRows", "agent_space"]


def agent_space(env: Any, kind: str, agent: Any) -> Any:
    """observation_space(agent) or observation_spaces[agent]: PettingZoo allows both."""
    function = getattr(env, kind, None)
    if not callable(function):
        return getattr(env, kind + "s")[agent]
    with warnings.catch_warnings():  # PettingZoo's own default warns that it should be overridden
        warnings.simplefilter("ignore")
        return function(agent)


class EnvRaised(BadValue):
    """What the environment itself raised; it may be restarted."""


class SeatRows(EnvAdapter):
    """An AgentGroup: one Step, filled row by row.

    A row is `alive` from its first decision of an episode to its last. `ask` lets it act, `settle` closes its decision, and `end`
    its episode.
    """

    def __init__(self, name: str, env: Any, agents: Sequence[Any], places: Sequence[int], num_envs: int, check: bool) -> None:
        seen, done = (agent_space(env, kind, agents[0]) for kind in ("observation_space", "action_space"))
        super().__init__(name, seen, done, num_envs, len(agents), check=check)
        self.agents = tuple(str(agent) for agent in agents)
        self.agent_id = np.tile(np.asarray(places, np.int64), num_envs)
        self._buffers = self.observation_codec.buffers(self.num_seats)
        self._final = self.observation_codec.buffers(self.num_seats)
        self._tree = self.observation_codec.tree(self._buffers)
        self.alive, self.acts, self._valid = (np.zeros(self.num_seats, bool) for _ in range(3))
        self._truncated_rows: list[int] = []
        self._final_masks: list[np.ndarray | None] = []  # of these rows
        self._state: StateRows | None = None

    def watch_state(self, space: gym.Space[Any]) -> None:
        """Let observations be {seen, state}."""
        self._state = StateRows(space, self.num_seats)
        self._tree = {SEEN: self._tree, STATE: self._state.tree}
        self.observation_space = gym.spaces.Dict({SEEN: self.observation_space, STATE: self._state.codec.space})

    def note_state(self, state: Any) -> None:
        """What the environment of the rows that are dealt with next says of itself."""
        if self._state is not None:
            self._state.now = state

    def _seat(self, row: int) -> str:
        return f"environment {self.env_id[row]}, agent {self.agent_id[row]} (seat {row})"

    def fault(self, row: int, what: Any) -> EnvironmentError_:
        return self._error(row, what)

    def begin_episodes(self) -> None:
        """Forget everything, before all environments are reset."""
        self._begin(None)
        self.begin_step()
        self._steps = 0
        self.alive.fill(False)

    def begin_step(self) -> None:
        self._steps += 1
        self._clear_flags()
        self._reward.fill(0)
        self._valid.fill(False)
        self.acts.fill(False)
        self._truncated_rows.clear()
        self._final_masks.clear()
        for values in (self._info or {}).values():
            values.fill(np.nan)

    def ask(self, row: int, observation: Any, info: Any) -> None:
        """The seat is to act on this observation next."""
        if not self.alive[row]:
            self.alive[row] = self._first[row] = True
        self.acts[row] = True
        self.observation_codec.write(self._buffers, row, observation)
        if self._state is not None:
            self._state.ask(row)
        self._read_mask(row, observation, info)

    def begin_absent(self, rows: slice) -> None:
        """An episode begins for all of these rows, those included whose agents are not there yet."""
        self._first[rows] = True

    def settle(self, row: int, reward: float) -> None:
        """Close the seat's last decision, which earned this much."""
        self._reward[row] = reward
        self._valid[row] = True

    def end(self, row: int, terminated: bool, observation: Any, info: Any) -> None:
        """The seat's episode ended with the decision just settled; `observation` is its true last one."""
        self._last[row] = True
        self.alive[row] = False
        self._discount[row] = not terminated
        if not terminated:
            if observation is None:
                raise BadValue(f"agent {self.agents[row % self.seats_per_env]!r} was truncated without its last observation")
            self._truncated[row] = True
            self.observation_codec.write(self._final, len(self._truncated_rows), observation)
            if self._state is not None:
                self._state.end(len(self._truncated_rows))
            self._final_masks.append(self._final_mask(observation, info))
            self._truncated_rows.append(row)

    def cut(self, row: int) -> None:
        """The environment raised: the seat's episode is truncated, and its last observation is the one that it acted on."""
        if not self._valid[row]:
            self.settle(row, 0.0)
        self._last[row] = self._truncated[row] = True
        self.alive[row] = self.acts[row] = False
        for final, buffer in zip(self._final, self._buffers, strict=True):
            final[len(self._truncated_rows)] = buffer[row]
        if self._state is not None:
            self._state.cut(row, len(self._truncated_rows))
        self._final_masks.append(None if self._mask is None else self._mask[row].copy())
        self._truncated_rows.append(row)

    def note_info(self, row: int, info: Any) -> None:
        """The watched numbers that came with the decision just settled."""
        self._read_info(row, info)

    def ended(self, row: int) -> bool:
        """Whether the seat's episode ended in this step."""
        return bool(self._last[row])

    def first_step(self) -> Step:
        """What reset() gives."""
        if self.check:
            self._verify(self._buffers, self._reward)
        return Step(self._tree, self._reward, self._discount, self._first, self._last, self._truncated, self._all,
                    action_mask=self._mask, acts=self.acts)

    def step(self) -> Step:
        self._totals.add(self._reward, self._valid)
        if self.check:
            self._verify(self._buffers, self._reward)
        step = Step(self._tree, self._reward, self._discount, self._first, self._last, self._truncated, self._valid,
                    action_mask=self._mask, acts=self.acts, info=self._info, info_keys=self._info_keys,
                    info_unfit=self._info_unfit)
        if self._last.any():
            step.episode_return, step.episode_length = self._totals.close(np.flatnonzero(self._last))
        if self._truncated_rows:
            rows = np.array(self._truncated_rows, np.int64)
            order = np.argsort(rows)  # rows end in the order in which agents are looked at
            arrays = [buffer[: len(rows)][order] for buffer in self._final]
            if self.check:
                self._verify_final(arrays, rows[order])
            step.final_rows, step.final_observation = rows[order], self.observation_codec.tree(arrays)
            if self._state is not None:
                step.final_observation = {SEEN: step.final_observation, STATE: self._state.finals(order)}
            masks = self._stack_final_masks(self._final_masks)
            step.final_action_mask = None if masks is None else masks[order]
        return step


class StateRows:
    """The state of its environment beside what each seat sees."""

    def __init__(self, space: gym.Space[Any], seats: int) -> None:
        self.codec = ObservationCodec(space)
        self._buffers, self._final = self.codec.buffers(seats), self.codec.buffers(seats)
        self.tree = self.codec.tree(self._buffers)
        self.now: Any = None

    def ask(self, row: int) -> None:
        self.codec.write(self._buffers, row, self.now)

    def end(self, number: int) -> None:
        self.codec.write(self._final, number, self.now)

    def cut(self, row: int, number: int) -> None:
        for final, buffer in zip(self._final, self._buffers, strict=True):
            final[number] = buffer[row]

    def finals(self, order: np.ndarray) -> Tree:
        return self.codec.tree([buffer[: len(order)][order] for buffer in self._final])


class AgentEnvs(ABC):
    """A list of environments with the same agents as a MultiAgentEnv. A subclass knows how one of them is stepped."""

    backend = "loop"
    backend_reason = ""
    takes_turns = False
    max_episode_steps: int | None = None
    _states = False  # whether state() is watched

    def __init__(self, name: str, envs: Sequence[Any], *, check: bool = True, seed: int | None = None) -> None:
        keys = list(envs[0].possible_agents)
        self.name, self.num_envs, self.agents = name, len(envs), tuple(str(agent) for agent in keys)
        self._envs, self._keys, self._seed = list(envs), keys, seed
        self._rows: dict[Any, tuple[SeatRows, int]] = {}  # of an agent in the first environment
        groups: list[list[int]] = []
        pairs = [tuple(agent_space(envs[0], kind, agent) for kind in ("observation_space", "action_space")) for agent in keys]
        for place, pair in enumerate(pairs):
            equal = next((group for group in groups if pairs[group[0]] == pair), None)
            groups.append([place]) if equal is None else equal.append(place)
        self.groups = tuple(SeatRows(name, envs[0], [keys[k] for k in group], group, len(envs), check) for group in groups)
        for rows, group in zip(self.groups, groups, strict=True):
            self._rows.update({keys[place]: (rows, column) for column, place in enumerate(group)})
        self._place = {agent: place for place, agent in enumerate(keys)}
        numbers = {rows: k for k, rows in enumerate(self.groups)}
        self._seats = [[(agent, numbers[rows], e * rows.seats_per_env + column) for agent, (rows, column) in self._rows.items()]
                       for e in range(len(envs))]  # agent, number of its group and row there, by environment
        self._totals = GameTotals(len(envs), len(keys))
        self.restarts = Restarts(lambda: None, len(envs), 0)

    def reset(self, seed: int | None = None) -> MultiAgentStep:
        seed, self._seed = (self._seed if seed is None else seed), None
        seeds = [None] * self.num_envs if seed is None else split_seed(seed, self.num_envs).tolist()
        self._totals.clear()
        for rows in self.groups:
            rows.begin_episodes()
        for e, one in enumerate(seeds):
            with self._named(e):
                self._reset_or_restart(e, one)
        return self._totals.step(tuple(rows.first_step() for rows in self.groups))

    def step(self, actions: Sequence[Tree]) -> MultiAgentStep:
        asked = [rows.acts.tolist() for rows in self.groups]
        for rows in self.groups:
            rows.begin_step()
        chosen = [self._chosen(rows, action) for rows, action in zip(self.groups, actions, strict=True)]
        for e, seats in enumerate(self._seats):
            each = {agent: chosen[k][row] for agent, k, row in seats if asked[k][row]}
            self._totals.decide(e, len(each))
            with self._named(e):
                try:
                    self._step_env(e, each)
                except EnvRaised as error:
                    self._restart(e, error)
                    self._cut(e)
        steps = tuple(rows.step() for rows in self.groups)
        steps[0].restarts = self.restarts.told()
        return self._totals.step(steps)

    def watch_info(self, keys: tuple[str, ...]) -> None:
        for rows in self.groups:
            rows.watch_info(keys)

    def watch_state(self) -> None:
        """Let observations be {seen, state}, where the environments have state() and state_space."""
        space = getattr(self._envs[0], "state_space", None)
        if not isinstance(space, gym.Space):
            raise ConfigError(f"--net.state-value needs the state() of {self.name}, which declares no state_space; use "
                              "--net.central-value or --net.separate-value")
        self._states = True
        for rows in self.groups:
            rows.watch_state(space)

    def _note_state(self, e: int) -> None:
        """After every step and reset of an environment, before its seats are dealt with."""
        if self._states:
            with self._calling("state"):
                state = self._envs[e].state()
            for rows in self.groups:
                rows.note_state(state)

    def _restart(self, e: int, error: EnvRaised) -> None:
        """Make an environment that raised anew, or raise."""
        env = self.restarts.again(e, self._envs[e], str(error))
        if env is None:
            raise BadValue(f"{error}{self.restarts.hint()}") from error
        self._envs[e] = env

    def _cut(self, e: int) -> None:
        """End the episode of an environment that was made anew, and begin its next one."""
        for agent in self._keys:
            rows, row = self._seat(e, agent)
            if rows.alive[row]:
                rows.cut(row)
        self._totals.end(e)
        self._reset_or_restart(e, None)

    def _reset_or_restart(self, e: int, seed: int | None) -> None:
        while True:
            try:
                return self._reset_env(e, seed)
            except EnvRaised as error:
                self._restart(e, error)

    @abstractmethod
    def _reset_env(self, e: int, seed: int | None) -> None: ...

    @abstractmethod
    def _step_env(self, e: int, actions: dict[Any, Any]) -> None:
        """Step environment e with the actions of the agents that were asked."""

    def _seat(self, e: int, agent: Any) -> tuple[SeatRows, int]:
        if agent not in self._rows:
            raise BadValue(f"agent {agent!r} is not one of possible_agents")
        rows, column = self._rows[agent]
        return rows, e * rows.seats_per_env + column

    def _settle(self, e: int, agent: Any, reward: Any, info: Any) -> None:
        """Close the last decision of an agent, if it made one."""
        rows, row = self._seat(e, agent)
        earned = as_number(reward)
        self._totals.pay(e, self._place[agent], earned)
        if rows.alive[row]:
            rows.settle(row, earned)
            rows.note_info(row, info)

    def _end(self, e: int, agent: Any, terminated: Any, truncated: Any, observation: Any, info: Any) -> bool:
        """End the episode of an agent that died; returns whether it did."""
        over, cut = as_flag(terminated, "terminated"), as_flag(truncated, "truncated")
        rows, row = self._seat(e, agent)
        if (over or cut) and rows.alive[row]:
            rows.end(row, over, observation, info)
        return over or cut

    def _begin_next(self, e: int) -> None:
        """All agents of an environment are gone: reset it."""
        for agent in self._keys:
            rows, row = self._seat(e, agent)
            if rows.alive[row]:
                raise BadValue(f"the episode is over, but agent {agent!r} was neither terminated nor truncated")
        self.restarts.ended(e)
        self._totals.end(e)
        self._reset_or_restart(e, None)

    def _chosen(self, rows: SeatRows, action: Tree) -> Any:
        try:
            return rows.action_codec.rows(action, rows.num_seats)
        except BadValue as error:
            raise rows.fault(0, error) from error

    @contextmanager
    def _named(self, e: int) -> Iterator[None]:
        """What an environment does wrong is reported with its name and step."""
        rows, row = self._seat(e, self._keys[0])
        try:
            yield
        except BadValue as error:
            raise rows.fault(row, error) from error

    @contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        """What an environment raises is something that it does wrong."""
        try:
            yield
        except Exception as error:
            raise EnvRaised(f"{method}() raised {type(error).__name__}: {error}") from error

    def close(self) -> None:
        for env in self._envs:
            env.close()
