"""Parts of the Ray runtime by themselves: liveness, cleanup, messenger, logs, and the errors when a cluster cannot be joined."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from shoal.errors import ConfigError
from shoal.runtime import RayConfig, cleanup
from shoal.runtime.cleanup import ProcessRecord
from shoal.runtime.ray import liveness
from tests.runtime.harness import eventually, gone
from tests.tree import tree_environment

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

PATIENCE = 60.0


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def address(listening):
    return f"127.0.0.1:{listening.getsockname()[1]}"


# ---------------------------------------------------------------------------------------------- liveness
def test_a_cluster_is_gone_after_some_misses(server, monkeypatch):
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.02)
    watched = liveness.ClusterWatch(address(server))
    time.sleep(0.3)
    assert not watched.gone and watched.reachable() and watched.ask(lambda: 7, 0) == 7
    server.close()
    assert eventually(lambda: watched.gone, PATIENCE) and not watched.reachable()
    assert watched.why == "nothing listens at that address"
    watched.close()


def test_unreachable_cluster(monkeypatch):
    """A head whose queue of connections is full answers nobody, as one behind a link that is down."""
    for name, seconds in (("LOOK_SECONDS", 0.02), ("CONNECT_SECONDS", 0.1), ("LOST_SECONDS", 2.0)):
        monkeypatch.setattr(liveness, name, seconds)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as stack:
        watched = liveness.ClusterWatch(address(server))
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        assert eventually(lambda: not watched.reachable(), PATIENCE)
        assert eventually(lambda: watched.gone, PATIENCE) and watched.why == "it could not be reached for 2 s"


def test_one_that_is_closed_looks_no_more(server, monkeypatch):
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.02)
    before = threading.active_count()
    watched = liveness.ClusterWatch(address(server))
    watched.close()
    assert eventually(lambda: threading.active_count() <= before, PATIENCE) and not watched.gone


def test_question_to_a_dead_cluster_returns(server, monkeypatch):
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.02)
    watched, never = liveness.ClusterWatch(address(server)), threading.Event()
    threading.Timer(0.2, server.close).start()
    assert watched.ask(lambda: never.wait(PATIENCE) or 7, -1) == -1
    assert watched.ask(lambda: 7, -1) == -1  # it is not asked any more
    never.set()


def test_failing_question_gives_the_default(server):
    watched = liveness.ClusterWatch(address(server))
    assert watched.ask(lambda: 1 / 0, 5.0) == 5.0
    watched.close()


# ---------------------------------------------------------------------------------------------- cleanup
DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from shoal.runtime.cleanup import CleanupProcess

cleanup, folder = CleanupProcess(), Path(sys.argv[1])
cleanup.remember(folder)
sleep = "import time; time.sleep(600)"
code = f'''
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", {sleep!r}], start_new_session=True).pid, flush=True)
time.sleep(600)
'''
with cleanup.marking_children():  # a server, and what it starts in a session of its own
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
assert "SHOAL_CLUSTER" not in os.environ
stranger = subprocess.Popen([sys.executable, "-c", sleep])
print(server.pid, server.stdout.readline().strip(), stranger.pid, cleanup._process.pid, flush=True)
if sys.argv[2] == "close":
    cleanup.close()
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_cluster_dies_with_its_driver(tmp_path, how):
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "log").write_text("words")
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder), how], stdout=subprocess.PIPE, text=True)
    *started, stranger, cleanup = map(int, driver.stdout.readline().split())
    try:
        if how == "kill":
            assert not any(gone(pid) for pid in started) and folder.exists()
            driver.kill()
            driver.wait()
        assert eventually(lambda: all(gone(pid) for pid in (*started, cleanup)), PATIENCE), "somebody is left"
        assert not folder.exists() and not gone(stranger)  # it leaves alone what was not started under the mark
    finally:
        driver.kill()
        os.kill(stranger, signal.SIGKILL)
        driver.wait()
        driver.stdout.close()


HIDING = """
import fcntl, struct, subprocess, sys, termios, time
from pathlib import Path
from shoal.runtime.cleanup import CleanupProcess

