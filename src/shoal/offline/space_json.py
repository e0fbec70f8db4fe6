"""Spaces as JSON, and the difference between two of them in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.errors import ConfigError

__all__ = ["difference", "shape_difference", "space_from_json", "space_to_json"]


def space_to_json(space: gym.Space[Any]) -> dict[str, Any]:
    """Plain values; bounds that are all equal become one number."""
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {name: space_to_json(part) for name, part in space.spaces.items()}}
    if isinstance(space, spaces.Box):
        return {"type": "Box", "shape": list(space.shape), "dtype": space.dtype.str, "low": _bound(space.low),
                "high": _bound(space.high)}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": np.asarray(space.nvec).tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "shape": list(space.shape)}
    raise ConfigError(f"a space of type {type(space).__name__} cannot be recorded: {space}; wrap the environment")


def _bound(values: np.ndarray) -> Any:
    """JSON has no infinity, so it is written as a word."""
    same = values.size and (values == values.flat[0]).all()
    return _word(values.flat[0].item()) if same else [_word(x) for x in values.ravel().tolist()]


def _word(x: float) -> float | str:
    return x if np.isfinite(x) else str(x)


def space_from_json(data: Mapping[str, Any]) -> gym.Space[Any]:
    kind = data["type"]
    if kind == "Dict":
        return spaces.Dict({name: space_from_json(part) for name, part in data["spaces"].items()})
    if kind == "Box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        low, high = (np.broadcast_to(_values(data[name], shape, dtype), shape) for name in ("low", "high"))
        return spaces.Box(low.copy(), high.copy(), dtype=dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(data["nvec"]))
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["shape"][0] if len(data["shape"]) == 1 else tuple(data["shape"]))
    raise ValueError(f"unknown space type {kind!r}")


def _values(bound: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if isinstance(bound, list):
        return np.array([float(x) if isinstance(x, str) else x for x in bound]).astype(dtype).reshape(shape)
    return np.array(float(bound) if isinstance(bound, str) else bound).astype(dtype)


def difference(one: gym.Space[Any], other: gym.Space[Any], name: str = "") -> str | None:
    """How two spaces differ, in words; None if data of one can stand for data of the other. Bounds of a Box may differ."""
    if isinstance(one, spaces.Dict) and isinstance(other, spaces.Dict):
        if one.spaces.keys() != other.spaces.keys():
            return f"{name or 'they'} have the keys {', '.join(one.spaces)} and {', '.join(other.spaces)}"
        found = (difference(part, other[key], f"{name}.{key}" if name else key) for key, part in one.spaces.items())
        return next((text for text in found if text), None)
    if isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        same = one.shape == other.shape and one.dtype == other.dtype
    else:
        same = one == other
    return None if same else f"{f'{name}: ' if name else ''}{one} and {other}"


def shape_difference(inferred: gym.Space[Any], wanted: gym.Space[Any]) -> str | None:
    """Why values of a space that was inferred from data are not in another one, in words; None where they may be."""
    if isinstance(inferred, spaces.Discrete) and isinstance(wanted, spaces.Discrete):
        return f"{inferred} has more values than {wanted}" if inferred.n > wanted.n else None
    if isinstance(inferred, spaces.Box) and isinstance(wanted, spaces.Box):
        return f"shape {inferred.shape} instead of {wanted.shape}" if inferred.shape != wanted.shape else None
    return difference(inferred, wanted)
