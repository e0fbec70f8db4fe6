"""Where each episode of a recording lies and how it went, without its observations and actions.

    recording.index()["return"] > 0.5     the episodes that succeeded; recording.episode(n) reads one of them
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.errors import ConfigError

__all__ = ["ENTRY", "episode_index"]

ENTRY = np.dtype([("file", "i8"), ("row", "i8"), ("length", "i8"), ("return", "f8"), ("terminated", "?")])
"""Which of the recording's files, the first decision in it, decisions, undiscounted return, whether it ended by itself."""


def episode_index(files: Sequence[Path]) -> np.ndarray:
    """An ENTRY for each episode of these files, in their order; three small arrays of each file are read."""
    rows = [np.zeros(0, ENTRY), *(_entries(path, number) for number, path in enumerate(files))]
    return np.concatenate(rows)


def _entries(path: Path, number: int) -> np.ndarray:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            length, reward, terminated = (file.get_tensor(name) for name in ("length", "reward", "terminated"))
        ends = np.cumsum(length)
        entries = np.zeros(len(length), ENTRY)
        entries["file"], entries["row"], entries["length"] = number, ends - length, length
        entries["terminated"] = terminated[ends - 1]
        entries["return"] = [np.sum(reward[end - size : end], dtype=np.float64) for size, end in zip(length, ends, strict=True)]
    except (OSError, SafetensorError, IndexError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; copy the recording again") from None
    return entries
