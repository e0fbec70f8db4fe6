"""The evaluation at the end of a run: of the last version, so that the policy handed back is the best of all.

    the run stops      actors pause, every role is saved: from here on nothing can be lost
    then               everyone but the evaluator pauses, it plays for about a tenth of the run's env steps
    at its end         its file takes the place of the one that was saved before

The bound is in env steps, not in seconds, so that an inline run is the same every time. Ctrl-C ends it at once; the episodes that
have ended count.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.runtime import Supervisor

__all__ = ["LastEvaluation"]

EVALUATOR = "evaluator"
SHARE = 10               # the last evaluation takes a tenth of the run's env steps
LOOK_SECONDS = 0.1       # between two looks at Ctrl-C
CUT_SECONDS = 5.0        # that an evaluator may take to end the step of its environments after Ctrl-C
SAVE_SECONDS = 30.0


class LastEvaluation:
    """One last evaluation, from the command to the evaluator until it is saved."""

    def __init__(self, control: Supervisor, interrupted: Callable[[], bool], show: Callable[[], None]) -> None:
        """`show` is called about ten times a second while it is played."""
        self._control, self._interrupted, self._show = control, interrupted, show
        self._instance = f"{EVALUATOR}-0"
        self._failure: str | None = None
        self._begun = False

    @property
    def possible(self) -> bool:
        return self._instance in self._control.running

    def play(self, env_steps: int) -> str | None:
        """Evaluate the newest version for about `env_steps`; returns the reason where that was impossible."""
        control = self._control
        for name in [name for name in control.running if name != self._instance]:
            control.pause(name)
        control.set(self._instance, self._told, last_env_steps=max(1, env_steps))
        while self._playing() and not self._interrupted():
            control.wait(self._over, LOOK_SECONDS)
            self._show()
        if self._playing():
            control.set(self._instance, self._told, last_env_steps=0)
            control.wait(self._over, CUT_SECONDS)
        if self._failure is None and not self._alive():
            self._failure = f"{self._instance} died"
        return self._failure

    def save(self, folder: Path) -> bool:
        """Let the evaluator write its file into `folder`; returns whether it has."""
        written: list[bool] = []

        def done(result: Any, error: str | None) -> None:
            written.append(bool(result) and not error)

        self._control.command(self._instance, "checkpoint", done, folder=str(folder))
        self._control.wait(lambda: bool(written), SAVE_SECONDS)
        return written == [True]

    def _told(self, result: Any, error: str | None) -> None:
        self._begun, self._failure = True, error

    def _alive(self) -> bool:
        return bool(self._control.snapshot()[self._instance]["alive"])

    def _over(self) -> bool:
        """Asked after every step of an inline run, so it looks at one counter only."""
        return self._begun and not self._control.total("eval_episodes_planned")

    def _playing(self) -> bool:
        return not self._over() and self._alive()
