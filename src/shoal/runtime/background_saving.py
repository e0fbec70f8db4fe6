"""Writes a large state to disk in a thread of its own, while its role continues."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core import Pieces

if TYPE_CHECKING:
    from shoal.runtime.program import Store

__all__ = ["Saving", "in_pieces", "let_go"]


def in_pieces(state: Mapping[str, Any]) -> bool:
    """Whether some of a state is not copied, but written as it lies in memory."""
    return any(isinstance(value, Pieces) for value in state.values())


def let_go(state: Mapping[str, Any]) -> None:
    """Tell the role that its pieces are written: it may use their memory for something else."""
    for value in state.values():
        if isinstance(value, Pieces):
            value.release()


class Saving:
    """One state on its way to disk. The role's own thread begins it and ends it."""

    def __init__(self, store: Store, path: Path, state: Mapping[str, Any]) -> None:
        self._store, self._path, self._state = store, path, state
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name=f"saving {path.name}", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> str:
        """Wait until it is written; the file's name. What went wrong is raised here, where the role is."""
        self._thread.join()
        let_go(self._state)
        if self._failure is not None:
            raise self._failure
        return self._path.name

    def _write(self) -> None:
        try:
            self._store.save(self._path, self._state)
        except BaseException as failure:
            self._failure = failure
