"""Ends what a cluster of our own would leave behind when its driver dies without a word (kill -9, a second Ctrl-C).

Ray's servers die with the driver, but what these have started notices it up to a minute later. So a small process, this file alone,
waits for the end of a pipe that only the driver holds. Then it kills whatever carries the cluster's mark in its environment,
and removes the folders that it was told of.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Guard", "marked"]

NAME = "SHOAL_CLUSTER"
KILL_SECONDS = 10.0
LOOK_SECONDS = 0.1
LOOKS = 4  # in a row that find nobody: one that is just being started has no environment yet


class Guard:
    """The driver's end. Made before the cluster, closed after it."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        read, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(read), f"{NAME}={self._mark}"], pass_fds=[read], cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(read)

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """What is started meanwhile, and whatever that starts, belongs to the cluster."""
        os.environ[NAME] = self._mark
        try:
            yield
        finally:
            del os.environ[NAME]

    def remember(self, folder: Path) -> None:
        """A folder that is to go with the cluster."""
        with contextlib.suppress(OSError):  # somebody killed the guard: then Ray's own minute has to do
            os.write(self._pipe, f"{folder}\n".encode())

    def close(self) -> None:
        """The cluster is stopped; whatever of it is still there is not to stay."""
        os.close(self._pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * KILL_SECONDS)


def watch(pipe: int, mark: bytes) -> None:
    told = b""
    while part := os.read(pipe, 1 << 16):
        told += part
    deadline, quiet = time.monotonic() + KILL_SECONDS, 0
    while quiet < LOOKS and time.monotonic() < deadline:
        left = marked(mark)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if left else quiet + 1
        time.sleep(LOOK_SECONDS)
    for folder in told.decode().splitlines():
        shutil.rmtree(folder, ignore_errors=True)


def marked(mark: bytes) -> list[int]:
    """The processes that were started under a mark."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):  # another user's, or just gone
            if name.isdigit() and mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2].encode())
