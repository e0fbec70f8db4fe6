"""A Layout says where the arrays of a tree lie in flat memory, and how several such trees are joined into one batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Field", "Layout", "assign", "leaf_at", "leaves", "map_tree"]

ALIGN = 64  # a cache line: no two fields share one


@dataclass(frozen=True)
class Field:
    """One array: its shape, its dtype, and the axis along which slots are put side by side in a batch."""

    shape: tuple[int, ...]
    dtype: str
    join: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype).str)
        if self.shape and not 0 <= self.join < len(self.shape):
            raise ValueError(f"join axis {self.join} is outside the shape {self.shape}")

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a nested dictionary with their paths, in the order of insertion."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def leaf_at(tree: Any, path: tuple[str, ...]) -> Any:
    """What lies at a path."""
    for key in path:
        tree = tree[key]
    return tree


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The same tree with `function` applied to each leaf (and to the matching leaves of `others`)."""
    kind = type(tree)  # most are dictionaries and arrays, and asking for the protocol is slow
    if kind is dict or (kind is not np.ndarray and isinstance(tree, Mapping)):
        return {key: map_tree(function, value, *(other[key] for other in others)) for key, value in tree.items()}
    return function(tree, *others)


def assign(into: Any, at: Any, values: Any) -> None:
    """Put the leaves of `values` where `at` says into those of the same tree `into`."""

    def put(target: Any, rows: Any) -> None:
        target[at] = rows

    map_tree(put, into, values)


def _leaf_count(tree: Any) -> int:
    return sum(map(_leaf_count, tree.values())) if type(tree) is dict or isinstance(tree, Mapping) else 1


class Layout:
    """A tree of Fields, each at its own aligned offset in one block of `nbytes` bytes."""

    def __init__(self, fields: Any) -> None:
        self.fields = fields
        self._leaves: list[tuple[tuple[str, ...], Field, int]] = []
        offset = 0
        for path, field in leaves(fields):
            if not isinstance(field, Field):
                where = "/".join(path) or "the root"
                raise TypeError(f"the leaves of a layout must be Fields, not {type(field).__name__} (at {where})")
            self._leaves.append((path, field, offset))
            offset += -(-field.nbytes // ALIGN) * ALIGN
        self.nbytes = max(offset, ALIGN)

    @classmethod
    def of(cls, tree: Any, join: int = 0) -> Layout:
        """The layout of an example."""

        def field(leaf: Any) -> Field:
            array = np.asarray(leaf)
            return Field(array.shape, array.dtype.str, join if array.ndim else 0)

        return cls(map_tree(field, tree))

    def views(self, buffer: np.ndarray, offset: int = 0) -> Any:
        """The tree as views of `buffer` (bytes), beginning at `offset`."""
        starts = iter(self._leaves)

        def view(field: Field) -> np.ndarray:
            start = offset + next(starts)[2]
            return buffer[start : start + field.nbytes].view(field.dtype).reshape(field.shape)

        return map_tree(view, self.fields)

    def empty(self) -> Any:
        """A private tree of zeros."""
        return self.views(np.zeros(self.nbytes, np.uint8))

    def joined(self, count: int) -> Layout:
        """The layout of `count` slots side by side; every field needs an axis to join along."""

        def widen(field: Field) -> Field:
            shape = list(field.shape)
            shape[field.join] *= count
            return Field(tuple(shape), field.dtype, field.join)

        return Layout(map_tree(widen, self.fields))

    def gather(self, into: Any, position: int, tree: Any, without: Collection[str] = ()) -> None:
        """Copy one slot's tree, `without` some of its fields, to its position in a batch of the joined layout."""
        for path, field, _ in self._leaves:
            if path and path[0] in without:
                continue
            target, source = into, tree
            for key in path:
                target, source = target[key], source[key]
            width = field.shape[field.join]
            where = (slice(None),) * field.join + (slice(position * width, (position + 1) * width),)
            target[where] = source

    def copy(self, into: Any, tree: Any) -> None:
        """Copy a whole tree, leaf by leaf; shapes and keys must agree."""
        if (count := _leaf_count(tree)) != len(self._leaves):
            raise ValueError(f"the value has {count} arrays, the wire carries {len(self._leaves)}: {self!r}")
        for path, field, _ in self._leaves:
            target, source = into, tree
            for key in path:
                target, source = target[key], source[key]
            source = np.asarray(source)
            if source.shape != field.shape:
                raise ValueError(f"{'/'.join(path) or 'value'} has shape {source.shape}, the wire carries {field.shape}")
            target[...] = source

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._leaves == other._leaves

    def __repr__(self) -> str:
        inside = ", ".join(f"{'/'.join(path)}{list(field.shape)} {field.dtype[1:]}" for path, field, _ in self._leaves)
        return f"Layout({inside})"
