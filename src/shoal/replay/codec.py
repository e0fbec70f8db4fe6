"""Compression of chunks and batches: none, lz4 or zstd, with differences along time for integers.

`choose` measures on the first rows of a column whether compression pays; it is never assumed.
"""

from __future__ import annotations

from typing import Any

import lz4.block
import numpy as np
import numpy.typing as npt
import zstandard

from shoal.replay.errors import Refused
from shoal.replay.kernels import compiled

__all__ = ["CODECS", "choose", "decode", "encode"]

CODECS = ("none", "lz4", "zstd", "lz4+delta", "zstd+delta")
PAYS_BELOW = 0.7
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
    body: Any = array
    if codec.endswith("+delta"):
        if not _may_delta(array.dtype):
            raise ValueError(f"delta needs integers, not {array.dtype}")
        lanes = _lanes(array)
        body = np.empty_like(lanes)
        _delta(lanes, body, max(1, lanes.size // max(1, array.shape[0])))
    raw: Any = np.ascontiguousarray(body).reshape(-1).view(np.uint8)
    raw = memoryview(raw)
    if codec.startswith("lz4"):
        return bytes(lz4.block.compress(raw, store_size=False))
    if codec.startswith("zstd"):
        return zstandard.ZstdCompressor(level=1).compress(raw)
    raise ValueError(f"unknown codec {codec!r}; choose from {CODECS}")


def decode(data: Any, codec: str, array: npt.NDArray[Any]) -> None:
    """Decompress into a contiguous array of the right shape; refuses data of any other size."""
    target = array.reshape(-1).view(np.uint8)
    try:
        if codec.startswith("lz4"):
            raw = lz4.block.decompress(data, uncompressed_size=target.nbytes)
        else:
            if zstandard.frame_content_size(data) != target.nbytes:
                raise Refused(f"compressed rows do not announce {target.nbytes} bytes")
            raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=target.nbytes)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError, ValueError, MemoryError) as error:
        raise Refused(f"compressed rows cannot be read: {error}") from error
    if len(raw) != target.nbytes:
        raise Refused(f"compressed rows have {len(raw)} bytes, expected {target.nbytes}")
    target[:] = np.frombuffer(raw, np.uint8)
    if codec.endswith("+delta"):
        lanes = _lanes(array)
        _undelta(lanes, max(1, lanes.size // max(1, array.shape[0])))


def choose(array: npt.NDArray[Any]) -> str:
    """The codec that pays for such rows on a fast network: lz4 with or without differences, or none."""
    if array.nbytes < WORTH_TRYING:
        return "none"
    candidates = ["lz4"] + (["lz4+delta"] if _may_delta(array.dtype) and array.shape[0] > 1 else [])
    sizes = {codec: len(encode(array, codec)) for codec in candidates}
    best = min(sizes, key=lambda codec: sizes[codec])
    return best if sizes[best] < PAYS_BELOW * array.nbytes else "none"
