"""The list of shoal's own environments: spaces and parameters of each, without importing Numba.

| id | task | random | optimal |
|---|---|---|---|
| shoal/Catch-v0 | 10 x 5 board, 9 decisions, catch the ball: +1, else -1. `observation="features"`: float32[50]; `"pixels"`: uint8[1, 10, 5], 0 or 255 | -0.6 | 1 |
| shoal/PixelCatch-v0 | Catch drawn with 2 x 2 pixels a cell at (4, 9) of a 28 x 28 canvas: uint8[1, 28, 28]; `crop="centre"`: uint8[1, 24, 24] | -0.6 | 1 |
| shoal/RiskyChain-v0 | a safe +0.5 at once, or m risky steps to +1 | see tests | 1 |
| shoal/LureChain-v0 | a lure of 0.1 at each of `length` states, +1 at the end | 0.1 (1 - 2^-L) + 2^-L | 1 |
| shoal/BlindCliffwalk-v0 | `length` right moves in a row (action 1) to +1, else 0 | 2^-n | 1 |
| shoal/DeepSea-v0 | `size` moves to the right, each with its own meaning of "right", to +0.99 | about 0 | 0.99 |
| shoal/TMaze-v0 | a cue at t = 0, `length` corridor steps, then the door it named: +1, else -1 | 0 | 1 |
| shoal/CueLure-v0 | T-maze whose corridor offers the lure (action 0) at every step | see tests | 1 |
| shoal/PointGrasp-v0 | move a gripper over an object and close: continuous, 3 actions | 1.4 % success | 0.894 |
| shoal/CartPolePOMDP-v0 | CartPole-v1 without velocities: float32[2] = position, angle | about 22 | 500 |

All take `max_episode_steps` (truncates); CartPolePOMDP's is 500. CartPole-v1 has a compiled version too: envs.make(..., backend="compiled").
"""  # noqa: E501  a table

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.errors import ConfigError

__all__ = ["CATALOG", "BuiltinSpec", "builtin_spec", "register"]


@dataclass(frozen=True)
class BuiltinSpec:
    """All that the compiled back-end needs to know about one environment."""

    name: str
    reset: str  # key of kernels.RESETS
    step: str  # key of kernels.STEPS
    observation_space: spaces.Box[Any]
    action_space: gym.Space[Any]
    state_size: int
    params: list[float]
    state_dtype: type[np.generic] = np.int64
    max_episode_steps: int | None = None
    executes: bool = False  # fills Step.executed_action


def _need(holds: bool, text: str) -> None:
    if not holds:
        raise ConfigError(text)


def _unit(*shape: int) -> spaces.Box:
    return spaces.Box(0.0, 1.0, shape, np.float32)


def _catch(
    observation: str = "features",
    rows: int = 10,
    columns: int = 5,
    ball_column: int | None = None,
    reward_scale: float = 1.0,
) -> BuiltinSpec:
    _need(observation in ("features", "pixels"), f"observation={observation!r}: use 'features' or 'pixels'")
    _need(rows >= 2 and columns >= 1, f"rows={rows}, columns={columns}: Catch needs at least 2 rows and 1 column")
    _need(
        ball_column is None or 0 <= ball_column < columns, f"ball_column={ball_column} is not one of {columns} columns"
    )
    pixels = observation == "pixels"
    board = spaces.Box(0, 255, (1, rows, columns), np.uint8) if pixels else _unit(rows * columns)
    column = -1 if ball_column is None else ball_column
    params = [rows, columns, column, reward_scale, 255 if pixels else 1, 1, 0, 0, columns]
    return BuiltinSpec("shoal/Catch-v0", "catch", "catch", board, spaces.Discrete(3), 3, params)


def _pixel_catch(crop: str = "none") -> BuiltinSpec:
    _need(crop in ("none", "centre"), f"crop={crop!r}: use 'none' (28 x 28) or 'centre' (24 x 24)")
    side, cut = (28, 0) if crop == "none" else (24, 2)
    board = spaces.Box(0, 255, (1, side, side), np.uint8)
    params = [10, 5, -1, 1.0, 255, 2, 4 - cut, 9 - cut, side]
    return BuiltinSpec("shoal/PixelCatch-v0", "catch", "catch", board, spaces.Discrete(3), 3, params)


def _risky(m: int = 5) -> BuiltinSpec:
    _need(m >= 1, f"m={m}: the chain needs at least one state")
    return BuiltinSpec("shoal/RiskyChain-v0", "onehot", "risky", _unit(m + 1), spaces.Discrete(3), 1, [m])


