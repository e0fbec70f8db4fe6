"""A command that ends with whoever starts it, also where that is killed: `python bound.py PARENT COMMAND ...`.

The kernel is asked to send SIGTERM when the parent dies, and then this process becomes the command: same pid, same streams. It is
run as a script without site-packages, which takes a fiftieth of a second, and not as a function between fork and exec: a benchmark
may have threads. What the command starts in turn has to look after itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["bound", "end_with"]

PR_SET_PDEATHSIG = 1


def bound(words: Sequence[str]) -> list[str]:
    """The command that runs `words` as long as this process lives."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *words]


def end_with(parent: int) -> None:
    """Let this process end when its parent does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before the kernel was asked
        sys.exit(1)


def main(parent: str, *words: str) -> None:
    end_with(int(parent))
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(*sys.argv[1:])
