"""What a client and a writer ask of a server, wherever it is: in this process, at an address, or in several shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.replay.table.chunks import ChunkGroup
from shoal.replay.table.columns import Column, Spec, Tree
from shoal.replay.table.sampled_batch import Batch, Buffers

__all__ = ["Backend", "ItemSink", "RowRecord"]

RowRecord = tuple[int, int, int, int]
"""(chunk, first row, rows, row step)"""


class ItemSink(Protocol):
    """Where a writer's chunks and items go."""

    def chunk_bytes(self) -> int: ...

    def open(self, specs: Sequence[Spec], rows: int) -> ChunkGroup: ...

    def close(self, group: ChunkGroup, filled: int) -> None: ...

    def insert(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: npt.NDArray[np.int32],
        priorities: npt.NDArray[np.float64], timeout: float | None,
    ) -> npt.NDArray[np.int64]: ...  # fmt: skip

    def insert_one(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: Sequence[RowRecord], priority: float,
        timeout: float | None,
    ) -> int | None: ...  # fmt: skip

    @property
    def lost(self) -> int:
        """Confirmed items that a server lost in a crash."""

    def flush(self, timeout: float | None) -> None: ...

    def finish(self, timeout: float | None) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """A way to one server, or to several."""

    def turn(self) -> int:
        """Which of several servers the next insert goes to."""

    def sink(self, turn: int | None = None, **options: Any) -> ItemSink: ...

    def sample(
        self, table: str, n: int, timeout: float | None, buffers: Buffers, counted: bool, transform: Tree | None
    ) -> Batch: ...

    def consume(self, table: str, keys: npt.NDArray[np.int64], consumed: bool) -> None: ...

    def update(self, table: str, keys: npt.NDArray[np.int64], priorities: Any, timeout: float | None) -> int: ...

    def delete(self, table: str, keys: npt.NDArray[np.int64], timeout: float | None) -> int: ...

    def reset(self, table: str, timeout: float | None) -> None: ...

    def trim(self, table: str, timeout: float | None) -> int: ...

    def info(self, timeout: float | None) -> dict[str, Any]: ...

    def checkpoint(self, timeout: float | None) -> str: ...

    def sampled_once(self, table: str) -> bool: ...

    def close(self) -> None: ...
