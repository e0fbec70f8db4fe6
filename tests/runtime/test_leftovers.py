"""What a run leaves behind and what it inherits: processes, descriptors, standard input; a dead parent, a dead fork server."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import setproctitle

from shoal.core import any_of
from shoal.errors import ShoalError
from shoal.runtime import Program, run
from shoal.runtime.fork_server_client import ForkServerClient
from tests.runtime.harness import PRELOAD, Killer, Shared, Watch, drive, eventually, gone, up
from tests.runtime.test_faults import LAYOUT, Beater, beaters
from tests.tree import tree_environment


def forked(act=lambda: None):
    """The pid of a daemon that was forked twice and executes nothing, in a session of its own, after it has done `act`."""
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        os.setsid()
        if os.fork() == 0:
            act()
            os.write(write, str(os.getpid()).encode())
            time.sleep(300)
        os._exit(0)
    os.waitpid(first, 0)
    os.close(write)
    with open(read, "rb", buffering=0) as file:
        return int(file.read(100))


def overwrite_names():
    """As setproctitle does: what it says lies where the arguments and the environment were."""
    setproctitle.setproctitle("d" * 10_000)


def empty_environment():
    """The pid of a daemon that inherits no variable."""
    started = subprocess.run("setsid sleep 300 > /dev/null & echo $!", shell=True, stdout=subprocess.PIPE, check=True, env={})
    return int(started.stdout)


class Parent:
    """Like an environment that runs a simulator: one in its group, one in a session of its own, each with a child of its
    own, and daemons whose parents have gone: one that is executed, one that is not, one without an environment, and one that has
    overwritten it."""

    def __init__(self, me, folder):
        self.me = me
        sleeper = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '300']); print(p.pid, flush=True); time.sleep(300)"
        command = [sys.executable, "-c", sleeper]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=new) for new in (False, True)]
        pids = [p.pid for p in processes] + [int(p.stdout.readline()) for p in processes]
        daemon = subprocess.run("setsid sleep 300 > /dev/null & echo $!", shell=True, stdout=subprocess.PIPE, check=True)
        pids += [int(daemon.stdout), forked(), forked(overwrite_names), empty_environment()]
        (folder / f"{me.index}-{me.incarnation}").write_text(" ".join(map(str, pids)))

    async def step(self):
        self.me.stats.add("env_steps")
        await any_of(timeout=0.01)


PIDS = 8  # of one Parent


def started(folder, name="*-*"):
    return [int(pid) for path in folder.glob(name) for pid in path.read_text().split()]


def test_children_die_with_their_place(tmp_path):
    program = Program("t")
    program.add("parent", Parent, folder=tmp_path, replicas=2)
    killer = Killer(("parent-0",), times=1, every=5)
    seen = {}

    def act(control):
        killer(control)
        if killer.done(control) and not seen:
            seen["dead"] = eventually(lambda: all(map(gone, started(tmp_path, "0-0"))))
            seen["alive"] = not any(map(gone, started(tmp_path, "1-0") + started(tmp_path, "0-1")))

    watch = drive(program, "local", tmp_path, Watch(lambda c: seen, act))
    assert watch.reason == "until" and seen == {"dead": True, "alive": True}
    assert len(started(tmp_path)) == 3 * PIDS
    assert eventually(lambda: all(map(gone, started(tmp_path))))  # at the end of the run


def test_the_fork_server_is_replaced(tmp_path):
    program = Program("t")
    program.add("parent", Parent, folder=tmp_path, replicas=2)
    seen = {}

    def act(control):
        if up(control) and "killed" not in seen and control.total("env_steps") > 10:
            seen["killed"], seen["pids"] = control.fork_server.process.pid, [child.pid for child in control.children.values()]
            os.kill(seen["killed"], signal.SIGKILL)

    watch = drive(program, "local", tmp_path, Watch(lambda c: "killed" in seen and up(c) and c.total("restarts") == 2 and
                                                    c.total("alive") == 2 and c.total("env_steps") > 50, act))
    assert watch.reason == "until"
    assert all(map(gone, seen["pids"]))
    assert len(started(tmp_path, "*-0")) == 2 * PIDS and eventually(lambda: all(map(gone, started(tmp_path, "*-0"))))
    assert any("fork server died" in text for text in watch.texts("restart"))


def test_fork_server_deaths_do_not_count(tmp_path, monkeypatch):
    """Not even those that could not start: it is no sign of too little memory."""
    monkeypatch.setattr("shoal.runtime.place_supervisor.DEATHS_WHILE_STARTING", 1)
    program = Program("t")
    program.add("actor", SlowBirth)
    seen = {}

    def act(control):
        if not seen and control.children["actor-0"].pid and not control.children["actor-0"].ready:
            seen["killed"] = control.fork_server.process.pid
            os.kill(seen["killed"], signal.SIGKILL)

    watch = drive(program, "local", tmp_path, Watch(lambda c: seen and c.total("env_steps") > 5, act))
    assert watch.reason == "until" and watch.final["actor-0"]["restarts"] == 1


class SlowBirth(Beater):
    def __init__(self, me):
        time.sleep(0.7)
        super().__init__(me)


def test_fork_server_that_cannot_start(tmp_path, capfd):
    """A fork server that cannot start ends the run."""
    with (ForkServerClient(("there_is_no_such_module",)) as fork_server,
          pytest.raises(ShoalError, match="the fork server cannot start")):
        run(beaters(actor=1), Watch(), "local", tmp_path, fork_server=fork_server)
    assert "there_is_no_such_module" in capfd.readouterr().err


def test_fork_server_killed_three_times(tmp_path):
    """Three kills of a fork server that starts end the run."""
    seen = set()

    def act(control):
        server = control.fork_server
        if server.process.pid not in seen and (seen or control.total("env_steps") > 5):
            seen.add(server.process.pid)
            os.kill(server.process.pid, signal.SIGKILL)

    with ForkServerClient(PRELOAD) as own, pytest.raises(ShoalError, match=r"the fork server cannot start \(exit code -9\)"):
        run(beaters(actor=1), Watch(lambda control: len(seen) > 20, act), "local", tmp_path, fork_server=own)
    assert len(seen) == 4  # the one that was up, and three that were starting


SCRIPT = """
    from pathlib import Path
    from shoal.runtime import Program, local, run
    from shoal.runtime.fork_server_client import ForkServerClient
    from tests.runtime.harness import PRELOAD, Watch
    from tests.runtime.test_leftovers import Parent, Stuck

    local.STOP_SECONDS = 1.0
    folder = Path({folder!r})
    program = Program("t")
    program.add("parent", Parent, folder=folder, replicas=2)
    program.add("stuck", Stuck, folder=folder)

    def act(control):
        if control.total("alive") == 3 and not (folder / "pids").exists():
            pids = [child.pid for child in control.children.values()] + [control.fork_server.process.pid]
            (folder / "new").write_text(" ".join(map(str, pids)))
            (folder / "new").rename(folder / "pids")

    run(program, Watch(act=act, seconds=60), "local", folder / "logs", fork_server=ForkServerClient(PRELOAD))
