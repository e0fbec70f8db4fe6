"""Compression of chunks and batches: none, lz4 or zstd, with differences along time for integers, or every row by itself.

`choose_codec` measures on the first rows of a column whether compression pays; it is never assumed. Rows by themselves are for
items that are drawn one by one: their neighbours stay compressed. They lie one behind the other, after the place where each begins.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import lz4.block
import numpy as np
import numpy.typing as npt
import zstandard

from shoal.replay.errors import Refused
from shoal.replay.table.kernels import compiled

__all__ = ["CODECS", "ROWS", "check_encoded", "choose_codec", "decode", "decode_row", "decode_rows", "encode"]

ROWS = "+rows"
CODECS = ("none", "lz4", "zstd", "lz4+delta", "zstd+delta", "lz4+rows", "zstd+rows")
PLACE = struct.Struct("<2Q")  # where a row begins, and where the next one does
PAYS_BELOW = 0.7
LZ4_RATIO = 256
"""lz4 cannot make rows smaller than by this factor, apart from a few bytes."""
WORTH_TRYING = 4096


@compiled
def _delta(source: Any, target: Any, cell: int) -> None:
    for i in range(min(cell, source.shape[0])):
        target[i] = source[i]
    for i in range(cell, source.shape[0]):
        target[i] = source[i] - source[i - cell]


@compiled
def _undelta(data: Any, cell: int) -> None:
    for i in range(cell, data.shape[0]):
        data[i] += data[i - cell]


def _lanes(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The rows as unsigned integers of their own width, whose differences wrap around without loss."""
    return array.reshape(-1).view(np.dtype(f"u{array.dtype.itemsize}"))


def _may_delta(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iu" or dtype.kind == "b"


def encode(array: npt.NDArray[Any], codec: str) -> bytes:
    """The rows of an array (time first, contiguous) as compressed bytes."""
    if codec not in CODECS or codec == "none":
        raise ValueError(f"unknown codec {codec!r}; choose from {CODECS}")
    if codec.endswith(ROWS):
        rows = [_squeeze(array[at : at + 1], codec) for at in range(len(array))]
        begins = np.cumsum([PLACE.size // 2 * (len(rows) + 1), *map(len, rows)], dtype="<u8")
        return b"".join([begins.tobytes(), *rows])
    body: Any = array
    if codec.endswith("+delta"):
        if not _may_delta(array.dtype):
            raise ValueError(f"delta needs integers, not {array.dtype}")
        lanes = _lanes(array)
        body = np.empty_like(lanes)
        _delta(lanes, body, max(1, lanes.size // max(1, array.shape[0])))
    return _squeeze(body, codec)


def _squeeze(array: npt.NDArray[Any], codec: str) -> bytes:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    if codec.startswith("lz4"):
        return bytes(lz4.block.compress(raw, store_size=False))
    return zstandard.ZstdCompressor(level=1).compress(raw)


def check_encoded(data: Any, codec: str, rows: int, row_bytes: int) -> None:
    """Refuse data that cannot be these rows, before memory is taken for them."""
    nbytes = rows * row_bytes
    if codec == "none":
        fits = len(data) == nbytes
    elif codec.endswith(ROWS):
        fits = len(data) >= PLACE.size // 2 * (rows + 1) and (codec.startswith("zstd") or nbytes <= LZ4_RATIO * len(data))
    elif codec.startswith("lz4"):
        fits = nbytes <= LZ4_RATIO * (len(data) + WORTH_TRYING)
    else:
        fits = _announced(data) == nbytes
    if not fits:
        raise Refused(f"{len(data)} bytes of codec {codec!r} are not {rows} rows of {row_bytes} bytes")


def _announced(data: Any) -> int:
    """The bytes that zstd data say they hold."""
    try:
        return int(zstandard.frame_content_size(data))
    except zstandard.ZstdError as error:
        raise Refused(f"compressed rows cannot be read: {error}") from error


def decode(data: Any, codec: str, array: npt.NDArray[Any]) -> None:
    """Decompress into a contiguous array of the right shape; refuses data of any other size."""
    if codec.endswith(ROWS):
        for at in range(len(array)):
            target = array[at : at + 1].reshape(-1).view(np.uint8)
            target[:] = np.frombuffer(decode_row(data, codec, at, target.nbytes), np.uint8)
        return
    target = array.reshape(-1).view(np.uint8)
    target[:] = np.frombuffer(_unsqueeze(data, codec, target.nbytes), np.uint8)
    if codec.endswith("+delta"):
        lanes = _lanes(array)
        _undelta(lanes, max(1, lanes.size // max(1, array.shape[0])))


def decode_row(data: Any, codec: str, at: int, nbytes: int) -> bytes:
    """One row of `nbytes` bytes from rows that were compressed one by one."""
    return next(decode_rows(data, codec, (at,), nbytes))


def decode_rows(data: Any, codec: str, rows: Iterable[int], nbytes: int) -> Iterator[bytes]:
    """Some of them."""
    whole = memoryview(data).cast("B")
    for at in rows:
        begin, end = PLACE.unpack_from(whole, PLACE.size // 2 * at) if len(whole) >= PLACE.size // 2 * (at + 2) else (0, 0)
        if not 0 < begin <= end <= len(whole):
            raise Refused(f"compressed rows have no row {at}")
        yield _unsqueeze(whole[begin:end], codec, nbytes)


def _unsqueeze(data: Any, codec: str, nbytes: int) -> bytes:
    try:
        if codec.startswith("lz4"):
            raw: bytes = lz4.block.decompress(data, uncompressed_size=nbytes)
        else:
            if _announced(data) != nbytes:
                raise Refused(f"compressed rows do not announce {nbytes} bytes")
            raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError, ValueError, MemoryError) as error:
        raise Refused(f"compressed rows cannot be read: {error}") from error
    if len(raw) != nbytes:
        raise Refused(f"compressed rows have {len(raw)} bytes, expected {nbytes}")
    return raw


def choose_codec(array: npt.NDArray[Any]) -> str:
    """The codec that pays for such rows on a fast network: lz4 with or without differences, or none."""
    if array.nbytes < WORTH_TRYING:
        return "none"
    candidates = ["lz4"] + (["lz4+delta"] if _may_delta(array.dtype) and array.shape[0] > 1 else [])
    sizes = {codec: len(encode(array, codec)) for codec in candidates}
    best = min(sizes, key=lambda codec: sizes[codec])
    return best if sizes[best] < PAYS_BELOW * array.nbytes else "none"
