"""A callback in a process of its own: `own_process = True` in its class.

    driver, the callback's thread    -- method and arguments -->    this file: callback.method(*arguments)
                                     <-- what it raised, if anything --

A crash of a C library, os._exit or kill -9 ends that process and nothing else. The first time it is started again, with the
callback as it was given and a new on_start; the second time the callback is switched off. It is not the default: users expect a
callback to append to their lists and to use what is open in their notebook, and a copy of it cannot.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

import cloudpickle

from shoal.runtime.cleanup import PR_SET_PDEATHSIG, prctl
from shoal.runtime.fork_server_client import import_paths
from shoal.telemetry.callbacks import Callback, CallbackOutput, CallsHere, Due

__all__ = ["CallbackProcess", "callback_output", "main"]

START = ("import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
         "from shoal.experiment.callback_process import main; main(int(sys.argv.pop()))")
STARTS = 2


def callback_output(callback: Callback) -> CallbackOutput:
    """The output that calls a callback where its class says."""
    return CallbackOutput(callback, CallbackProcess(callback) if callback.own_process else None)


class CallbackProcess:
    """The driver's end. All but `kill` is called by the callback's thread: the kernel ends the process when that thread ends."""

    def __init__(self, callback: Callback) -> None:
        self._pickled = cloudpickle.dumps(callback)
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: Connection | None = None
        self._started: Due | None = None  # the call of on_start, which is made again in a new process
        self._starts_left = STARTS
        self._lock = threading.Lock()

    def __call__(self, due: Due) -> str | None:
        """Make a call; returns what went wrong."""
        if due.method == "on_start":
            self._started = due
        if self._process is None and not self._start():
            return None
        try:
            return self._ask(due)
        except (EOFError, OSError):
            return f"did not return: {self._buried()}"

    def close(self) -> None:
        """Let the process end by itself."""
        if self._calls is not None and self._process is not None:
            self._calls.close()
            self._process.wait()

    def kill(self) -> bool:
        """End the process now, for good; returns whether that is possible."""
        with self._lock:
            self._starts_left = 0
            if self._process is not None:
                self._process.kill()
        return True

    def _start(self) -> bool:
        here, there = multiprocessing.Pipe()
        with self._lock, there:
            if self._starts_left == 0:
                here.close()
                return False
            self._starts_left -= 1
            self._process = subprocess.Popen([sys.executable, "-c", START, str(there.fileno()), json.dumps(import_paths())],
                                             stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], start_new_session=True)
        self._calls = here
        with contextlib.suppress(OSError):  # it is dead already, which the first call finds out
            here.send_bytes(self._pickled)
        return True

    def _ask(self, due: Due) -> str | None:
        assert self._calls is not None
        self._calls.send(due)
        told: str | None = self._calls.recv()
        return told

    def _buried(self) -> str:
        """What became of the process, and what happens now. A new one hears of the start at once."""
        assert self._process is not None and self._calls is not None
        self._calls.close()
        code = self._process.wait()
        self._process = self._calls = None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self._starts_left == 0:
            return f"its process {how}; the callback is switched off, training continues"
        if self._started is None or not self._start():
            return f"its process {how}; it is started again"
        try:
            told = self._ask(self._started)
        except (EOFError, OSError):
            return f"its process {how}; it was started again, and {self._buried()}"
        return f"its process {how}; it was started again" + (f", and on_start {told}" if told else "")


def main(descriptor: int) -> None:
    """The process: makes one call after another until the driver closes the connection."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    calls = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        try:
            caller = CallsHere(cloudpickle.loads(calls.recv_bytes()))
        except Exception as error:
            calls.recv()
            calls.send(f"is not possible in a process of its own: {type(error).__name__}: {error}")
            return
        while True:
            calls.send(caller(calls.recv()))
