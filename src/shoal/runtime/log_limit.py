"""A bound on the logs of roles: an environment that prints without end cannot fill the disk.

Roles append to their logs themselves, so that every line is there even after a kill -9. The supervisor looks at the sizes ten times
a second, and cuts a log that has become too long down to its last part, after a line that says how much was dropped.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["LogLimit", "cut_log"]

ALL_BYTES = 128 << 20    # of all logs of a run together
MOST_BYTES = 8 << 20     # of one of them
LEAST_BYTES = 64 << 10   # even where there are thousands
KEPT = 4                 # a log is cut to this part of what it may have


class LogLimit:
    """Keeps the logs of a run below a bound."""

    def __init__(self, folder: Path, logs: int) -> None:
        self._folder = folder
        self.most = max(LEAST_BYTES, min(MOST_BYTES, ALL_BYTES // max(1, logs)))
        self._dropped: dict[str, int] = {}

    def look(self) -> None:
        """Cut the logs that are too long."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(".log") and entry.stat().st_size > self.most:
                    before = self._dropped.get(entry.name, 0)
                    self._dropped[entry.name] = before + cut_log(Path(entry.path), self.most // KEPT, before)


def cut_log(path: Path, keep: int, before: int = 0) -> int:
    """Cut a log, to which others append meanwhile, down to its last `keep` bytes. A line says how much was dropped, with what was
    dropped `before`. Returns how many bytes were dropped now."""
    with open(path, "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - keep))
        tail = file.read(keep)
        _, _, whole = tail.partition(b"\n")  # from the beginning of a line, where there is one
        kept = whole or tail
        dropped = os.fstat(file.fileno()).st_size - len(kept)
        text = f"[shoal] {before + dropped:,} bytes of this log were dropped here: it had become too long\n".encode() + kept
        file.seek(0)
        file.write(text)
        os.ftruncate(file.fileno(), len(text))  # roles continue behind it: they append
    return dropped
