"""Whether the cluster lives. Where it does not, Ray waits for a minute, and then ends whoever asked."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Pulse", "knock"]

T = TypeVar("T")

LOOK_SECONDS = 1.0
MISSES = 4             # looks in a row at which nobody listened: a head that comes back sooner is not missed
CONNECT_SECONDS = 5.0
ASK_SECONDS = 0.1      # between two looks at whether an answer can still come


class Pulse:
    """Looks at the cluster's head from a thread of its own, as long as a run lasts."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.gone = False  # for good
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    def _watch(self) -> None:
        misses = 0
        while not self._over.wait(LOOK_SECONDS):
            misses = 0 if self.beats() else misses + 1
            if misses >= MISSES:
                self.gone = True
                return

    def beats(self) -> bool:
        """Whether somebody listens there at this moment. One that is so busy that it does not come to take a connection lives."""
        try:
            knock(self.address)
        except TimeoutError:
            return True
        except OSError:
            return False
        return True

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        """The answer of a cluster that may die under the question: Ray would not come back for a minute."""
        if self.gone:
            return otherwise
        answers: list[T] = []
        done = threading.Event()

        def asked() -> None:
            with contextlib.suppress(Exception):  # what cannot be answered now is not worth the run
                answers.append(question())
            done.set()

        threading.Thread(target=asked, name="asks Ray", daemon=True).start()
        while not done.wait(ASK_SECONDS):
            if self.gone:
                return otherwise
        return answers[0] if answers else otherwise

    def close(self) -> None:
        self._over.set()


def knock(address: str) -> None:
    """Raise at once where nobody listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