"""


class Stuck:
    """Never comes back from its step, and catches what it can."""

    def __init__(self, me, folder):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def step(self):
        time.sleep(300)


def shared_memory():
    """Names that libraries give to shared memory. Ours has none; Ray's and that of other tests does not count."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("shoal", "psm_", "torch_", "sem."))}


@pytest.mark.parametrize("how", ["kill -9", "interrupt"])
def test_killed_parent_leaves_nothing(how, tmp_path):
    """When the parent is killed nothing is left."""
    before = shared_memory()
    script = textwrap.dedent(SCRIPT).format(folder=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", script], env=tree_environment())
    try:
        assert eventually(lambda: (tmp_path / "pids").exists(), 30)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()] + started(tmp_path, "*-0")
        assert len(pids) == 4 + 2 * PIDS and not any(map(gone, pids))
        if how == "interrupt":
            parent.send_signal(signal.SIGINT)
            parent.wait(60)  # the role that is stuck is given a second
    finally:
        parent.kill()
        parent.wait()
    assert eventually(lambda: all(map(gone, pids)), 3.0), [psutil.Process(p) for p in pids if not gone(p)]
    assert eventually(lambda: shared_memory() <= before)


def test_many_runs_leave_nothing(tmp_path):
    """Neither descriptors nor zombies nor processes, in this process and in the fork server; also with one's own fork server."""
    fork_server = Shared.get()

    def once():
        program = Program("t")
        weights = program.broadcast("weights", LAYOUT)
        items = program.stream("items", LAYOUT)
        program.add("a", Sender, weights=weights.publisher, items=items.sink)
        program.add("b", Taker, weights=weights.reader, items=items.source)
        watch = Watch(lambda c: c.total("env_steps") > 3)
        assert run(program, watch, "local", tmp_path, fork_server=fork_server) == "until"

    def counts():
        gc.collect()
        server = psutil.Process(fork_server.process.pid)
        return len(os.listdir("/proc/self/fd")), server.num_fds(), len(server.children(recursive=True))

    once()
    before = counts()
    for _ in range(5):
        once()
    assert counts() == before
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
    children = {child.pid for child in psutil.Process().children()}
    run(beaters(actor=1), Watch(lambda c: c.total("env_steps") > 3), "local", tmp_path)  # with a fork server of its own
    assert {child.pid for child in psutil.Process().children()} == children
    assert counts() == before


