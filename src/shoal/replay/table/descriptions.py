"""Columns and records as plain values, as they travel and as they are saved; what is read is checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.errors import InvalidItem, Refused, SignatureMismatch
from shoal.replay.table.columns import Column, Spec

__all__ = ["check_records", "columns_of", "reach", "read_columns", "read_spec", "write_columns", "write_spec"]

MOST_DIMENSIONS = 32
MOST_DTYPE = 24  # characters of its name
MOST_PATH = 1024
MOST_COLUMNS = 1024
MOST_CELL_BYTES = 1 << 30
DTYPE = re.compile(r"[<>|=]?[biufcSUmM]\d*(\[\d*\w+\])?")


def read_spec(data: Any) -> Spec:
    """A column's cell as [path, dtype, shape]."""
    if not (isinstance(data, list) and len(data) == 3 and isinstance(data[0], str) and isinstance(data[1], str)):
        raise Refused("a column is [path, dtype, shape]")
    path, name, shape = data
    if not (isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS):
        raise Refused(f"column {path!r}: the shape is not a short list")
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 40 for n in shape):
        raise Refused(f"column {path!r}: the shape has a bad length")
    if len(name) > MOST_DTYPE or len(path) > MOST_PATH:
        raise Refused("a column's path or dtype is too long")
    return _known_spec(path, name, tuple(shape))


@lru_cache(1024)
def _known_spec(path: str, name: str, shape: tuple[int, ...]) -> Spec:
    try:
        if DTYPE.fullmatch(name) is None:
            raise ValueError
        spec = Spec(path, np.dtype(name), shape)
    except (TypeError, ValueError, SignatureMismatch) as error:
        raise Refused(f"column {path!r}: dtype {name!r} is not one of numbers or fixed strings") from error
    size = spec.dtype.itemsize
    for n in shape:
        size *= n
    if size > MOST_CELL_BYTES:
        raise Refused(f"column {path!r}: a cell of {size} bytes is too large")
    return spec


def write_spec(spec: Spec) -> list[Any]:
    return [spec.path, spec.dtype.str, list(spec.shape)]


def write_columns(columns: Sequence[Column]) -> list[Any]:
    return [[*write_spec(column.spec), column.length, column.squeeze] for column in columns]


def read_columns(data: Any) -> tuple[Column, ...]:
    """Item columns as [path, dtype, shape, length, squeeze]."""
    if not (isinstance(data, list) and 0 < len(data) <= MOST_COLUMNS):
        raise Refused(f"an item has 1 to {MOST_COLUMNS} columns")
    columns = []
    for entry in data:
        if not (isinstance(entry, list) and len(entry) == 5):
            raise Refused("an item's column is [path, dtype, shape, length, squeeze]")
        length, squeeze = entry[3], entry[4]
        if type(length) is not int or not 1 <= length < 1 << 31 or type(squeeze) is not bool or (squeeze and length != 1):
            raise Refused("an item's column has a bad length")
        columns.append(Column(read_spec(entry[:3]), length, squeeze))
    _check_paths(tuple(column.spec.path for column in columns))
    return tuple(columns)


@lru_cache(1024)
def _check_paths(paths: tuple[str, ...]) -> None:
    """Refuse paths that are not those of one tree: such an item could be stored but never read."""
    known = set(paths)
    for path in paths:
        parts = path.split("/")
        inside = any("/".join(parts[:depth]) in known for depth in range(1, len(parts)))
        if inside or (paths != ("",) and not all(parts)):
            raise Refused(f"column {path!r} is not the path of a leaf beside {sorted(known - {path})[:3]}")


def check_records(records: npt.NDArray[np.int32], columns: tuple[Column, ...], grouped: bool) -> None:
    """Refuse records [n, k, 4] that do not add up to the columns' lengths."""
    if (records[:, :, 0] < 0).any() or (records[:, :, 1] < 0).any() or (records[:, :, 2] < 1).any():
        raise InvalidItem("a record has a negative chunk or row, or no rows")
    counts = records[:, :, 2].astype(np.int64)
    if grouped:
        if any(column.length != columns[0].length for column in columns):
            raise InvalidItem("grouped columns must have one length")
        if (counts.sum(1) != columns[0].length).any():
            raise InvalidItem("records do not add up to the columns' length")
        return
    ends = np.cumsum(counts, 1)
    borders = np.cumsum([column.length for column in columns])
    if (ends[:, -1] != borders[-1]).any():
        raise InvalidItem("records do not add up to the columns' lengths")
    for border in borders:
        if not (ends == border).any(1).all():
            raise InvalidItem("a record crosses the border of its column")


def reach(records: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The lowest and highest row of records [n, k, 4], each [n, k]."""
    begin = records[:, :, 1].astype(np.int64)
    end = begin + (records[:, :, 2].astype(np.int64) - 1) * records[:, :, 3]
    return np.minimum(begin, end), np.maximum(begin, end)


def columns_of(records: npt.NDArray[np.int32], columns: tuple[Column, ...]) -> npt.NDArray[np.int64]:
    """Of every record of items that are not grouped: the place of its column, [n, k]."""
    ends = np.cumsum(records[:, :, 2].astype(np.int64), 1)
    return np.searchsorted(np.cumsum([column.length for column in columns]), ends, side="left")
