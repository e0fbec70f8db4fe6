"""Canonical spaces: what observations and actions look like in a Step, whatever the environment's own spaces are.

observations   float64 Box -> float32; other Boxes keep their dtype; Discrete, MultiDiscrete -> int64 counted from 0;
               MultiBinary -> int8; Dict and Tuple -> nested dictionaries (a Tuple's keys are "0", "1", ...);
               {"observation": x, "action_mask": m} -> x, and m travels as Step.action_mask
actions        Discrete(n, start) -> 0..n-1; MultiDiscrete and MultiBinary -> flat int64 [B, len(nvec)] counted from 0;
               Box -> float, clipped to its bounds before the environment sees it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.envs.interface import Tree
from shoal.errors import ConfigError

__all__ = ["ActionCodec", "BadValue", "Leaf", "ObservationCodec", "ignore_overflow"]


def ignore_overflow() -> np.errstate:
    """The context to call fault() in: sums may overflow. The caller enters it once per step, because it costs 1 µs."""
    return np.errstate(over="ignore", invalid="ignore")


class BadValue(Exception):
    """A value does not fit its space. The adapter adds environment, seat and step, and raises EnvironmentError_."""


@dataclass
class Leaf:
    """One array of an observation: where it is in the raw value, and how it is stored."""

    path: tuple[Any, ...]  # keys into the environment's own value
    names: tuple[str, ...]  # keys into the canonical tree
    shape: tuple[int, ...]
    dtype: np.dtype
    start: np.ndarray | int = 0  # subtracted, so that integers count from 0
    count: np.ndarray | None = None  # exclusive upper bound of integers, after the subtraction

    def __post_init__(self) -> None:
        self.label = ".".join(self.names) or "observation"
        self.is_float = self.dtype.kind == "f"
        self.offset = bool(np.any(self.start))

    def read(self, value: Any) -> Any:
        for key in self.path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError) as error:
                raise BadValue(f"the observation has no {self.label!r}: got {_short(value)}") from error
        return value

    def fit(self, value: Any, lead: tuple[int, ...] = ()) -> np.ndarray:
        """Check shape and dtype and convert. `lead` is () for one seat, (B,) for a batch."""
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise BadValue(f"{self.label} is not an array of shape {lead + self.shape}: {_short(value)}") from error
        if array.shape != lead + self.shape:
            raise BadValue(f"{self.label} has shape {array.shape}, its space says {lead + self.shape}: {_short(value)}")
        if array.dtype != self.dtype:
            array = self._cast(array)
        return array - self.start if self.offset else array

    def _cast(self, array: np.ndarray) -> np.ndarray:
        """Rounding to a shorter float is expected (most simulators compute in float64); a changed integer is a fault."""
        castable = "fiub" if self.is_float else "iu" if self.count is not None else "iub"
        mismatch = f"{self.label} has dtype {array.dtype}, its space says {self.dtype}"
        if array.dtype.kind not in castable:
            raise BadValue(f"{mismatch}: {_short(array)}")
        if self.is_float:
            with np.errstate(over="ignore"):  # fault() finds an infinity that the cast makes
                return array.astype(self.dtype)
        cast = array.astype(self.dtype)
        if not np.array_equal(cast, array):
            raise BadValue(f"{mismatch}, which cannot hold {array[cast != array].flat[0]}")
        return cast

    def fault(self, array: np.ndarray) -> tuple[int, str] | None:
        """The first row of [B, ...] that is not finite or not in range, in words. One pass; call it under ignore_overflow()."""
        if self.is_float:
            # A finite sum proves finite values; a sum that is not may be a harmless overflow, so look closely then.
            if math.isfinite(np.add.reduce(array, axis=None)):
                return None
            wrong = ~np.isfinite(array)
        elif self.count is not None and array.size:
            wrong = (array < 0) | (array >= self.count)
        else:
            return None
        index = np.argwhere(wrong)
        if len(index) == 0:
            return None
        where = tuple(int(k) for k in index[0])
        place = f"{self.label}{list(where[1:])}" if len(where) > 1 else self.label
        value = array[where] if self.is_float else array[where] + np.broadcast_to(self.start, self.shape)[where[1:]]
        return where[0], f"{place} is {value}" + ("" if self.is_float else ", outside its space")


class ObservationCodec:
    """Stores observations of one seat's space as arrays: a list of leaves and the canonical space they form.

    `masked`: observations carry their own action mask, as those of PettingZoo's classic games do.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.raw_space = space
        self.leaves: list[Leaf] = []
        self.masked = False
        self.space: gym.Space[Any]
        if isinstance(space, spaces.Dict) and {"observation", "action_mask"} <= set(space.spaces):
            self.masked = True
            rest = {key: part for key, part in space.spaces.items() if key != "action_mask"}
            if len(rest) == 1:
                self.space = self._canonical(rest["observation"], ("observation",), ())
            else:
                self.space = spaces.Dict({key: self._canonical(part, (key,), (str(key),)) for key, part in rest.items()})
        else:
            self.space = self._canonical(space, (), ())
        self.single = self.leaves[0] if len(self.leaves) == 1 and not self.leaves[0].path else None

    def _canonical(self, space: gym.Space[Any], path: tuple[Any, ...], names: tuple[str, ...]) -> gym.Space[Any]:
        def leaf(shape: tuple[int, ...], dtype: Any, start: Any = 0, count: Any = None) -> None:
            self.leaves.append(Leaf(path, names, tuple(shape), np.dtype(dtype), start, count))

        if isinstance(space, spaces.Dict | spaces.Tuple):
            parts: Iterable[tuple[Any, gym.Space[Any]]]
            parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            return spaces.Dict({str(k): self._canonical(part, (*path, k), (*names, str(k))) for k, part in parts})
        if isinstance(space, spaces.Box):
            dtype = np.dtype(np.float32) if space.dtype == np.float64 else space.dtype
            leaf(space.shape, dtype)
            if dtype == space.dtype:
                return space
            with np.errstate(over="ignore"):
                return spaces.Box(space.low.astype(dtype), space.high.astype(dtype), dtype=dtype.type)
        if isinstance(space, spaces.Discrete):
            leaf((), np.int64, int(space.start), np.asarray(space.n, np.int64))
            return spaces.Discrete(int(space.n))
        if isinstance(space, spaces.MultiDiscrete):
            start = np.asarray(space.start, np.int64)
            leaf(space.shape, np.int64, start if start.any() else 0, np.asarray(space.nvec, np.int64))
            return spaces.MultiDiscrete(space.nvec)
        if isinstance(space, spaces.MultiBinary):
            leaf(space.shape, np.int8, 0, np.asarray(2, np.int8))
            return space
        raise ConfigError(
            f"observation space {type(space).__name__} is not supported; use Box, Discrete, MultiDiscrete, MultiBinary "
            "or a Dict or Tuple of these (gymnasium.wrappers.TransformObservation can convert it)"
        )

    def buffers(self, rows: int) -> list[np.ndarray]:
        return [np.zeros((rows, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def tree(self, arrays: Sequence[np.ndarray]) -> Tree:
        """The canonical tree over these arrays, without copying."""
        if not self.leaves[0].names and len(self.leaves) == 1:
            return arrays[0]
        tree: dict[str, Any] = {}
        for leaf, array in zip(self.leaves, arrays, strict=True):
            node = tree
            for name in leaf.names[:-1]:
                node = node.setdefault(name, {})
            node[leaf.names[-1]] = array
        return tree

    def write(self, buffers: list[np.ndarray], row: int, value: Any) -> None:
        """Store one seat's raw observation in a row."""
        for leaf, buffer in zip(self.leaves, buffers, strict=True):
            buffer[row] = leaf.fit(leaf.read(value))

    def batch(self, value: Any, rows: int) -> list[np.ndarray]:
        """The arrays of a raw observation that is already batched; without a copy where the dtype is right."""
        return [leaf.fit(leaf.read(value), (rows,)) for leaf in self.leaves]

    def fault(self, arrays: Sequence[np.ndarray]) -> tuple[int, str] | None:
        """The first fault of any leaf, as (row, words). Call it under ignore_overflow()."""
        for leaf, array in zip(self.leaves, arrays, strict=True):
            found = leaf.fault(array)
            if found:
                return found
        return None


class ActionCodec:
    """Turns canonical actions [B, ...] into what the environment wants, and raw masks into flat ones."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self.raw_space = space
        self.raw_shape = tuple(space.shape or ())
        self.start: Any = 0
        self.sizes: tuple[int, ...] = ()  # number of choices of each sub-action; empty for a Box
        self.space: gym.Space[Any]
        self.shape: tuple[int, ...]
        self._box: spaces.Box[Any] | None = None
        if isinstance(space, spaces.Discrete):
            self.kind, self.start = "discrete", int(space.start)
            self.space, self.shape = spaces.Discrete(int(space.n)), ()
            self.sizes = (int(space.n),)
        elif isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
            self.kind = "multi"
            if isinstance(space, spaces.MultiBinary):
                nvec = np.full(space.shape, 2)
            else:
                nvec, self.start = np.asarray(space.nvec), np.asarray(space.start, np.int64)
            self.space, self.shape = spaces.MultiDiscrete(nvec.ravel()), (nvec.size,)
            self.sizes = tuple(int(n) for n in nvec.ravel())
        elif isinstance(space, spaces.Box) and space.dtype.kind == "f":
            self.kind, self.space, self.shape, self._box = "box", space, self.raw_shape, space
        else:
            raise ConfigError(
                f"action space {space} is not supported; use Discrete, MultiDiscrete, MultiBinary or a Box of floats "
                "(gymnasium.wrappers.TransformAction can convert it)"
            )
        self.mask_size = sum(self.sizes)
        self._edges = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)[:-1]]) if self.sizes else None

    def batch(self, action: Any, rows: int) -> np.ndarray:
        """[B, *raw shape] as a gymnasium VectorEnv wants it."""
        array = np.asarray(action)
        if array.shape != (rows, *self.shape):
            raise BadValue(f"was given actions of shape {array.shape} instead of {(rows, *self.shape)}")
        if self._box is not None:
            if not np.isfinite(array).all():
                raise BadValue(f"was given an action that is not finite: {array[~np.isfinite(array)][0]}")
            return np.asarray(np.clip(array, self._box.low, self._box.high), self._box.dtype)
        if array.dtype.kind not in "iu":
            raise BadValue(f"was given actions of dtype {array.dtype}; {self.space} wants integers")
        if self.kind == "discrete":
            return np.asarray(array + self.start) if self.start else array.astype(np.int64, copy=False)
        return np.asarray(array.reshape(rows, *self.raw_shape) + self.start).astype(self.raw_space.dtype)

    def rows(self, action: Any, rows: int) -> Any:
        """One action per environment, each as its own step() wants it: a list or an array to index."""
        array = self.batch(action, rows)
        return array.tolist() if self.kind == "discrete" else array

    def canonical(self, value: Any, lead: tuple[int, ...] = ()) -> np.ndarray:
        """Actions in the environment's own terms, as canonical ones; `lead` is () for one action, (B,) for a batch."""
        array = np.asarray(value)
        if array.shape != lead + self.raw_shape:
            raise BadValue(f"the action has shape {array.shape} instead of {lead + self.raw_shape}")
        return np.asarray(array if self.kind == "box" else array - self.start).reshape(lead + self.shape)

    def contains(self, action: np.ndarray) -> bool:
        """Whether canonical actions [..., *shape] are in the space. Those of a Box need only be finite: they are clipped."""
        if action.shape[action.ndim - len(self.shape):] != self.shape:
            return False
        if self.kind == "box":
            return bool(np.isfinite(action).all())
        sizes = np.asarray(self.sizes).reshape(self.shape)
        return action.dtype.kind in "iub" and not bool((action < 0).any() or (action >= sizes).any())

    def mask(self, value: Any, lead: tuple[int, ...] = ()) -> np.ndarray:
        """A raw mask as bool [*lead, mask_size]. Tuples (one array per sub-action) are joined."""
        if isinstance(value, tuple | list) and self.kind == "multi":
            value = np.concatenate([np.asarray(part) for part in value], axis=-1)
        array = np.asarray(value)
        if array.shape != (*lead, self.mask_size):
            raise BadValue(f"action_mask has shape {array.shape} instead of {(*lead, self.mask_size)} for {self.space}")
        return array.astype(bool, copy=False)

    def mask_fault(self, mask: np.ndarray) -> tuple[int, str] | None:
        """The first row without a legal action, as (row, words)."""
        row = np.flatnonzero(self._dead_rows(mask))
        return (int(row[0]), "action_mask allows no action") if len(row) else None

    def open_dead_rows(self, mask: np.ndarray) -> np.ndarray:
        """The mask with everything legal in rows that allow no action: after an episode's end some environments allow nothing."""
        opened: np.ndarray = mask | self._dead_rows(mask)[:, None]
        return opened

    def _dead_rows(self, mask: np.ndarray) -> np.ndarray:
        if self._edges is None:
            return np.zeros(len(mask), bool)
        return np.logical_not(np.logical_or.reduceat(mask, self._edges, axis=1).all(axis=1))


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 80 else text[:77] + "..."
