"""How observations and actions of a space are stored: trees of (shape, dtype)."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.slots import Field, leaves, map_tree

__all__ = ["Leaf", "action_leaf", "float_paths", "float_size", "leaf_tree", "observation_fields"]

Leaf = tuple[tuple[int, ...], str]
"""Shape and dtype of one array."""


def leaf_tree(space: gym.Space[Any]) -> Tree:
    """The tree of leaves of one canonical observation."""
    if isinstance(space, gym.spaces.Dict):
        return {key: leaf_tree(part) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Discrete):
        return (), "int64"
    assert space.shape is not None and space.dtype is not None  # of every other space that an environment may have
    return tuple(space.shape), "float32" if space.dtype == np.float64 else np.dtype(space.dtype).name


def action_leaf(space: gym.Space[Any]) -> Leaf:
    """Shape and dtype in which one action is stored."""
    if isinstance(space, gym.spaces.Discrete):
        return (), "int64"
    if isinstance(space, gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        return (math.prod(space.shape),), "int64"
    if isinstance(space, gym.spaces.Box) and space.dtype is not None and space.dtype.kind == "f":
        return tuple(space.shape), "float32"
    raise ConfigError(f"actions of {space} cannot be recorded; use Discrete, MultiDiscrete or a Box of floats")


def observation_fields(space: gym.Space[Any], *lead: int, join: int = 0) -> Tree:
    """Fields of observations with these leading axes."""
    return map_tree(lambda leaf: Field((*lead, *leaf[0]), leaf[1], join), leaf_tree(space))


def float_paths(space: gym.Space[Any]) -> list[tuple[str, ...]]:
    """Where an observation has floating-point numbers: these can be normalised, pixels and categories are not."""
    return [path for path, (_, dtype) in leaves(leaf_tree(space)) if np.dtype(dtype).kind == "f"]


def float_size(space: gym.Space[Any]) -> int:
    """How many floating-point numbers one observation has."""
    return sum(math.prod(shape) for _, (shape, dtype) in leaves(leaf_tree(space)) if np.dtype(dtype).kind == "f")
