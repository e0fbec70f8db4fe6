"""Playing whole episodes and recording them.

    step ──▶ act(step, previous action) ──▶ action, some replaced by random ones ──▶ env ──▶ Episode ──▶ DemoWriter

Environments step together; each row contributes equally many episodes (shoal.envs.rollout).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shoal.envs.interface import BatchedEnv, Step
from shoal.envs.opponent_env import Seats
from shoal.envs.random_policy import RandomPolicy
from shoal.envs.rollout import ActFunction, Played, Rollout
from shoal.envs.space_codecs import ActionCodec, BadValue
from shoal.errors import ConfigError
from shoal.offline.demo_folder import DemoWriter
from shoal.offline.episode_cutter import EpisodeCutter
from shoal.offline.recorded_episodes import RecordingInfo
from shoal.slots import map_tree

__all__ = ["RecordingOptions", "ScriptPolicy", "record", "recording_info"]

PROGRESS_SECONDS = 2.0


@dataclass(frozen=True)
class RecordingOptions:
    """How much to record, and how random."""

    episodes: int
    steps: int | None = None
    """Stop after the episode that brings the total to this many decisions."""
    seed: int = 0
    epsilon: float = 0.0
    """Share of actions that are replaced by random ones."""


def recording_info(env: BatchedEnv, step: Step, kwargs: dict[str, Any]) -> RecordingInfo:
    """The info that a recording of this environment begins with; its first `step` shows whether there are masks."""
    if env.takes_turns:
        raise ConfigError(f"{env.name}: its agents take turns, and recordings hold one decision of every agent for each step; "
                          "record another environment")
    mask_size = 0 if step.action_mask is None else step.action_mask.shape[1]
    return RecordingInfo(env.name, env.observation_space, env.action_space, mask_size, kwargs)


class ScriptPolicy:
    """A function of the user's that acts for one environment at a time: `policy(observation, ...)`.

    It may take any of these by name: memory (a dictionary, empty at the beginning of every episode), first, reward (the last one),
    mask, rng. It returns an action as the environment's own step() takes it.
    """

    OFFERS = ("memory", "first", "reward", "mask", "rng")

    def __init__(self, function: Callable[..., Any], env: Seats, rng: np.random.Generator, name: str) -> None:
        self._function, self._rng, self._name = function, rng, name
        self._action_codec = ActionCodec(env.raw_action_space)
        self._memory: list[dict[str, Any]] = [{} for _ in range(env.num_seats)]
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # a built-in
            parameters = []
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._wants = [name for name in self.OFFERS if takes_any or name in [one.name for one in parameters[1:]]]

    def __call__(self, step: Step, previous: Any = None) -> np.ndarray:
        self._chosen = self.of_rows(step, np.arange(len(step.first)))
        return self._chosen

    def log_prob(self, step: Step, action: np.ndarray) -> np.ndarray | None:
        """Of these actions, at the step that it has acted on: one of discrete actions is taken for sure."""
        if self._action_codec.kind == "box":
            return None
        same = (self._chosen == action).reshape(len(action), -1).all(1)
        return np.where(same, 0.0, -np.inf)

    def of_rows(self, step: Step, rows: np.ndarray) -> np.ndarray:
        """The actions of these seats alone, [K, ...]."""
        for row in rows[step.first[rows]]:
            self._memory[row] = {}
        return np.stack([self._act(step, row) for row in rows])

    def _act(self, step: Step, row: int) -> np.ndarray:
        seen = map_tree(lambda x: x[row].copy(), step.observation)
        first = bool(step.first[row])
        offered = {"memory": self._memory[row], "first": first, "reward": 0.0 if first else float(step.reward[row]),
                   "mask": None if step.action_mask is None else step.action_mask[row].copy(), "rng": self._rng}
        try:
            action = self._function(seen, **{name: offered[name] for name in self._wants})
        except Exception as error:  # whatever a user's function raises
            raise ConfigError(f"{self._name} raised {type(error).__name__}: {error} for the observation {seen!r}") from error
        codec = self._action_codec
        try:
            canonical = codec.canonical(action)
            if not codec.contains(canonical):
                raise BadValue(f"it is not in {codec.raw_space}")
        except (BadValue, TypeError, ValueError) as error:
            raise ConfigError(f"{self._name} returned {action!r} as an action: {error}; return one of {codec.raw_space}") from None
        return canonical if codec.kind == "box" else canonical.astype(np.int64)


@runtime_checkable
class LikelyActor(Protocol):
    """An actor that knows how likely actions were, at the step that it has acted on last."""

    def log_prob(self, step: Step, action: np.ndarray) -> np.ndarray | None: ...  # [B]; None where there is no density


def record(env: BatchedEnv, first: Step, act: ActFunction, writer: DemoWriter, options: RecordingOptions,
           say: Callable[[str], None], stop: Callable[[], bool]) -> int:
    """Play until all episodes are written, or until `stop()`; returns how many were written.

    `first` is what env.reset() gave. Episodes under way when it stops are left out: an episode is recorded whole or not at all.
    """
    return _Recording(env, first, act, writer, options, say).run(stop)


class _Recording:
    def __init__(self, env: BatchedEnv, first: Step, act: ActFunction, writer: DemoWriter, options: RecordingOptions,
                 say: Callable[[str], None]) -> None:
        self.env, self.act, self.writer, self.options, self.say = env, act, writer, options, say
        self.likely = act if isinstance(act, LikelyActor) else None
        self.rollout = Rollout(env, first, self._choose, options.episodes)
        self.cutter = EpisodeCutter(env.num_seats, env.action_space)
        self.done = self.steps = 0
        self.log_prob: np.ndarray | None = None
        self.rng = np.random.default_rng((options.seed, 0xE95))
        self.random = RandomPolicy(env.action_space, self.rng)

    def run(self, stop: Callable[[], bool]) -> int:
        told = time.monotonic()
        if stop():
            return 0
        for played in self.rollout:
            self._add(played)
            self.writer.flush_if_due()
            if time.monotonic() >= told + PROGRESS_SECONDS:
                told = time.monotonic()
                self.say(self.progress())
            if stop() or (self.options.steps is not None and self.steps >= self.options.steps):
                break
        return self.done

    def progress(self) -> str:
        info = self.writer.written
        mean = "" if info.returns is None else f", mean return {info.returns.mean:.3g}"
        return f"  {self.done:,} of {self.options.episodes:,} episodes, {self.steps:,} steps{mean}"

    def _choose(self, step: Step, previous: Any) -> np.ndarray:
        """The action; a copy of what it was chosen from is kept."""
        action = np.asarray(self.act(step, previous))
        if self.options.epsilon:
            replaced = self.rng.random(len(action)) < self.options.epsilon
            action = np.where(replaced.reshape(-1, *(1,) * (action.ndim - 1)), self.random(step), action)
        self.log_prob = self._log_prob(step, action)
        self.cutter.see(step)
        return action

    def _log_prob(self, step: Step, action: np.ndarray) -> np.ndarray | None:
        """Of the actions, those that were replaced by random ones included; None where it is not known."""
        own = None if self.likely is None else self.likely.log_prob(step, action)
        epsilon = self.options.epsilon
        if own is None or not epsilon:
            return own
        uniform = self.random.log_prob(step, action)
        if uniform is None:
            return None
        with np.errstate(divide="ignore"):
            return np.logaddexp(np.log1p(-epsilon) + own, np.log(epsilon) + uniform)

    def _add(self, played: Played) -> None:
        remaining = self.rollout.remaining > 0
        for episode in self.cutter.add(played.action, played.step, played.finished, remaining, self.log_prob):
            self.writer.add(episode)
            self.done += 1
            self.steps += len(episode)
