"""Processes that a benchmark starts and that must not outlive it.

Each leads a process group of its own, which is ended as a whole; the kernel ends it if the benchmark is killed. Several threads may
have one running each. `end()` ends them all, and none is started after it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.bench.parent_death import tied_to_parent

__all__ = ["TOO_LONG", "ChildProcesses"]

TOO_LONG = 124
"""The exit code of a command that was ended because it took longer than it may."""
Beside = Callable[[int, threading.Event], None]
"""Runs meanwhile, in a thread: it gets the process's id, and an event that is set when the process has ended."""


class ChildProcesses:
    """The running ones, so that all of them can be ended at once."""

    def __init__(self) -> None:
        self._lock, self._running, self._over = threading.Lock(), set[int](), False

    def run(self, words: Sequence[str], seconds: float, beside: Beside = lambda pid, over: None, cwd: Path | None = None,
            env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command; one that takes longer than `seconds` is ended with all it started, as exit code 124."""
        with self._lock:
            if self._over:
                return subprocess.CompletedProcess(list(words), 130, "", "interrupted")
            process = subprocess.Popen(tied_to_parent(words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
                                       env=None if env is None else dict(env), start_new_session=True)
            self._running.add(process.pid)
        over = threading.Event()
        watcher = threading.Thread(target=beside, args=(process.pid, over), daemon=True)
        watcher.start()
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _signal(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            return subprocess.CompletedProcess(list(words), TOO_LONG, out, f"{err}\nnot done after {seconds:.0f} s")
        except BaseException:  # Ctrl-C, where this is the main thread
            self.end()
            process.communicate()
            raise
        finally:
            with self._lock:
                self._running.discard(process.pid)
            over.set()
            watcher.join()
        return subprocess.CompletedProcess(list(words), process.returncode, out, err)

    def end(self) -> None:
        """Stop whatever runs, and start nothing more."""
        with self._lock:
            self._over = True
            for pid in self._running:
                _signal(pid, signal.SIGTERM)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)  # a group of our own making
