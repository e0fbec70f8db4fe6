"""Clients, writers and datasets end in the child of a fork: their sockets, threads and item numbers belong to the parent.

The child marks its copies when it begins, so calls need not check in which process they are.
"""

from __future__ import annotations

import os
import weakref

from shoal.replay.closing import Closing
from shoal.replay.errors import Closed

__all__ = ["EndsAtFork"]


class EndsAtFork(Closing):
    """Of use until it is closed, and only in the process that made it."""

    def __init__(self) -> None:
        self._closed, self._why = False, f"this {type(self).__name__.lower()} was closed"
        _made.add(self)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(self._why)

    def end_in_child(self) -> None:
        """This process is a child of the one that made it. It must not touch what the two share; the parent continues with it."""
        self._closed = True
        self._why = f"this {type(self).__name__.lower()} belongs to the process that made it: make another one after the fork"


_made: weakref.WeakSet[EndsAtFork] = weakref.WeakSet()


def _begin_child() -> None:
    for thing in list(_made):
        thing.end_in_child()


os.register_at_fork(after_in_child=_begin_child)
