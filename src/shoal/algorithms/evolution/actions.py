"""What the outputs of a policy without randomness mean: the likeliest action, or one within the bounds of a Box."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.nets.continuous import bounded_range
from shoal.nets.heads import action_head

__all__ = ["ActionReader"]


class ActionReader:
    """Reads actions [B, ...] from outputs [B, `outputs`]. Bounded Box actions are squashed by tanh."""

    def __init__(self, space: gym.Space[Any], name: str) -> None:
        self.box = space if isinstance(space, gym.spaces.Box) else None
        if self.box is None:
            self._head = action_head(space)
            self.outputs = self._head.outputs
            return
        if self.box.dtype is None or self.box.dtype.kind != "f":
            raise ConfigError(f"es cannot act in {name}: its action space is {space}; use an environment with Discrete, "
                              "MultiDiscrete or floating-point Box actions, or wrap it (gymnasium.wrappers.TransformAction)")
        self.outputs = int(np.prod(self.box.shape))
        bounded = bool(np.isfinite(self.box.low).all() and np.isfinite(self.box.high).all())
        self._range = bounded_range(self.box) if bounded else None

    def read(self, outputs: Tensor, mask: Tensor | None, noise: Tensor | None) -> Tensor:
        """`noise` [B, outputs] is added to Box actions, in units of half their range."""
        if self.box is None:
            return self._head.mode(outputs, mask)
        unit = outputs if self._range is None else torch.tanh(outputs)
        if noise is not None:
            unit = unit + noise
        flat = unit if self._range is None else self._range.scaled(unit.clamp(-1, 1))
        return flat.reshape(len(flat), *self.box.shape)