cleanup = CleanupProcess()
with cleanup.marking_children():
    server = subprocess.Popen([sys.executable, "-m", "tests.runtime.hiding"], stdout=subprocess.PIPE, text=True)
    pids = server.stdout.readline()
if sys.argv[1] == "dead":
    for _ in range(2):  # when the second message has been read, the watcher has looked for processes after the first one
        while struct.unpack("i", fcntl.ioctl(cleanup._pipe, termios.FIONREAD, bytes(4)))[0]:
            time.sleep(0.01)
        cleanup.remember(Path(sys.argv[2]))
    server.kill()
    server.wait()
print(server.pid, pids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("server", ["alive", "dead"])
def test_hidden_found_by_start_time(server, tmp_path):
    """Daemons that have no mark, or have overwritten it, below a server that is alive or dead when its driver is killed."""
    command = [sys.executable, "-c", HIDING, server, str(tmp_path / "scratch")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=tree_environment())
    pids = list(map(int, driver.stdout.readline().split()))
    try:
        assert len(pids) == 4 and not any(map(gone, pids[1:])) and gone(pids[0]) == (server == "dead")
        driver.kill()
        driver.wait()
        assert eventually(lambda: all(map(gone, pids)), PATIENCE), "somebody is left"
    finally:
        driver.kill()
        driver.stdout.close()
        end_all(pids)


def test_orphans_are_found():
    """What was seen once, at any depth, is found when its parent is gone."""
    command = ["sh", "-c", f"{sys.executable} -m tests.runtime.hiding & echo $!; wait"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=tree_environment())
    pids = [int(pid) for _ in range(2) for pid in server.stdout.readline().split()]
    stranger = subprocess.Popen(["sleep", "300"])
    try:
        record = ProcessRecord()
        record.add([server.pid])
        assert record.look() == {server.pid, *pids}
        server.kill()
        server.wait()
        assert record.look() == set(pids) and record.end()
        assert eventually(lambda: all(map(gone, pids)), PATIENCE) and not record.end() and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        server.kill()
        server.stdout.close()
        end_all(pids)


def test_pid_that_is_used_again(monkeypatch):
    """By another process, which was started later: it is left alone."""
    there = {7: (1, 100), 8: (7, 101), 9: (1, 102)}
    monkeypatch.setattr(cleanup, "parents_and_starts", lambda: there)
    record = ProcessRecord()
    record.add([7])
    assert record.look() == {7, 8}
    there = {7: (1, 100), 8: (1, 555), 10: (8, 556)}
    assert record.look() == {7}


def end_all(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------- messenger
class Door:
    """A handle whose first calls fail, this many times."""

    def __init__(self, failures):
        self.failures, self.made = failures, []
        self.deliver = self

    def remote(self, sender, incarnation, number, headers, *payloads):
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the cluster is not there")
        self.made.append((number, [message for message, _ in headers]))
        return self

    def future(self):
        from concurrent.futures import Future

        done = Future()
        done.set_result(None)
        return done


@pytest.mark.parametrize("failures", [1, 3])
def test_a_failed_call_is_repeated_once(monkeypatch, failures):
    from shoal.runtime.ray import messenger

    monkeypatch.setattr(messenger, "AGAIN_SECONDS", 0.01)
    door, mine = Door(failures), messenger.Messenger("a", 0, lambda message, payload: None)
    mine.connect("b", door, 0)
    mine.send("b", ("wire", "first"))
    mine.send("b", ("wire", "second"))
    assert eventually(lambda: sum(len(messages) for _, messages in door.made) == 2, PATIENCE), door.made
    assert [message[1] for _, messages in door.made for message in messages] == ["first", "second"]
    mine.send("b", ("wire", "third"))
    assert eventually(lambda: door.made[-1][1] == [("wire", "third")], PATIENCE)
    assert [number for number, _ in door.made] == sorted({number for number, _ in door.made})


# ---------------------------------------------------------------------------------------------- logs
def hosted(tmp_path, monkeypatch):
    """A host without Ray, and its log."""
    from shoal.runtime.ray import host

    monkeypatch.setattr(host.tempfile, "gettempdir", lambda: str(tmp_path))
    made = host.Host.__new__(host.Host)
    made._folder, made._logged, made._reading = host.scratch("s", "actor-0-0"), 0, threading.Lock()
    made._folder.mkdir(parents=True)
    return host, made, made._folder / host.LOG


def test_last_words_hold_the_log_to_its_end(tmp_path, monkeypatch):
    host, made, log = hosted(tmp_path, monkeypatch)
    text = b"".join(b"line %d\n" % number for number in range(200_000)) + b"ArithmeticError: seven is not prime\n"
    log.write_bytes(text)
    first = made._read_log(False)
    assert len(first) == host.LOG_BYTES and first + made._read_log(True) == text
    assert made._read_log(False) == b""  # a report that was under way says nothing twice


def test_the_log_of_a_killed_place_is_whole(tmp_path, monkeypatch):
    host, _, log = hosted(tmp_path, monkeypatch)
    text = b"x" * (3 * host.LOG_BYTES) + b"THE LAST LINE\n"
    log.write_bytes(text)
    assert host.tail("s", "actor-0-0", 100) == text[100:]
    assert not log.parent.exists() and host.tail("s", "actor-0-0", 100) == b""


def test_the_end_of_a_long_log_is_kept(tmp_path, monkeypatch):
    host, made, log = hosted(tmp_path, monkeypatch)
    monkeypatch.setattr(host, "LAST_BYTES", 100)
    log.write_bytes(b"a" * 1000 + b"b" * 100)
    assert made._read_log(True) == b"\n[shoal] 1000 bytes are left out here\n" + b"b" * 100


def test_fast_log_is_cut(tmp_path, monkeypatch):
    """A log that is written faster than it is read is cut."""
    host, made, log = hosted(tmp_path, monkeypatch)
    monkeypatch.setattr(host, "LOG_BYTES", 100)
    monkeypatch.setattr(host, "LAST_BYTES", 4000)
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(1000)))
    assert made._read_log(False) == b"".join(b"line %d\n" % number for number in range(1000))[:100]
    assert log.stat().st_size < 1200
    monkeypatch.undo()
    text = made._read_log(False).decode()
    assert text.startswith("[shoal] ") and "bytes of this log were dropped here" in text and text.endswith("line 999\n")


