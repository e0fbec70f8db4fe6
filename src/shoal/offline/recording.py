"""Playing whole episodes and writing them down.

    step ──▶ actor(step, previous action) ──▶ action, some of them replaced by random ones ──▶ env ──▶ Episode ──▶ Writer

Environments step together; of each row as many episodes are kept, its first ones, so that short episodes count no more than
long ones.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.envs.spaces import BadValue
from shoal.envs.stream import BatchedEnv, Step, Tree
from shoal.errors import ConfigError
from shoal.offline.episodes import About, Episode, action_dtype
from shoal.offline.folder import Writer
from shoal.slots import map_tree

__all__ = ["Actor", "Order", "Random", "Script", "about_env", "record"]

Actor = Callable[[Step, Any], np.ndarray]
"""(what is seen, the action that led there or None) -> canonical actions [B, ...]."""

SAY_SECONDS = 2.0


@dataclass(frozen=True)
class Order:
    """How much is to be recorded."""

    episodes: int
    steps: int | None = None
    """Stop after the episode that makes it so many decisions."""
    seed: int = 0
    epsilon: float = 0.0
    """Share of actions that are replaced by random ones."""


def about_env(env: BatchedEnv, step: Step, kwargs: dict[str, Any]) -> About:
    """What a recording of this environment begins with; `step` is its first, which shows whether there are masks."""
    mask_size = 0 if step.action_mask is None else step.action_mask.shape[1]
    return About(env.name, env.observation_space, env.action_space, mask_size, kwargs)


class Random:
    """Uniform actions, legal ones where the environment says which those are."""

    def __init__(self, space: gym.Space, rng: np.random.Generator) -> None:
        self._space, self._rng = space, rng

    def __call__(self, step: Step, previous: Any = None) -> np.ndarray:
        space, rows = self._space, len(step.first)
        if isinstance(space, gym.spaces.Box):
            bounded = np.isfinite(space.low) & np.isfinite(space.high)
            low, high = (np.where(bounded, bound, 0.0) for bound in (space.low, space.high))
            uniform = self._rng.uniform(low, high, (rows, *space.shape))
            return np.where(bounded, uniform, self._rng.standard_normal(uniform.shape)).astype(space.dtype)
        sizes = [int(space.n)] if isinstance(space, gym.spaces.Discrete) else space.nvec.tolist()  # type: ignore[attr-defined]
        mask = np.ones((rows, sum(sizes)), bool) if step.action_mask is None else step.action_mask
        parts = [np.where(part, self._rng.random(part.shape), -1.0).argmax(1) for part in np.split(mask, np.cumsum(sizes)[:-1], 1)]
        return parts[0] if isinstance(space, gym.spaces.Discrete) else np.stack(parts, 1)


class Script:
    """A function of the user's that acts for one environment at a time: `policy(observation, ...)`.

    It may also ask for any of these by name: memory (a dictionary, empty at the beginning of every episode), first, reward (the
    last one), mask, rng. It returns an action as the environment's own step() takes it.
    """

    OFFERS = ("memory", "first", "reward", "mask", "rng")

    def __init__(self, function: Callable[..., Any], env: Any, rng: np.random.Generator, name: str) -> None:
        self._function, self._codec, self._rng, self._name = function, env.codec, rng, name
        self._memory: list[dict[str, Any]] = [{} for _ in range(env.num_seats)]
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # a built-in
            parameters = []
        several = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._wants = [name for name in self.OFFERS if several or name in [one.name for one in parameters[1:]]]

    def __call__(self, step: Step, previous: Any = None) -> np.ndarray:
        rows = len(step.first)
        for row in np.flatnonzero(step.first):
            self._memory[row] = {}
        return np.stack([self._act(step, row) for row in range(rows)])

    def _act(self, step: Step, row: int) -> np.ndarray:
        seen = map_tree(lambda x: x[row].copy(), step.observation)
        first = bool(step.first[row])
        offered = {"memory": self._memory[row], "first": first, "reward": 0.0 if first else float(step.reward[row]),
                   "mask": None if step.action_mask is None else step.action_mask[row].copy(), "rng": self._rng}
        try:
            action = self._function(seen, **{name: offered[name] for name in self._wants})
        except Exception as error:  # whatever a user's function raises
            raise ConfigError(f"{self._name} raised {type(error).__name__}: {error} for the observation {seen!r}") from error
        try:
            made = self._codec.executed(action)
            if self._codec.kind != "box":
                size = self._codec.space.n if self._codec.kind == "discrete" else self._codec.space.nvec
                if made.dtype.kind not in "iub" or (made < 0).any() or (made >= size).any():
                    raise BadValue(f"it is none of {self._codec.raw_space}")
        except (BadValue, TypeError, ValueError) as error:
            raise ConfigError(f"{self._name} returned {action!r} as an action: {error}; return one of "
                              f"{self._codec.raw_space}") from None
        return made if self._codec.kind == "box" else made.astype(np.int64)


@dataclass
class _Moment:
    """One step of all rows: what was seen and what came of it."""

    observation: Tree
    mask: np.ndarray | None
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray


def record(env: Any, first: Step, actor: Actor, writer: Writer, order: Order, say: Callable[[str], None],
           stop: Callable[[], bool]) -> int:
    """Play until all episodes of the order are written, or until `stop()`; returns how many were.

    `first` is what env.reset() gave. What is under way when it stops is left out: an episode is whole or not there.
    """
    return _Recording(env, first, actor, writer, order, say).run(stop)


class _Recording:
    def __init__(self, env: Any, first: Step, actor: Actor, writer: Writer, order: Order, say: Callable[[str], None]) -> None:
        self.env, self.now, self.actor, self.writer, self.order, self.say = env, first, actor, writer, order, say
        rows = env.num_seats
        self.quota = np.full(rows, order.episodes // rows)
        self.quota[: order.episodes % rows] += 1
        self.begun = np.zeros(rows, np.int64)      # the moment at which each row's episode began
        self.past: deque[_Moment] = deque()
        self.gone = 0                              # moments that nobody needs any more
        self.done = self.steps = 0
        self.rng = np.random.default_rng((order.seed, 0xE95))
        self.random = Random(env.action_space, self.rng)

    def run(self, stop: Callable[[], bool]) -> int:
        previous, said = None, time.monotonic()
        while self.quota.any() and not stop() and (self.order.steps is None or self.steps < self.order.steps):
            previous = self._step(previous)
            self.writer.tick()
            if time.monotonic() >= said + SAY_SECONDS:
                said = time.monotonic()
                self.say(self.sentence())
        return self.done

    def sentence(self) -> str:
        about = self.writer.written
        mean = "" if about.returns is None else f", mean return {about.returns.mean:.3g}"
        return f"  {self.done:,} of {self.order.episodes:,} episodes, {self.steps:,} steps{mean}"

    def _step(self, previous: Any) -> np.ndarray:
        before = self.now
        action = np.asarray(self.actor(before, previous))
        if self.order.epsilon:
            wild = self.rng.random(len(action)) < self.order.epsilon
            action = np.where(wild.reshape(-1, *(1,) * (action.ndim - 1)), self.random(before), action)
        seen = map_tree(np.copy, before.observation)
        mask = None if before.action_mask is None else before.action_mask.copy()
        now = self.now = self.env.step(action)
        done = action if now.executed_action is None else now.executed_action
        self.past.append(_Moment(seen, mask, np.array(done), now.reward.copy(), now.discount == 0))
        for row in np.flatnonzero(now.last & now.valid):
            if self.quota[row]:
                self.quota[row] -= 1
                self._keep(int(row), now)
        self.begun[now.first] = self.gone + len(self.past)
        busy = self.begun[self.quota > 0]
        while self.past and len(busy) and self.gone < busy.min():
            self.past.popleft()
            self.gone += 1
        return action

    def _keep(self, row: int, now: Step) -> None:
        moments = [self.past[i] for i in range(int(self.begun[row]) - self.gone, len(self.past))]
        where = np.flatnonzero(now.final_rows == row)
        if len(where):
            last = map_tree(lambda x: x[where[0]], now.final_observation)
        else:
            last = map_tree(lambda x: np.zeros_like(x[row]), now.observation)
        seen = [map_tree(lambda x: x[row], one.observation) for one in moments]
        observation = map_tree(lambda *parts: np.stack(parts), *seen, last)
        T = len(moments)
        truncated = np.zeros(T, bool)
        truncated[-1] = bool(now.truncated[row])
        action = np.stack([one.action[row] for one in moments]).astype(action_dtype(self.env.action_space), copy=False)
        episode = Episode(observation, action,
                          np.array([one.reward[row] for one in moments], np.float32),
                          np.array([one.terminated[row] for one in moments]), truncated,
                          None if moments[0].mask is None else np.stack([one.mask[row] for one in moments]))  # type: ignore[index]
        self.writer.add(episode)
        self.done += 1
        self.steps += T
