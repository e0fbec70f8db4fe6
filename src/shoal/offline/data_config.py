"""How recordings are read in a run."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.options import Options, number

__all__ = ["DataConfig"]


@dataclass(frozen=True)
class DataConfig(Options):
    """How a recording is read that is learned from alone."""

    section = "data"

    memory_mb: float = number(1024.0, above=0)
    """Memory for the items of a recording, of all readers together. A larger one is read again and again from disk, a part at a
    time."""
    readers: int = number(1, at_least=1, at_most=64)
    """How many readers share the files of a recording. Each shuffles its own; every batch has something of all of them."""
