"""Replies of roles to commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["NotRunning", "OnReply", "after_all"]

OnReply = Callable[[Any, str | None], None]  # what to do with a result or an error


class NotRunning(str):
    """An error that says only that the instance is not running: it died, or is being restarted."""


def after_all(count: int, done: OnReply) -> OnReply:
    """A callback that calls `done` when it was called `count` times, with all errors; at once if `count` is 0."""
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
