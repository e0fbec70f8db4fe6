"""Whether the cluster is alive. Ray itself would wait for a minute, and then end the process that asked.

A head that refuses connections is dead, and is given a few seconds to start again. One that cannot be reached (a link is down, a
host is rebooting) is given most of that minute: the link may come back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["ClusterWatch", "check_reachable"]

T = TypeVar("T")

LOOK_SECONDS = 1.0
MISSES = 4             # refusals in a row after which the cluster counts as gone
LOST_SECONDS = 40.0    # without reaching it, after which it counts as gone; Ray ends the driver after 60
CONNECT_SECONDS = 5.0
ASK_SECONDS = 0.1      # between two looks at whether an answer can still come


class ClusterWatch:
    """Looks at the head of the cluster from a thread of its own, as long as a run lasts."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.gone = False  # for good
        self.why = ""      # it is gone
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="cluster watch", daemon=True).start()

    def _watch(self) -> None:
        refusals, reached = 0, time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            try:
                check_reachable(self.address)
                refusals, reached = 0, time.monotonic()
            except ConnectionRefusedError:
                refusals += 1
            except OSError:  # a timeout, no route
                refusals = 0
            if refusals >= MISSES:
                self.why = "nothing listens at that address"
            elif time.monotonic() - reached > LOST_SECONDS:
                self.why = f"it could not be reached for {LOST_SECONDS:g} s"
            if self.why:
                self.gone = True
                return

    def reachable(self) -> bool:
        """Whether the head accepts connections at this moment."""
        try:
            check_reachable(self.address)
        except OSError:
            return False
        return True

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Ask a cluster that may die meanwhile; gives `otherwise` if it does, where Ray would hang for a minute."""
        if self.gone:
            return otherwise
        answers: list[T] = []
        done = threading.Event()

        def asked() -> None:
            with contextlib.suppress(Exception):  # a question that fails must not end the run
                answers.append(question())
            done.set()

        threading.Thread(target=asked, name="asks Ray", daemon=True).start()
        while not done.wait(ASK_SECONDS):
            if self.gone:
                return otherwise
        return answers[0] if answers else otherwise

    def close(self) -> None:
        self._over.set()


def check_reachable(address: str) -> None:
    """Raise OSError at once if nothing listens at an address; Ray itself would try for minutes."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
