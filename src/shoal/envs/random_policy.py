"""Uniformly random actions, for trials and for recordings without an expert."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from shoal.envs.interface import Step
from shoal.envs.space_codecs import ActionCodec

__all__ = ["RandomPolicy"]


class RandomPolicy:
    """Uniform actions of a canonical space, legal ones where the environment reports masks; normal where a Box is unbounded."""

    def __init__(self, space: gym.Space[Any], rng: np.random.Generator) -> None:
        self._space, self._sizes, self._rng = space, ActionCodec(space).sizes, rng

    def __call__(self, step: Step, previous: Any = None) -> np.ndarray:
        space, rows = self._space, len(step.first)
        if isinstance(space, gym.spaces.Box):
            bounded = np.isfinite(space.low) & np.isfinite(space.high)
            low, high = (np.where(bounded, bound, 0.0) for bound in (space.low, space.high))
            uniform = self._rng.uniform(low, high, (rows, *space.shape))
            return np.where(bounded, uniform, self._rng.standard_normal(uniform.shape)).astype(space.dtype)
        mask = np.ones((rows, sum(self._sizes)), bool) if step.action_mask is None else step.action_mask
        masks = np.split(mask, np.cumsum(self._sizes)[:-1], 1)
        chosen = [np.where(part, self._rng.random(part.shape), -1.0).argmax(1) for part in masks]
        return chosen[0] if isinstance(space, gym.spaces.Discrete) else np.stack(chosen, 1)

    def log_prob(self, step: Step, action: np.ndarray) -> np.ndarray | None:
        """Of these actions [B, ...]: 1 over the number of legal ones, or over the volume of a bounded Box."""
        space, rows = self._space, len(action)
        if isinstance(space, gym.spaces.Box):
            bounded = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
            return np.full(rows, -np.log(space.high.astype(float) - space.low).sum()) if bounded else None
        if step.action_mask is None:
            return np.full(rows, -np.log(self._sizes).sum())
        legal = [part.sum(1) for part in np.split(step.action_mask, np.cumsum(self._sizes)[:-1], 1)]
        found: np.ndarray = -np.log(np.stack(legal, 1)).sum(1)
        return found
