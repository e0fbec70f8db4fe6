"""What comes back of a command to a role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Done", "Gone", "after"]

Done = Callable[[Any, str | None], None]  # what to do with a result or an error


class Gone(str):
    """An error that says only that the instance is not there: it died, or is being restarted."""


def after(count: int, done: Done) -> Done:
    """Calls `done` when it has been called `count` times, with the errors joined; at once if there is nothing to wait for."""
    errors: list[str] = []
    left = count

    def one(result: Any, error: str | None) -> None:
        nonlocal left
        left -= 1
        if error:
            errors.append(error)
        if left == 0:
            done(result, "; ".join(errors) or None)

    if count == 0:
        done(None, None)
    return one
