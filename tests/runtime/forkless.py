"""Imported by a fork server: its forks fail as often as the file says that the environment variable FORKLESS names."""

import errno
import os
from pathlib import Path

real = os.fork


def fork() -> int:
    path = Path(os.environ["FORKLESS"])
    left = int(path.read_text()) if path.exists() else 0
    if left > 0:
        path.write_text(str(left - 1))
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real()


if "FORKLESS" in os.environ:
    os.fork = fork
