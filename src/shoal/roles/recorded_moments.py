"""Sums of a recording's observations on their way from its readers to a learner: each observation counts once, whatever dies.

    reader    WindowSums      keeps the sums of every window of the first epoch, in its checkpoints too
              ── windows that the learner has not counted, each in one batch ──▶
    learner   CountedWindows  ◀── how many windows of each reader it has counted: with every question, and in its checkpoints

A learner that begins again, from whatever checkpoint, opens a new session with its questions: the reader then sends what that
learner has not counted. A reader that begins again may send what its predecessor had sent already; the learner leaves that out and
opens a new session too. Of several learners the first one is sent the sums, and all count them when they share their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.algorithms.records.moments import MOMENTS, MomentRelay, observation_moment_fields
from shoal.core import Tree
from shoal.slots import Field, Layout

__all__ = ["COLUMNS", "UNKNOWN", "CountedWindows", "WindowSums", "next_window", "question_fields", "reply_fields"]

COLUMNS = 3  # what a learner knows of a reader: windows that it has counted, windows in all, items in them
UNKNOWN = -1  # windows that a learner has counted whose checkpoint does not say it
LIFE_SHIFT = 32  # numbers of the sessions of one life of a learner
PARTS = ("count", "shift", "sum", "square")


def question_fields() -> dict[str, Field]:
    """Of a learner's question: its session, what it has counted of this reader."""
    return {"counted": Field((1 + COLUMNS,), "i8")}


def reply_fields() -> dict[str, Field]:
    """Of the answer: the session, the first window whose sums are in it; the window after the last one, windows in all, items."""
    return {"counted": Field((2 + COLUMNS,), "i8")}


def next_window(known: Sequence[int], windows: int, items: int) -> int:
    """The window that a learner is to count next, by what it knows of a reader, whose recording has `items` in `windows`."""
    counted, in_all, of_items = known
    if of_items != items or (in_all != windows and counted != in_all):
        return 0  # it has counted another recording, or a part of this one in other windows
    return counted if in_all == windows else windows


class WindowSums:
    """A reader's side: the sums of each window of its first epoch, for learners that have not counted them."""

    def __init__(self, size: int, windows: int, items: int) -> None:
        self.size, self._all, self._items = size, windows, items
        self._sums: list[Tree] = []
        self._session = self._told = 0

    def __len__(self) -> int:
        """Windows whose sums are known."""
        return len(self._sums)

    def add(self, moments: MomentRelay) -> None:
        """The sums of the next window."""
        message = Layout(observation_moment_fields(self.size)).empty()
        moments.take(message)
        self._sums.append(message)

    def heed(self, question: Tree) -> None:
        """Continue with what this learner has not counted, if it has begun a new session. Call before windows are added."""
        if not self.size or question["counted"][0] <= self._session:
            return
        self._session, *known = question["counted"].tolist()
        self._told = len(self._sums) if known[0] == UNKNOWN else next_window(known, self._all, self._items)

    def answer(self, question: Tree, answer: Tree) -> None:
        """Put what was not sent into the answer, unless it is for an earlier session or another learner."""
        if not self.size:
            return
        relay, session = MomentRelay(self.size), int(question["counted"][0])
        first = self._told
        if session and session == self._session:
            for message in self._sums[first:]:
                relay.add(message)
            self._told = max(first, len(self._sums))
        relay.take(answer)
        answer["counted"][:] = session, first, self._told, self._all, self._items

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray]:
        rows = [np.concatenate([message[MOMENTS][part][0] for part in PARTS]) for message in self._sums]
        return {"sums": np.array(rows).reshape(len(rows), 1 + 3 * self.size)} if self.size else {}

    def load(self, sums: np.ndarray) -> None:
        self._sums = []
        for row in sums:
            message = Layout(observation_moment_fields(self.size)).empty()
            for part, numbers in zip(PARTS, np.split(row, [1, 1 + self.size, 1 + 2 * self.size]), strict=True):
                message[MOMENTS][part][0] = numbers
            self._sums.append(message)


class CountedWindows:
    """The learner's side: how many windows of each reader have come, of which the sums of no other batch may be counted."""

    def __init__(self, readers: int, first: bool, life: int) -> None:
        """`first`: whether it is the learner that the sums are sent to."""
        self._received, self._first = np.zeros((readers, COLUMNS), np.int64), first
        self._session = life << LIFE_SHIFT if first else 0

    def begin(self, counted: np.ndarray) -> None:
        """Ask for all that is not in `counted`; what is on its way does not count any more."""
        self._received[:] = counted
        self._session += self._first

    def ask(self, question: Tree, reader: int) -> None:
        question["counted"][:] = self._session, *self._received[reader]

    def receive(self, replies: Sequence[Tree], moments: Tree) -> None:
        """Take in what a batch tells, and leave out sums that do not follow on what came before."""
        again = False
        for reader, reply in enumerate(replies):
            session, first, *row = reply["counted"].tolist()
            known = self._received[reader].tolist()
            if self._first and session == self._session and (known[0] == UNKNOWN or first == next_window(known, *row[1:])):
                self._received[reader] = row
                continue
            again |= self._first and session == self._session
            for part in moments.values():
                part[reader] = 0
        if again:
            self.begin(self._received.copy())

    def news(self, counted: np.ndarray) -> np.ndarray:
        """What is to be added to `counted` when the sums of the batches that were taken are."""
        news: np.ndarray = (self._received - counted) * self._first
        return news