class Sender:
    def __init__(self, me, weights, items):
        self.me, self.weights, self.items = me, weights, items

    async def step(self):
        self.weights.publish({"x": [1]})
        slot = await self.items.slot()
        slot.data["x"][0] = 1
        slot.send()
        self.me.stats.add("env_steps")


class Taker:
    def __init__(self, me, weights, items):
        self.me, self.weights, self.items = me, weights, items

    async def step(self):
        await self.items.take(1)


def test_a_role_inherits_no_descriptors(tmp_path):
    program = Program("t")
    program.add("curious", Curious, folder=tmp_path)
    drive(program, "local", tmp_path, Watch(lambda c: c.total("env_steps") >= 1))
    assert (tmp_path / "stdin").read_text() == ""
    assert (tmp_path / "fds").read_text().split() == ["0", "1", "2", "3"]  # 3 is ls's own


class Curious:
    def __init__(self, me, folder):
        self.me, self.folder = me, folder

    async def step(self):
        (self.folder / "stdin").write_text(sys.stdin.read())
        os.system(f"ls /proc/self/fd > {self.folder / 'fds'}")
        self.me.stats.add("env_steps")
        await any_of(timeout=1)


# ---------------------------------------------------------------------------------------------- logs
class Printer:
    """Prints without end."""

    def __init__(self, me, line):
        self.me, self.line = me, line

    async def step(self):
        for number in range(2000):
            print(self.line, self.me.stats.get("env_steps"), number)
        self.me.stats.add("env_steps")
        await any_of(timeout=0.001)


def test_endless_printing(tmp_path, monkeypatch):
    """An environment that prints cannot fill the disk."""
    monkeypatch.setattr("shoal.runtime.log_limit.MOST_BYTES", 200_000)
    program, seen = Program("t"), []
    program.add("printer", Printer, line="x" * 90, replicas=2)
    logs = tmp_path / "logs"

    def look(control):
        seen.append(sum(path.stat().st_size for path in logs.iterdir()))
        return control.total("env_steps") > 60

    watch = drive(program, "local", tmp_path, Watch(look))
    assert watch.reason == "until"
    for path in logs.iterdir():
        text = path.read_text()
        first, *_, last = text.splitlines()
        assert first.startswith("[shoal] ") and first.endswith("bytes of this log were dropped here: it had become too long")
        assert last.startswith("xxx") and len(text) < 10_000_000, "what is printed between two looks is there too"
    steps = sum(page["env_steps"] for page in watch.final.values())
    assert sum(path.stat().st_size for path in logs.iterdir()) < 0.5 * 2000 * 90 * steps
