"""A run's mailbox: a folder in its directory where commands are put, and where their answers are found. No port is open.

    shoal set RUN ...   post(run, {...})     a file appears whole, by a rename
    the run             take(run)            all letters, oldest first; each is answered once
    shoal set RUN ...   the answer           a file beside it, by a rename, which the sender removes

Letters that wait when a run begins are of a run that has ended before it read them: they are thrown away.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Letter", "Mailbox"]

FOLDER = "mailbox"
LETTER, ANSWER = ".letter", ".answer"
PART = "."  # before the name of a file that is being written
MOST_BYTES = 1 << 20


class Letter(NamedTuple):
    """A command for a run."""

    name: str
    content: dict[str, Any]


class Mailbox:
    """The mailbox of one run directory."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER

    # ------------------------------------------------------------------ the sender
    def post(self, content: Mapping[str, Any]) -> str:
        """Put a letter in; returns its name."""
        self.folder.mkdir(exist_ok=True)
        name = f"{time.time_ns():020d}-{os.getpid()}"
        self._put(name + LETTER, content)
        return name

    def answer(self, name: str) -> dict[str, Any] | None:
        """The answer to a letter, taken out; None while there is none."""
        path = self.folder / (name + ANSWER)
        found = _read(path)
        if found is not None:
            path.unlink(missing_ok=True)
        return found

    def withdraw(self, name: str) -> bool:
        """Take a letter back; False if it was read already."""
        try:
            (self.folder / (name + LETTER)).unlink()
        except FileNotFoundError:
            return False
        return True

    # ------------------------------------------------------------------ the run
    def take(self) -> list[Letter]:
        """All letters, oldest first; one that cannot be read is thrown away, and what cannot be thrown away is passed over."""
        try:
            names = sorted(entry for entry in os.listdir(self.folder) if entry.endswith(LETTER) and not entry.startswith(PART))
        except OSError:  # there is none
            return []
        letters = []
        for name in names:
            content = _read(self.folder / name)
            with contextlib.suppress(OSError):  # withdrawn just now, or a folder
                (self.folder / name).unlink()
                if content is not None:
                    letters.append(Letter(name.removesuffix(LETTER), content))
        return letters

    def reply(self, name: str, *, error: str = "", text: str = "") -> None:
        with contextlib.suppress(OSError):  # the command itself was carried out
            self._put(name + ANSWER, {"error": error, "text": text})

    def clear(self) -> None:
        """Throw away what was meant for an earlier part of the run."""
        for entry in self.folder.iterdir() if self.folder.is_dir() else ():
            with contextlib.suppress(OSError):
                entry.unlink()

    def _put(self, name: str, content: Mapping[str, Any]) -> None:
        part = self.folder / f"{PART}{name}"
        part.write_text(json.dumps(content), encoding="utf-8")
        os.replace(part, self.folder / name)


def _read(path: Path) -> dict[str, Any] | None:
    """Only of a plain file: a pipe has no end, and a link may lead to one."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
