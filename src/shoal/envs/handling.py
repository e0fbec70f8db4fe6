"""What is done with environments beyond stepping them: restarting one that raises, and reading numbers from `info`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Handling", "Restarts"]


@dataclass(frozen=True)
class Handling:
    """How the environments of an actor are handled."""

    restart_on_error: int = 0
    """How often in a row an environment that raises is made anew, alone; 0: what it raises ends the run."""
    info: tuple[str, ...] = ()
    """Keys of `info` whose numbers a Step carries."""
    state: bool = False
    """Whether observations are {seen, state}: what the agent itself sees, and the state() of its environment."""


class Restarts:
    """Makes single environments anew after they raised. An environment's count starts again when an episode ends."""

    def __init__(self, remake: Callable[[], Any], num_envs: int, limit: int) -> None:
        self._remake, self.limit = remake, limit
        self._in_a_row = [0] * num_envs
        self._told: list[str] = []

    def ended(self, i: int) -> None:
        """An episode of environment i has ended by itself."""
        self._in_a_row[i] = 0

    def again(self, i: int, env: Any, what: str) -> Any:
        """A new environment in place of `env`, which raised; None where it has raised too often."""
        if self._in_a_row[i] >= self.limit:
            return None
        self._in_a_row[i] += 1
        self._told.append(f"environment {i} {what}")
        with contextlib.suppress(Exception):  # it is broken: closing it may raise anything
            env.close()
        return self._remake()

    def told(self) -> tuple[str, ...]:
        """What was restarted since the last call, and why."""
        found, self._told = tuple(self._told), []
        return found

    def hint(self) -> str:
        """For the error of an environment that is not restarted any more."""
        times = "once" if self.limit == 1 else f"{self.limit} times in a row"
        return f" (it was restarted {times} without an episode that ended)" if self.limit else \
            "; --envs.restart-on-error N restarts such an environment alone, and the run continues"
