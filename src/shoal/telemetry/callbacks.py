"""What users let a run call: `shoal.train(..., callbacks=[MyCallback()])`.

Each callback has a thread of its own in the driver and is called one thing after the other. Training never waits for it: metrics
that come while it is busy are replaced by newer ones, everything else is kept for it. What it raises is told as an event (the same
thing again the 10th and the 100th time), and it is called again the next time. What ends a process (os._exit, a crash of a C
library) would end the driver: a class that says `own_process = True` is called in a process of its own
(experiment/callback_process.py).
"""

from __future__ import annotations

import math
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import cloudpickle

from shoal.errors import ConfigError
from shoal.telemetry.outputs import jsonable

__all__ = ["Callback", "CallbackOutput", "CallsHere", "Due", "checked", "scalars"]

CLOSE_SECONDS = 30.0  # for what is left to call when the run is over


class Callback:
    """Override what you need. Everything is called in the driver, outside of the main thread, or in a process of its own."""

    own_process: ClassVar[bool] = False
    """Whether a copy of it is called in a process of its own, whose death does not end the run."""

    def on_start(self, directory: Path, config: Mapping[str, Any]) -> None:
        """The run directory is there, and the roles begin. `config` is what config.json holds."""

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        """A snapshot, about once a second, with the names of metrics.jsonl."""

    def on_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """The first snapshot with the result of an evaluation: eval_return, eval_episodes, eval_version."""

    def on_checkpoint(self, folder: Path) -> None:
        """A checkpoint is whole."""

    def on_restart(self, event: Mapping[str, Any]) -> None:
        """A role died and was started again: its name, and why."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run is over. `summary` is what summary.json holds."""


def checked(callbacks: Any) -> Sequence[Callback]:
    """The callbacks that were given; a mistake is told before anything begins."""
    if isinstance(callbacks, Callback):
        raise ConfigError(f"callbacks={type(callbacks).__name__}() is one callback; give a list: callbacks=[...]")
    if not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks={callbacks!r} is not possible: give a list of callbacks (shoal.Callback)")
    found = list(callbacks)
    for callback in found:
        if not isinstance(callback, Callback):
            made = "; make one of it with ()" if isinstance(callback, type) and issubclass(callback, Callback) else ""
            raise ConfigError(f"callbacks has {callback!r}, which is no shoal.Callback{made or '; derive a class from it'}")
        if callback.own_process:
            try:
                cloudpickle.dumps(callback)
            except Exception as error:
                raise ConfigError(f"{type(callback).__name__} has own_process = True and cannot be sent to a process of its own: "
                                  f"{error}; make what it needs in on_start") from None
    return found


class Due(NamedTuple):
    """A call that waits for its turn."""

    method: str
    arguments: tuple[Any, ...]


class Caller(Protocol):
    """Where calls are made."""

    def __call__(self, due: Due) -> str | None:
        """Make a call; returns what went wrong."""

    def close(self) -> None:
        """All calls are made."""

    def kill(self) -> bool:
        """End what is still busy now; returns whether that is possible."""


class CallsHere:
    """Makes the calls in the thread that asks for them."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def __call__(self, due: Due) -> str | None:
        method: Callable[..., None] = getattr(self._callback, due.method)
        try:
            method(*due.arguments)
        except BaseException as error:  # whatever a user's code raises, sys.exit() too
            return f"raised {type(error).__name__}: {error}{_where(error)}"
        return None

    def close(self) -> None:
        pass

    def kill(self) -> bool:
        return False  # a thread cannot be ended


def _where(error: BaseException) -> str:
    """The line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is that of the call
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


class CallbackOutput:
    """The output that calls one Callback."""

    def __init__(self, callback: Callback, caller: Caller | None = None) -> None:
        self._caller, self._name = caller or CallsHere(callback), type(callback).__name__
        self._calls: deque[Due] = deque()
        self._complaints: deque[str] = deque()
        self._told: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False
        self._evaluated: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"callback {self._name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ called by the session
    def begin(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._add("on_start", directory, config)

    def write(self, shot: Mapping[str, Any]) -> None:
        metrics = jsonable(shot)
        version = metrics.get("eval_version")
        if version is not None and version != self._evaluated:
            self._evaluated = version
            self._add("on_evaluation", metrics)
        with self._changed:
            self._calls = deque(due for due in self._calls if due.method != "on_metrics")
        self._add("on_metrics", metrics)

    def event(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "restart":
            self._add("on_restart", dict(event))

    def checkpoint(self, folder: Path) -> None:
        self._add("on_checkpoint", folder)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._add("on_end", dict(summary))

    def complaints(self) -> list[str]:
        """What went wrong since the last time."""
        found = []
        while self._complaints:
            found.append(self._complaints.popleft())
        return found

    def close(self) -> None:
        """Give it time for what is left."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._complaints.append(f"{self._name} is still busy {CLOSE_SECONDS:g} s after the end of the run; "
                                    f"{'its process is ended' if self._caller.kill() else 'it is left alone'}")

    # ------------------------------------------------------------------ the thread
    def _add(self, method: str, *arguments: Any) -> None:
        with self._changed:
            self._calls.append(Due(method, arguments))
            self._changed.notify()

    def _work(self) -> None:
        while (due := self._next()) is not None:
            if (wrong := self._caller(due)) is not None:
                self._complain(f"{self._name}.{due.method} {wrong}")
        self._caller.close()

    def _complain(self, text: str) -> None:
        """A callback that fails at every call is told of seldom."""
        self._told[text] += 1
        times = self._told[text]
        if math.log10(times).is_integer():
            self._complaints.append(text if times == 1 else f"{text}; {times:,} times so far")

    def _next(self) -> Due | None:
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed)
            return self._calls.popleft() if self._calls else None


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a snapshot by their path: losses/entropy, roles/actor/busy, ..."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found.update(scalars(value, f"{path}/"))
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[path] = value
    return found
