"""Folders of benchmark runs: each is locked by the benchmark it belongs to, so that what a killed one has left behind is known and
removed by the next. What a failed run has written is kept beside the results."""

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

__all__ = ["keep", "name_of", "scratch", "sweep"]

PREFIX = "shoal-bench-"
YOUNG_SECONDS = 60.0  # a folder that is just being made is not locked yet


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one run, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder, alone(Path(folder)):
        yield Path(folder)


def sweep() -> None:
    """Remove the folders of benchmarks that were killed: their locks went with them. One that cannot be locked is somebody's."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{NAME}"):
        with contextlib.suppress(OSError), lock.open("rb+") as file:
            if time.time() - lock.stat().st_mtime > YOUNG_SECONDS:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)


def keep(place: Path, done: subprocess.CompletedProcess[str], run: Path | None = None) -> None:
    """What a failed run printed, and its run directory without the checkpoints, which are large."""
    shutil.rmtree(place, ignore_errors=True)
    if run is not None and run.is_dir():
        with contextlib.suppress(OSError):  # somebody who dies late may still remove files there; the others are copied
            shutil.copytree(run, place, ignore=shutil.ignore_patterns("checkpoints", NAME))
    place.mkdir(parents=True, exist_ok=True)
    for name, text in (("stdout.txt", done.stdout), ("stderr.txt", done.stderr)):
        (place / name).write_text(text, encoding="utf-8")


def name_of(key: str) -> str:
    """A job's key as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", key).strip("-")
