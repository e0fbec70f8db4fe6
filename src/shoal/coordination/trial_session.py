"""The session of a short run that is only looked at: nothing is saved, nothing is written."""

from __future__ import annotations

from pathlib import Path

from shoal.runtime import Supervisor

__all__ = ["TrialSession"]


class TrialSession:
    """Subclasses say in `tick` what they look at, and when the run stops."""

    def begin(self, control: Supervisor) -> None:
        return

    def save_soon(self) -> bool:
        return False

    def saved(self, folder: Path, ok: bool) -> None:
        return

    def newest(self, instance: str | None = None) -> Path | None:
        return None

    def end(self, control: Supervisor, reason: str, error: str | None) -> None:
        return
