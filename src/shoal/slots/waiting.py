"""What a suspended role waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

__all__ = ["Wait", "any_of"]


class Wait:
    """A runtime resumes the role that awaits this when `ready()` is true or the deadline has passed.

    `ready` is cheap, is called often, and may update the state of its wire; `fds` become readable when it is worth calling
    again. `await wait` gives True, or False after the deadline. It may be awaited again.
    """

    __slots__ = ("deadline", "fds", "ready", "why", "wire")

    def __init__(self, ready: Callable[[], bool], wire: str, why: str, fds: Sequence[int] = (),
                 deadline: float | None = None) -> None:
        self.ready, self.wire, self.why, self.fds, self.deadline = ready, wire, why, fds, deadline

    def __await__(self) -> Generator[Wait, None, bool]:
        while not self.ready():
            if self.deadline is not None and time.monotonic() >= self.deadline:
                return False
            yield self
        return True


def any_of(*waits: Wait, timeout: float | None = None) -> Wait:
    """Wait until one of several is ready, or for `timeout` seconds; gives True or, after the deadline, False."""
    deadlines = [w.deadline for w in waits if w.deadline is not None]
    if timeout is not None:
        deadlines.append(time.monotonic() + timeout)
    return Wait(lambda: any(w.ready() for w in waits), waits[0].wire if waits else "clock",
                " or ".join(w.why for w in waits) or "the clock", [fd for w in waits for fd in w.fds],
                min(deadlines) if deadlines else None)