# ---------------------------------------------------------------------------------------------- joining
def refused(monkeypatch, server, error, home, **environment):
    """What is said where Ray answers with an error."""
    from shoal.runtime.ray import connection

    def init(**settings):
        raise error

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(home), **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(connection.ray, "init", init)
    with pytest.raises(ConfigError) as failure:
        connection.connect(RayConfig(address=address(server)), 1.0)
    assert "\n" not in str(failure.value)
    return str(failure.value)


def test_driver_without_a_token(monkeypatch, server, tmp_path):
    """A driver without a token is told where it belongs."""
    from ray.exceptions import AuthenticationError

    said = refused(monkeypatch, server, AuthenticationError("no token was found"), tmp_path, RAY_AUTH_MODE="token")
    assert f"cannot join --ray.address {address(server)}: no token was found; RAY_AUTH_MODE is token, but this machine" in said
    assert "~/.ray/auth_token" in said and "docs.ray.io" not in said


def test_an_unused_token_is_named(monkeypatch, server, tmp_path):
    said = refused(monkeypatch, server, RuntimeError("unauthenticated"), tmp_path)
    assert "export" not in said and "that RAY_AUTH_MODE is the same on both sides" in said
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert "`export RAY_AUTH_MODE=token`" in refused(monkeypatch, server, RuntimeError("unauthenticated"), tmp_path)
    assert "export" not in refused(monkeypatch, server, RuntimeError("unauthenticated"), tmp_path, RAY_AUTH_MODE="token")
