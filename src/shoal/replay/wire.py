"""Messages: a msgpack header and raw buffers, never pickle; what each side may believe of the other is checked here.

A request is [header, buffer...] with header {"op", "id", ...}; its reply carries the same id and either fields or
{"error", "reason"}. Sizes are limited before anything is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import zmq

from shoal.errors import ConfigError, ShoalError
from shoal.replay.columns import Column, Spec
from shoal.replay.errors import BY_NAME, InvalidItem, Refused, ReplayError, SignatureMismatch

__all__ = ["check_address", "field", "is_loopback", "pack", "raise_error", "read_array", "unpack"]

VERSION = 1
MOST_HEADER_BYTES = 1 << 22
MOST_MESSAGE_BYTES = 1 << 30
MOST_FRAMES = 1 << 16
MOST_DIMENSIONS = 32
MOST_PORT = 65535
MOST_DTYPE = 24  # characters of its name


def pack(header: dict[str, Any], buffers: Sequence[Any] = ()) -> list[Any]:
    return [msgpack.packb(header), *buffers]


def unpack(frames: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The header and buffers of a message; refuses what is not one."""
    if not 1 <= len(frames) <= MOST_FRAMES:
        raise Refused(f"a message has 1 to {MOST_FRAMES} frames, got {len(frames)}")
    raw = frames[0].buffer if isinstance(frames[0], zmq.Frame) else frames[0]
    if len(raw) > MOST_HEADER_BYTES:
        raise Refused(f"a header has at most {MOST_HEADER_BYTES} bytes, got {len(raw)}")
    try:
        header = msgpack.unpackb(raw, strict_map_key=True, use_list=True)
    except Exception as error:  # msgpack raises many kinds on random bytes
        raise Refused(f"the header is not msgpack: {type(error).__name__}") from error
    if not isinstance(header, dict):
        raise Refused("the header is not a map")
    buffers = [frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame) for frame in frames[1:]]
    return header, buffers


def field(header: dict[str, Any], name: str, kind: type | tuple[type, ...], low: Any = None, high: Any = None) -> Any:
    """A field of a header that must be there, of a kind and within bounds."""
    value = header.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise Refused(f"field {name!r} is missing or of a wrong kind")
    if (low is not None and value < low) or (high is not None and value > high):
        raise Refused(f"field {name!r} is outside {low}..{high}")
    return value


def seconds(header: dict[str, Any], name: str = "timeout") -> float | None:
    """A timeout: None for ever."""
    value = header.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise Refused(f"field {name!r} must be None or seconds >= 0")
    return float(value)


def read_array(buffer: Any, dtype: Any, count: int) -> npt.NDArray[Any]:
    """A buffer that must hold exactly so many values."""
    kind = np.dtype(dtype)
    if len(buffer) != count * kind.itemsize:
        raise Refused(f"a buffer has {len(buffer)} bytes, expected {count} of {kind}")
    return np.frombuffer(buffer, kind)


def read_spec(data: Any) -> Spec:
    """A column's cell as [path, dtype, shape]."""
    if not (isinstance(data, list) and len(data) == 3 and isinstance(data[0], str) and isinstance(data[1], str)):
        raise Refused("a column is [path, dtype, shape]")
    path, name, shape = data
    if not (isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS):
        raise Refused(f"column {path!r}: the shape is not a short list")
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 40 for n in shape):
        raise Refused(f"column {path!r}: the shape has a bad length")
    if len(name) > MOST_DTYPE or len(path) > 1024:
        raise Refused("a column's path or dtype is too long")
    return _known_spec(path, name, tuple(shape))


@lru_cache(1024)
def _known_spec(path: str, name: str, shape: tuple[int, ...]) -> Spec:
    try:
        spec = Spec(path, np.dtype(name), shape)
    except (TypeError, ValueError, SignatureMismatch) as error:
        raise Refused(f"column {path!r}: dtype {name!r} is not one of numbers or fixed strings") from error
    size = spec.dtype.itemsize
    for n in shape:
        size *= n
    if size > MOST_MESSAGE_BYTES:
        raise Refused(f"column {path!r}: a cell of {size} bytes is too large")
    return spec


def write_spec(spec: Spec) -> list[Any]:
    return [spec.path, spec.dtype.str, list(spec.shape)]


def write_columns(columns: Sequence[Column]) -> list[Any]:
    return [[*write_spec(column.spec), column.length, column.squeeze] for column in columns]


def read_columns(data: Any) -> tuple[Column, ...]:
    """Item columns as [path, dtype, shape, length, squeeze]."""
    if not (isinstance(data, list) and 0 < len(data) <= 1024):
        raise Refused("an item has 1 to 1024 columns")
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


def error_fields(error: Exception) -> dict[str, str]:
    """How an error travels; anything unforeseen travels as a refusal without its inside."""
    for kind in type(error).__mro__:
        if kind.__name__ in BY_NAME:
            return {"error": kind.__name__, "reason": str(error)}
    return {"error": "Refused", "reason": f"{type(error).__name__}: {error}"}


def error_from(name: Any, reason: str) -> ShoalError:
    """The error that travelled under a name."""
    return BY_NAME.get(name, ReplayError)(reason)


def raise_error(header: dict[str, Any]) -> None:
    """Raise the error that a reply carries."""
    name = header.get("error")
    if name is not None:
        raise error_from(name, header.get("reason", name))


def check_address(address: str) -> None:
    """Refuse what is no address; zmq takes a port above 65535 for another one."""
    if not address.startswith(("tcp://", "ipc://")):
        raise ConfigError(f"a replay address begins with tcp:// or ipc://, got {address!r}")
    port = address.rsplit(":", 1)[1]
    if address.startswith("tcp://") and port.isdecimal() and int(port) > MOST_PORT:
        raise ConfigError(f"{address}: a port is at most {MOST_PORT}")


def is_loopback(address: str) -> bool:
    """Whether an address stays on this machine."""
    if address.startswith(("ipc://", "inproc://")):
        return True
    host = address.removeprefix("tcp://").rsplit(":", 1)[0]
    return host in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


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
