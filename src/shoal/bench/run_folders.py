"""Temporary folders of benchmark runs, and what a failed run leaves behind.

Each folder is locked by the benchmark that made it, so the next benchmark can tell which ones a killed one left, and remove them.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.experiment.lock import NAME, alone

__all__ = ["folder_name", "keep_failed_run", "remove_stale_folders", "temporary_run_folder"]

PREFIX = "shoal-bench-"
YOUNG_SECONDS = 60.0  # a folder that was just made may not be locked yet


@contextlib.contextmanager
def temporary_run_folder() -> Iterator[Path]:
    """A folder for one run, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder, alone(Path(folder)):
        yield Path(folder)


def remove_stale_folders() -> None:
    """Remove the folders of benchmarks that were killed: nobody holds their locks. One that cannot be locked is in use."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{NAME}"):
        with contextlib.suppress(OSError), lock.open("rb+") as file:
            if time.time() - lock.stat().st_mtime > YOUNG_SECONDS:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)


def keep_failed_run(place: Path, done: subprocess.CompletedProcess[str], run: Path | None = None) -> None:
    """Copy what a failed run printed, and its run directory without the checkpoints, which are large."""
    shutil.rmtree(place, ignore_errors=True)
    if run is not None and run.is_dir():
        with contextlib.suppress(OSError):  # a process that dies late may still remove files there; the others are copied
            shutil.copytree(run, place, ignore=shutil.ignore_patterns("checkpoints", NAME))
    place.mkdir(parents=True, exist_ok=True)
    for name, text in (("stdout.txt", done.stdout), ("stderr.txt", done.stderr)):
        (place / name).write_text(text, encoding="utf-8")


def folder_name(key: str) -> str:
    """A job's key as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", key).strip("-")
