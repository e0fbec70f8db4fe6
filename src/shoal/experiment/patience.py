"""A limit on what the user's own code may take in the driver, where no supervisor notices a hang."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from shoal.errors import ConfigError

__all__ = ["patience"]

LONGEST_SECONDS = 1e8
"""Of a timer; more is for ever."""


@contextlib.contextmanager
def patience(seconds: float, name: str) -> Iterator[None]:
    """Limit the time of creating and resetting an environment."""
    if threading.current_thread() is not threading.main_thread() or seconds > LONGEST_SECONDS:
        yield
        return

    class TooLong(BaseException):
        """A BaseException, so that code which catches the environment's own exceptions lets it through."""

    def too_long(number: int, frame: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except TooLong:
        raise ConfigError(f"{name}: creating and resetting it took longer than {seconds:g} s; allow more with "
                          "--faults.start-seconds, or find out where it hangs") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
