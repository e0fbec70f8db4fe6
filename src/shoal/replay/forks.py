"""What does not survive a fork: sockets, threads and the numbers of items are the parent's, so the child must make its own.

The child's copies are marked when it begins; calls need not ask in which process they are.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["end_at_fork"]

INHERITED = "this {} belongs to the process that made it: make another one after the fork"


class Ends(Protocol):
    """A thing that is of no use after a fork."""

    def inherited(self, reason: str) -> None:
        """This process is a child of the one that made it; it must not touch what the two share."""


_made: weakref.WeakSet[Ends] = weakref.WeakSet()


def end_at_fork(thing: Ends) -> None:
    _made.add(thing)


def _begin_child() -> None:
    for thing in list(_made):
        thing.inherited(INHERITED.format(type(thing).__name__.lower()))


os.register_at_fork(after_in_child=_begin_child)
