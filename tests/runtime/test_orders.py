"""Orders to the fork server: more than its socket holds, to one that is stopped, and for forks that fail."""

import errno
import gc
import os
import signal
import socket
import subprocess
import sys

import pytest

from shoal.errors import RoleFailed, ShoalError
from shoal.runtime import Faults, Program, run
from shoal.runtime.fork_server_client import ForkServerClient
from tests.runtime.harness import PRELOAD, Watch, drive, gone, up
from tests.runtime.test_faults import Beater, beaters

PLACES = 12  # a socket of the smallest size holds about four orders and six answers


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """The file that says how often the fork server's forks fail from now on."""
    return tmp_path_factory.mktemp("forks") / "failures"


@pytest.fixture(scope="module")
def narrow(failures):
    """A fork server whose sockets hold as little as the kernel allows, and whose forks can be made to fail."""
    pair = socket.socketpair

    def small(*arguments):
        ends = pair(*arguments)
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return ends

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socketpair", small)
        patch.setenv("FORKLESS", str(failures))
        fork_server = ForkServerClient((*PRELOAD, "tests.runtime.forkless"))
    with fork_server:
        yield fork_server


def everybody(control):
    return up(control) and control.total("alive") == len(control.children)


def test_more_places_than_the_socket_holds(tmp_path, narrow):
    """Neither waits for the other for ever: the supervisor for room for its orders, the fork server for its answers."""
    held, open_files = [], []
    for _ in range(2):
        watch = Watch(everybody, lambda control: held.append(len(control.fork_server._queue)), seconds=60)
        assert run(beaters(actor=PLACES), watch, "local", tmp_path, fork_server=narrow) == "until"
        assert not watch.texts("restart") and not watch.texts("hang")
        gc.collect()
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert held[0] > 0, "the socket holds all orders; this tests nothing"
    assert open_files[0] == open_files[1]


def test_long_import_paths(tmp_path, narrow, monkeypatch):
    """Import paths may be longer than any message."""
    monkeypatch.setattr("sys.path", [*sys.path, *(str(tmp_path / f"{number}") for number in range(5000))])
    assert run(beaters(actor=1), Watch(everybody, seconds=60), "local", tmp_path, fork_server=narrow) == "until"


def test_fork_is_tried_again(tmp_path, narrow, failures):
    """A place that cannot be forked is tried again."""
    server = narrow.process.pid
    failures.write_text("4")
    watch = Watch(everybody, seconds=60)
    assert run(beaters(actor=2, learner=1), watch, "local", tmp_path, fork_server=narrow) == "until"
    assert narrow.process.pid == server and not gone(server)
    assert len(watch.texts("restart")) == 4
    assert all(text.startswith("could not be forked: [Errno 11] Resource temporarily unavailable; restarted")
               for text in watch.texts("restart"))
    assert sum(row["restarts"] for row in watch.final.values()) == 4


def test_fork_that_always_fails(tmp_path, narrow, failures, monkeypatch):
    """A place that can never be forked ends the run."""
    monkeypatch.setattr("shoal.runtime.place_supervisor.DEATHS_WHILE_STARTING", 3)
    failures.write_text("1000")
    try:
        with pytest.raises(RoleFailed, match=r"actor-0 ended 3 times before it could start .*: could not be forked: .*unavailable"):
            run(beaters(actor=1), Watch(seconds=60), "local", tmp_path, fork_server=narrow)
    finally:
        failures.unlink()


def test_stopped_server_unread_orders(tmp_path, narrow, monkeypatch):
    monkeypatch.setattr("shoal.runtime.local.ANSWER_SECONDS", 0.5)
    assert run(beaters(actor=1), Watch(everybody, seconds=60), "local", tmp_path, fork_server=narrow) == "until"  # it is up
    stopped = narrow.process.pid
    os.kill(stopped, signal.SIGSTOP)
    watch = Watch(lambda control: control.fork_server.process.pid != stopped and everybody(control), seconds=60)
    assert run(beaters(actor=PLACES), watch, "local", tmp_path, Faults(hang_seconds=2.0), narrow) == "until"
    assert watch.texts("hang")[0] == "no sign of life for 2 s; killed" and gone(stopped)
    assert all(row["restarts"] >= 1 for row in watch.final.values())


@pytest.mark.parametrize("times", [2, 1000])
def test_fork_server_is_tried_again(times, monkeypatch):
    """And where there is none for long, that is said in a sentence."""
    left, popen = [times], subprocess.Popen

    def full(*arguments, **values):
        if left[0] > 0:
            left[0] -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return popen(*arguments, **values)

    monkeypatch.setattr("subprocess.Popen", full)
    monkeypatch.setattr("shoal.runtime.fork_server_client.START_PAUSES", (0.0, 0.01, 0.01))
    if times == 2:
        with ForkServerClient(()) as fork_server:
            assert fork_server.process.poll() is None
    else:
        with pytest.raises(ShoalError, match=r"the fork server cannot start: \[Errno 11\] .*ulimit -u"):
            ForkServerClient(())
        assert left[0] == times - 4


class Doomed(Beater):
    """Dies while it saves."""

    def state(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def load(self, state):
        """There is never anything to load."""


def test_a_checkpoint_that_fails_by_a_death(tmp_path):
    program = Program("t")
    program.add("learner", Doomed)
    saving = []

    def act(control):
        if not saving and up(control):
            saving.append(control.checkpoint(tmp_path / "saved"))

    watch = Watch(lambda control: watch.saves, act, seconds=60)
    drive(program, "local", tmp_path, watch)
    assert [ok for _, ok in watch.saves] == [False]
    (event,) = [event for event in watch.events if event["kind"] == "checkpoint failed"]
    assert (event["role"], event["text"]) == ("learner-0", "died")
