"""The evaluation at the end of a run: of the last version, so that the policy handed back is the best of all.

    the run stops      actors pause, every role is saved: from here on nothing can be lost
    then               everyone but the evaluator pauses, it plays for about a tenth of the run's env steps
    at its end         its file takes the place of the one that was saved before

The bound is in env steps, not in seconds, so that an inline run is the same every time. Ctrl-C ends it at once; the episodes that
have ended count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    """One last evaluation, from the command to the evaluators (one for each policy) until it is saved."""

    def __init__(self, control: Supervisor, interrupted: Callable[[], bool], show: Callable[[], None]) -> None:
        """`show` is called about ten times a second while it is played."""
        self._control, self._interrupted, self._show = control, interrupted, show
        self._instances = [name for name in control.running if name == f"{EVALUATOR}-0" or name.endswith(f".{EVALUATOR}-0")]
        self._failure: str | None = None
        self._begun: set[str] = set()

    @property
    def possible(self) -> bool:
        return bool(self._instances)

    def play(self, env_steps: int) -> str | None:
        """Evaluate the newest version for about `env_steps`; returns the reason where that was impossible."""
        control = self._control
        for name in [name for name in control.running if name not in self._instances]:
            control.pause(name)
        self._tell(max(1, env_steps // len(self._instances)))
        while self._playing() and not self._interrupted():
            control.wait(self._over, LOOK_SECONDS)
            self._show()
        if self._playing():
            self._tell(0)
            control.wait(self._over, CUT_SECONDS)
        if self._failure is None and (dead := [name for name in self._instances if not self._alive(name)]):
            self._failure = f"{dead[0]} died"
        return self._failure

    def _tell(self, env_steps: int) -> None:
        for name in self._instances:
            self._control.set(name, partial(self._told, name), last_env_steps=env_steps)

    def save(self, folder: Path) -> bool:
        """Let the evaluators write their files into `folder`; returns whether they have."""
        written: list[bool] = []

        def done(result: Any, error: str | None) -> None:
            written.append(bool(result) and not error)

        for name in self._instances:
            self._control.command(name, "checkpoint", done, folder=str(folder))
        self._control.wait(lambda: len(written) == len(self._instances), SAVE_SECONDS)
        return len(written) == len(self._instances) and all(written)

    def _told(self, name: str, result: Any, error: str | None) -> None:
        self._begun.add(name)
        self._failure = self._failure or error

    def _alive(self, name: str) -> bool:
        return bool(self._control.snapshot()[name]["alive"])

    def _over(self) -> bool:
        """Asked after every step of an inline run, so it looks at one counter only."""
        return len(self._begun) == len(self._instances) and not self._control.total("eval_episodes_planned")

    def _playing(self) -> bool:
        return not self._over() and all(self._alive(name) for name in self._instances)
