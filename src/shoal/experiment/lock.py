"""One driver for a run directory: `.lock` in it is locked (flock) while the run lives, and by nobody once its driver is dead.

The lock belongs to the open file, so a process that inherited the descriptor would hold it beyond the driver's death: it is
closed by exec (as everything that Python opens) and in a child that is only forked. A child forked just before its driver was
killed holds the lock until it first runs: a lock whose driver is dead is waited for. Where the file system knows no locks a run
continues without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ConfigError

__all__ = ["NAME", "alone", "holder"]

NAME = ".lock"
FORKED_SECONDS = 10.0  # how long a forked child of a dead driver may take to run for the first time
_held: set[int] = set()


@contextlib.contextmanager
def alone(folder: Path, ending: str = "it writes a checkpoint and ends") -> Iterator[None]:
    """Hold a run directory; ConfigError where another driver does, with what becomes of it when it is stopped."""
    try:
        fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # the next write there reports it
        yield
        return
    try:
        _take(fd)
    except BlockingIOError:
        pid = _pid(fd)
        os.close(fd)
        raise ConfigError(f"{folder} is running (pid {pid}); wait, or stop it with `kill {pid}`: {ending}") from None
    except OSError:  # no locks here
        os.close(fd)
        yield
        return
    _held.add(fd)
    try:
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        _held.discard(fd)
        os.close(fd)


def holder(folder: Path) -> int | None:
    """The process that runs in a run directory, by the kernel's list of locks: taking the lock could keep a run from starting."""
    try:
        status = os.stat(folder / NAME)
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return None
    return next((int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == wanted), None)


def _take(fd: int) -> None:
    """Lock; BlockingIOError where a living driver holds it."""
    give_up = time.monotonic() + FORKED_SECONDS
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _pid(fd)
            if not pid.isdigit() or Path(f"/proc/{pid}").exists() or time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def _pid(fd: int) -> str:
    """Who wrote its number there; it may be about to."""
    try:
        return os.pread(fd, 32, 0).decode("ascii").strip() or "unknown"
    except (OSError, UnicodeDecodeError):
        return "unknown"


def _let_go() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
