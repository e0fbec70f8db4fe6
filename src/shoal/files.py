"""Files that are whole after a crash: the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["check_room", "replacing", "sync"]


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the path that this gives: the file takes the place of `path` at the end, or never if writing fails."""
    draft = path.with_name(f".{path.name}.new")
    try:
        yield draft
        sync(draft)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def check_room(folder: Path, nbytes: int) -> None:
    """Raise an OSError if the disk has no room for a file of this size; for libraries that do not survive a full disk."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, max(1, nbytes))
