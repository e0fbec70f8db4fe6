"""One driver for a run directory: `.lock` in it is locked (flock) while the run goes on, and by nobody once its driver is dead.

The lock belongs to the open file, so whoever inherited the descriptor would hold it beyond the driver's death: it is closed by exec
(as everything that Python opens) and in a child that is only forked. Where the file system knows no locks a run goes on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ConfigError

__all__ = ["NAME", "alone"]

NAME = ".lock"
_held: set[int] = set()


@contextlib.contextmanager
def alone(folder: Path, ending: str = "it writes a checkpoint and ends") -> Iterator[None]:
    """Hold a run directory; ConfigError where another driver does, with what becomes of it when it is stopped."""
    try:
        fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # what cannot be written is said by whoever writes there next
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
