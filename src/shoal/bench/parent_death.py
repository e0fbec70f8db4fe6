"""Runs a command that ends when the process that started it does: `python parent_death.py PARENT COMMAND ...`.

The kernel is asked to send SIGTERM when the parent dies, even by SIGKILL, and then this process becomes the command: same pid, same
streams. It is a script, run without site-packages, which takes a fiftieth of a second, and not a function between fork and exec,
because a benchmark may have threads. What the command starts in turn is not covered.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["end_with_parent", "tied_to_parent"]

PR_SET_PDEATHSIG = 1


def tied_to_parent(words: Sequence[str]) -> list[str]:
    """The command that runs `words` as long as this process lives."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *words]


def end_with_parent(parent: int) -> None:
    """End this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was asked
        sys.exit(1)


def main(parent: str, *words: str) -> None:
    end_with_parent(int(parent))
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(*sys.argv[1:])
