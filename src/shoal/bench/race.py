"""Seconds of training to a return, from one rule for everybody: `python -m shoal.bench.race '{"preset": ..., "goal": 475, ...}'`.

The rule. Weights pass when the mean return of 100 fresh greedy episodes is at least the goal and that of another 100, played
at once, is too. They are judged about every 0.1 s of training. What is reported is the time of training, by the wall clock, from
when everything is ready for the first environment step until the weights that passed were there; playing the episodes is not
counted.

    a peer      its clock stands still while it is judged (drivers/)
    shoal       its Evaluator plays beside the training, in a process of its own, and takes the newest weights whenever it is
                free; an evaluation lasts about 0.1 s. Learning goes on meanwhile, so the time is that at which the version
                that passed was first seen, read every 5 ms and therefore never too early

The episodes' seeds have nothing to do with those of the training.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from shoal import runtime
from shoal.experiment.prepare import prepare
from shoal.experiment.run import plan_of
from shoal.runtime import Supervisor

__all__ = ["Clock", "main", "race"]

LOOK_SECONDS = 0.005


class Clock:
    """A session that keeps nothing but the times at which weights were published."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: list[tuple[float, float]] = []  # (time, version)
        self._over = threading.Event()
        self.result: dict[str, Any] = {"seconds": None, "eval_return": None, "env_steps": None}

    def begin(self, control: Supervisor) -> None:
        threading.Thread(target=self._look, args=(control,), daemon=True).start()

    def _look(self, control: Supervisor) -> None:
        while not self._over.wait(LOOK_SECONDS):
            now, version = time.monotonic(), control.total("weights_version")
            if version and (not self._seen or version > self._seen[-1][1]):
                self._seen.append((now, version))  # the first one is there before the first environment step

    def tick(self, control: Supervisor) -> None:
        if self._seen and time.monotonic() - self._seen[0][0] > self._seconds:
            control.stop("seconds")

    def saved(self, folder: Path, ok: bool) -> None:
        """Nothing is saved."""

    def newest(self) -> Path | None:
        return None

    def end(self, control: Supervisor, reason: str, error: str | None) -> None:
        self._over.set()
        judge = next(row for name, row in control.snapshot().items() if name.startswith("evaluator"))
        if reason == "return":
            passed = next(at for at, version in self._seen if version >= judge["eval_version"])
            self.result = {"seconds": passed - self._seen[0][0], "eval_return": judge["eval_return"],
                           "env_steps": int(control.total("env_steps"))}


def race(arguments: dict[str, Any], goal: float, seconds: float) -> dict[str, Any]:
    """One run of shoal; seconds are None where the goal was not reached in time."""
    values = {**arguments, "until_return": goal}
    prepared = prepare(plan_of(values.pop("preset"), values.pop("env"), None, None, values))
    clock = Clock(seconds)
    with tempfile.TemporaryDirectory(prefix="shoal-race-") as folder:
        runtime.run(prepared.program(), clock, "local", Path(folder))
    return clock.result


def main(words: str) -> None:
    arguments = json.loads(words)
    goal, seconds = arguments.pop("goal"), arguments.pop("seconds")
    sys.stdout.write(json.dumps(race(arguments, goal, seconds)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