def _lure(length: int = 4, lure: float = 0.1) -> BuiltinSpec:
    _need(length >= 1, f"length={length}: the chain needs at least one state")
    return BuiltinSpec("shoal/LureChain-v0", "onehot", "lure", _unit(length), spaces.Discrete(2), 1, [length, lure])


def _cliff(length: int = 8) -> BuiltinSpec:
    _need(length >= 1, f"length={length}: the cliff needs at least one state")
    return BuiltinSpec("shoal/BlindCliffwalk-v0", "onehot", "lure", _unit(length), spaces.Discrete(2), 1, [length, 0.0])


def _sea(size: int = 10, mapping_seed: int = 42) -> BuiltinSpec:
    _need(size >= 2, f"size={size}: the sea needs at least 2 rows")
    mapping = np.random.default_rng(mapping_seed).integers(0, 2, size * size)
    params = [size, 0.01 / size, *mapping]
    return BuiltinSpec("shoal/DeepSea-v0", "onehot", "sea", _unit(size * size), spaces.Discrete(2), 1, params)


def _cue_space() -> spaces.Box:
    return spaces.Box(np.array([-1, 0, 0], np.float32), np.ones(3, np.float32), dtype=np.float32)


def _tmaze(length: int = 8) -> BuiltinSpec:
    _need(length >= 1, f"length={length}: the corridor needs at least one step")
    return BuiltinSpec("shoal/TMaze-v0", "cue", "tmaze", _cue_space(), spaces.Discrete(2), 2, [length], executes=True)


def _cue_lure(length: int = 12, lure: float = 0.1) -> BuiltinSpec:
    _need(length >= 1, f"length={length}: the corridor needs at least one step")
    return BuiltinSpec("shoal/CueLure-v0", "cue", "cuelure", _cue_space(), spaces.Discrete(2), 2, [length, lure])


def _grasp() -> BuiltinSpec:
    seen = spaces.Box(np.array([-1, -1, -1, -1, 0], np.float32), np.ones(5, np.float32), dtype=np.float32)
    hand = spaces.Box(-1.0, 1.0, (3,), np.float32)
    return BuiltinSpec("shoal/PointGrasp-v0", "grasp", "grasp", seen, hand, 5, [0.0], state_dtype=np.float64)


def _cartpole(sutton_barto_reward: bool = False) -> BuiltinSpec:
    return _cartpole_seen_as("CartPole-v1", [4.8, np.inf, 24 * 2 * math.pi / 360, np.inf], [0, float(sutton_barto_reward)])


def _cartpole_pomdp() -> BuiltinSpec:
    return _cartpole_seen_as("shoal/CartPolePOMDP-v0", [4.8, 24 * 2 * math.pi / 360], [1, 0])


def _cartpole_seen_as(name: str, bounds: list[float], params: list[float]) -> BuiltinSpec:
    high = np.array(bounds, np.float32)
    box = spaces.Box(-high, high, dtype=np.float32)
    return BuiltinSpec(name, "cartpole", "cartpole", box, spaces.Discrete(2), 4, params, np.float64, 500)


CATALOG: dict[str, Callable[..., BuiltinSpec]] = {
    "CartPole-v1": _cartpole,
    "shoal/BlindCliffwalk-v0": _cliff,
    "shoal/CartPolePOMDP-v0": _cartpole_pomdp,
    "shoal/Catch-v0": _catch,
    "shoal/CueLure-v0": _cue_lure,
    "shoal/DeepSea-v0": _sea,
    "shoal/LureChain-v0": _lure,
    "shoal/PixelCatch-v0": _pixel_catch,
    "shoal/PointGrasp-v0": _grasp,
    "shoal/RiskyChain-v0": _risky,
    "shoal/TMaze-v0": _tmaze,
}


def builtin_spec(name: str, kwargs: dict[str, Any]) -> BuiltinSpec:
    """The spec of a built-in environment with these options; ConfigError for an option it does not have."""
    try:
        return CATALOG[name](**kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{name}: {str(error).replace('()', '', 1)}; options are those of {CATALOG[name].__name__} in "
            "shoal/envs/builtin/catalog.py"
        ) from error


def register() -> None:
    """Register shoal's ids with gymnasium: single and batched version. CartPole-v1 stays gymnasium's own."""
    for name in CATALOG:
        if name.startswith("shoal/") and name not in gym.registry:
            gym.register(
                name,
                entry_point="shoal.envs.builtin.compiled:CompiledSingleEnv",
                vector_entry_point="shoal.envs.builtin.compiled:CompiledVectorEnv",
                max_episode_steps=500 if name == "shoal/CartPolePOMDP-v0" else None,
                kwargs={"builtin": name},
            )
