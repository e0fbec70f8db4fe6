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
    """Memory for the items of a recording. A larger one is read again and again from disk, a part at a time."""
