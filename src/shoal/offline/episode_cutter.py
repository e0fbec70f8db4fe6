"""Cuts the steps of several rows into whole episodes.

    cutter.see(step)                                what the policy is about to act on
    for episode in cutter.add(action, step): ...    what came of it; the episodes that it ended
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.envs.interface import Step, Tree
from shoal.offline.recorded_episodes import Episode, action_dtype, known_log_prob
from shoal.slots import map_tree

__all__ = ["EpisodeCutter"]


@dataclass
class _Transition:
    """One step of all rows: what the policy saw, and what came of it."""

    observation: Tree
    mask: np.ndarray | None
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    log_prob: np.ndarray | None


class EpisodeCutter:
    """Keeps as many steps as the oldest episode under way has."""

    def __init__(self, rows: int, action_space: gym.Space[Any]) -> None:
        self._dtype = action_dtype(action_space)
        self._begun = np.zeros(rows, np.int64)  # number of the transition with which each row's episode began
        self._past: deque[_Transition] = deque()
        self._dropped = 0  # transitions that no unfinished episode needs any more
        self._seen: tuple[Tree, np.ndarray | None]

    def see(self, step: Step) -> None:
        """Copy what an action is chosen from: the environment reuses its arrays."""
        self._seen = map_tree(np.copy, step.observation), None if step.action_mask is None else step.action_mask.copy()

    def add(self, action: np.ndarray, now: Step, finished: np.ndarray | None = None,
            wanted: np.ndarray | None = None, log_prob: np.ndarray | None = None) -> Iterator[Episode]:
        """The episodes that have ended; `finished` are their rows, if not all count. Only `wanted` rows, a mask, continue.
        `log_prob` [B] is that of the actions; it is forgotten where the environment did something else."""
        executed = action if now.executed_action is None else now.executed_action
        if log_prob is not None and now.executed_action is not None:
            same = (np.asarray(executed) == action).reshape(len(log_prob), -1).all(1)
            log_prob = np.where(same, log_prob, np.nan)
        self._past.append(_Transition(*self._seen, np.array(executed), now.reward.copy(), now.discount == 0, log_prob))
        for row in np.flatnonzero(now.last & now.valid) if finished is None else finished:
            yield self._episode(int(row), now)
        self._begun[now.first] = self._dropped + len(self._past)
        unfinished = self._begun if wanted is None else self._begun[wanted]
        while self._past and len(unfinished) and self._dropped < unfinished.min():
            self._past.popleft()
            self._dropped += 1

    def _episode(self, row: int, now: Step) -> Episode:
        transitions = [self._past[i] for i in range(int(self._begun[row]) - self._dropped, len(self._past))]
        final = np.flatnonzero(now.final_rows == row)
        if len(final):
            last = map_tree(lambda x: x[final[0]], now.final_observation)
        else:
            last = map_tree(lambda x: np.zeros_like(x[row]), now.observation)
        seen = [map_tree(lambda x: x[row], one.observation) for one in transitions]
        observation = map_tree(lambda *parts: np.stack(parts), *seen, last)
        truncated = np.zeros(len(transitions), bool)
        truncated[-1] = bool(now.truncated[row])
        action = np.stack([one.action[row] for one in transitions]).astype(self._dtype, copy=False)
        masks = [one.mask[row] for one in transitions if one.mask is not None]
        final_mask = None if now.final_action_mask is None or not len(final) else now.final_action_mask[final[0]].copy()
        likely = [np.nan if one.log_prob is None else one.log_prob[row] for one in transitions]
        return Episode(observation, action, np.array([one.reward[row] for one in transitions], np.float32),
                       np.array([one.terminated[row] for one in transitions]), truncated, np.stack(masks) if masks else None,
                       final_mask, known_log_prob(np.array(likely, np.float32)))
