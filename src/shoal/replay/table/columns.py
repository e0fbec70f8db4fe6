"""Columns: the paths of a nested dictionary, what lies in their cells, and signatures.

A tree is a dictionary (nested at will) of arrays, or one bare array, whose path is the empty string. Paths join keys with "/".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.replay.errors import InvalidItem, SignatureMismatch

__all__ = ["Array", "Column", "Spec", "arrays_of", "as_array", "check_signature", "flatten", "parse_signature", "unflatten"]

Tree = Any
"""Nested dictionaries with arrays as leaves."""


@runtime_checkable
class ArrayDescription(Protocol):
    """A foreign array or space that can stand in a signature."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class Array:
    """A leaf of a table's signature: the shape as sampled without the batch axis (None: any length) and the dtype."""

    shape: tuple[int | None, ...]
    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))


@dataclass(frozen=True)
class Spec:
    """A column's cell."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype.hasobject or self.dtype.kind not in "biufcSUmM":
            raise SignatureMismatch(f"column {self.path!r}: dtype {self.dtype} cannot be stored; use numbers or fixed strings")

    @cached_property
    def cell_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def check(self, array: npt.NDArray[Any], lead: int = 0) -> None:
        """Refuse an array whose cells (after `lead` axes) are not this column's."""
        if array.dtype != self.dtype or array.shape[lead:] != self.shape:
            raise SignatureMismatch(
                f"column {self.path!r}: got {array.dtype}{list(array.shape[lead:])}, expected {self.dtype}{list(self.shape)}"
            )


@dataclass(frozen=True)
class Column:
    """A column of an item: its cell, how many cells, and whether the time axis is dropped (an int index)."""

    spec: Spec
    length: int
    squeeze: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as sampled, without the batch axis."""
        return self.spec.shape if self.squeeze else (self.length, *self.spec.shape)

    @property
    def extent(self) -> int:
        """The length of the first axis as sampled; 1 where there is none."""
        return self.shape[0] if self.shape else 1


def as_array(leaf: Any, path: str) -> npt.NDArray[Any]:
    """A value as an array; one that is none is refused by its path."""
    try:
        return np.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise InvalidItem(f"column {path!r}: the value is not an array: {error}") from error


def arrays_of(tree: Tree) -> dict[str, npt.NDArray[Any]]:
    """Paths and leaves, which become arrays."""
    flat = flatten(tree)
    try:
        return {path: np.asarray(leaf) for path, leaf in flat.items()}
    except (TypeError, ValueError):
        return {path: as_array(leaf, path) for path, leaf in flat.items()}  # says which


def flatten(tree: Tree) -> dict[str, Any]:
    """Paths and leaves in the order of the keys."""
    if type(tree) is not dict and not isinstance(tree, Mapping):
        return {"": tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if type(key) is not str or "/" in key or not key:
            raise InvalidItem(f"a column's name is a non-empty string without '/', got {key!r}")
        if type(value) is not np.ndarray and isinstance(value, Mapping):
            for path, leaf in flatten(value).items():
                flat[f"{key}/{path}"] = leaf
        else:
            flat[key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Tree:
    """The tree that `flatten` took apart."""
    if len(flat) == 1 and "" in flat:
        return flat[""]
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        if "/" not in path:
            tree[path] = leaf
            continue
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def parse_signature(signature: Tree | None) -> dict[str, Array] | None:
    """A table's signature as paths and Arrays; leaves may be Array, or anything with shape and dtype."""
    if signature is None:
        return None
    parsed = {}
    for path, leaf in flatten(signature).items():
        if not isinstance(leaf, (Array, ArrayDescription)):
            raise SignatureMismatch(f"signature of {path!r} must have a shape and a dtype, got {leaf!r}")
        parsed[path] = leaf if isinstance(leaf, Array) else Array(tuple(leaf.shape), leaf.dtype)
    return parsed


def check_signature(signature: Mapping[str, Array], columns: Iterable[Column], table: str) -> None:
    """Refuse columns that a table was not promised; names the path."""
    seen = set()
    for column in columns:
        path = column.spec.path
        seen.add(path)
        wanted = signature.get(path)
        if wanted is None:
            raise SignatureMismatch(f"table {table!r} has no column {path!r}; it has {sorted(signature)}")
        fits = len(wanted.shape) == len(column.shape) and all(
            w is None or w == h for w, h in zip(wanted.shape, column.shape, strict=True)
        )
        if not fits or wanted.dtype != column.spec.dtype:
            raise SignatureMismatch(
                f"table {table!r}, column {path!r}: got {column.spec.dtype}{list(column.shape)}, "
                f"expected {wanted.dtype}{list(wanted.shape)}"
            )
    if missing := signature.keys() - seen:
        raise SignatureMismatch(f"table {table!r}: column {min(missing)!r} is missing")


def signature_of(columns: Iterable[Column]) -> dict[str, Array]:
    """What later items must look like: the same cells, any length."""
    return {
        column.spec.path: Array(column.spec.shape if column.squeeze else (None, *column.spec.shape), column.spec.dtype)
        for column in columns
    }
