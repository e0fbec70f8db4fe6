"""Messages: a msgpack header and raw buffers, never pickle. Everything that is read is checked.

A request is [header, buffer...] with header {"op", "id", ...}; its reply carries the same id and either fields or
{"error", "reason"}. Sizes are limited before anything is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import zmq

from shoal.errors import ConfigError, ShoalError
from shoal.replay.errors import BY_NAME, Refused, ReplayError

__all__ = ["check_address", "field", "is_loopback", "pack", "raise_error", "read_array", "unpack"]

VERSION = 1
MOST_HEADER_BYTES = 1 << 22
MOST_MESSAGE_BYTES = 1 << 30
MOST_FRAMES = 1 << 16
MOST_GIVEN_UP = 1000  # ranges of items that a writer tells the server of
MOST_PORT = 65535
MOST_REASON = 1000  # characters of an error: it may quote what a client has sent


def pack(header: dict[str, Any], buffers: Sequence[Any] = ()) -> list[Any]:
    return [msgpack.packb(header), *buffers]


def unpack(frames: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The header and buffers of a message; refuses what is not one."""
    if not 1 <= len(frames) <= MOST_FRAMES:
        raise Refused(f"a message has 1 to {MOST_FRAMES} frames, got {len(frames)}")
    nbytes = sum(len(frame) for frame in frames)
    if nbytes > MOST_MESSAGE_BYTES:
        raise Refused(f"a message has at most {MOST_MESSAGE_BYTES} bytes, got {nbytes}")
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
    """A field of a header; refuses one that is missing, of another kind or out of bounds."""
    value = header.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise Refused(f"field {name!r} is missing or not of the expected type")
    if (low is not None and value < low) or (high is not None and value > high):
        raise Refused(f"field {name!r} is outside {low}..{high}")
    return value


def seconds(header: dict[str, Any], name: str = "timeout") -> float | None:
    """A timeout; None means for ever."""
    value = header.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise Refused(f"field {name!r} must be null or a number of seconds >= 0")
    return float(value)


def read_array(buffer: Any, dtype: Any, count: int) -> npt.NDArray[Any]:
    """A buffer as an array; refuses one that does not hold exactly `count` values."""
    kind = np.dtype(dtype)
    if len(buffer) != count * kind.itemsize:
        raise Refused(f"a buffer has {len(buffer)} bytes, expected {count} of {kind}")
    return np.frombuffer(buffer, kind)


def read_given_up(header: dict[str, Any]) -> list[tuple[int, int]]:
    """The items that a writer has given up, as pairs of first and last numbers; none where the field is missing."""
    found = header.get("given_up", [])
    if not (isinstance(found, list) and len(found) <= MOST_GIVEN_UP):
        raise Refused(f"field 'given_up' must be a list of at most {MOST_GIVEN_UP} pairs")
    for pair in found:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and 0 <= n <= 1 << 62 for n in pair)):
            raise Refused("field 'given_up' must be a list of pairs of numbers")
    return [(first, last) for first, last in found]


def confirmed_items(after: int, last: int, given_up: Sequence[tuple[int, int]]) -> int:
    """How many items have a number above `after` and up to `last`, without those that a writer has given up."""
    missing = sum(max(0, min(end, last) - max(first - 1, after)) for first, end in given_up)
    return max(0, last - after - missing)


def error_fields(error: Exception) -> dict[str, str]:
    """An error as fields of a reply; one that clients do not know becomes a Refused."""
    for kind in type(error).__mro__:
        if kind.__name__ in BY_NAME:
            return {"error": kind.__name__, "reason": str(error)[:MOST_REASON]}
    return {"error": "Refused", "reason": f"{type(error).__name__}: {error}"[:MOST_REASON]}


def error_from(name: Any, reason: str) -> ShoalError:
    """The error that travelled under a name."""
    return BY_NAME.get(name, ReplayError)(reason)


def raise_error(header: dict[str, Any]) -> None:
    """Raise the error that a reply carries."""
    name = header.get("error")
    if name is not None:
        raise error_from(name, header.get("reason", name))


def check_address(address: str) -> None:
    """Refuse what is not an address. zmq would wrap a port above 65535 to another one."""
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
