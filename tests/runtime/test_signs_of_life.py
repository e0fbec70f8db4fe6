"""Who is taken for hung and who is not: a stopped fork server, updates that take longer than the limit, cores in use."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from shoal.core import any_of
from shoal.errors import ConfigError
from shoal.runtime import Faults, Program
from shoal.runtime.core_use import CoreUse, processor_seconds
from tests.runtime.harness import Watch, drive, gone, up
from tests.runtime.test_faults import beaters


def test_a_stopped_fork_server_is_replaced(tmp_path, monkeypatch):
    """It reports no deaths and starts nobody, so everybody is started again by another one."""
    monkeypatch.setattr("shoal.runtime.local.ANSWER_SECONDS", 0.5)
    monkeypatch.setattr("shoal.runtime.local.ASK_SECONDS", 0.2)
    seen = {}

    def act(control):
        if not seen and up(control) and control.total("env_steps") > 10:
            seen["stopped"], seen["pids"] = control.fork_server.process.pid, [child.pid for child in control.children.values()]
            os.kill(seen["stopped"], signal.SIGSTOP)
            os.kill(seen["pids"][0], signal.SIGKILL)  # of which nobody hears
        elif seen and "steps" not in seen and control.fork_server.process.pid != seen["stopped"] and up(control):
            seen["steps"] = control.total("env_steps")

    def until(control):
        return "steps" in seen and control.total("alive") == 2 and control.total("env_steps") > seen["steps"] + 10

    watch = Watch(until, act, seconds=60)
    drive(beaters(actor=2), "local", tmp_path, watch, Faults(hang_seconds=1.5))
    assert watch.reason == "until"
    assert watch.texts("hang") == ["no sign of life for 1.5 s; killed"]
    assert any("the fork server died" in text for text in watch.texts("restart"))
    assert gone(seen["stopped"]) and all(map(gone, seen["pids"]))
    assert all(row["restarts"] >= 1 for row in watch.final.values())


def test_fork_server_stopped_while_it_starts(tmp_path, monkeypatch):
    """It has said nothing yet, so it has as long as any start may take."""
    monkeypatch.setattr("shoal.runtime.local.ANSWER_SECONDS", 0.5)
    seen = {}

    def act(control):
        pid = control.fork_server.process.pid
        if not seen and up(control) and control.total("env_steps") > 10:
            seen["killed"] = pid
            os.kill(pid, signal.SIGKILL)
        elif "killed" in seen and "stopped" not in seen and pid != seen["killed"]:
            seen["stopped"], seen["steps"] = pid, control.total("env_steps")
            os.kill(pid, signal.SIGSTOP)
            control.faults = Faults(start_seconds=1.0)
        elif pid != seen.get("stopped"):
            control.faults = Faults()  # its successor may take its time

    watch = Watch(lambda control: "stopped" in seen and control.total("env_steps") > seen["steps"] + 10, act, seconds=60)
    drive(beaters(actor=2), "local", tmp_path, watch)
    assert watch.reason == "until" and "no sign of life for 1 s; killed" in watch.texts("hang")
    assert gone(seen["stopped"])


class Laborious:
    """Every step computes for longer than the limit, without a beat; in its first life the third one never ends."""

    def __init__(self, me):
        self.me = me

    async def step(self):
        if self.me.incarnation:
            self.me.stats.add("env_steps")
            await any_of(timeout=0.01)
            return
        time.sleep(1.3 if self.me.stats.get("steps") < 2 else 300)
        self.me.stats.add("learner_steps")


def test_a_long_silence_raises_the_limit(tmp_path):
    program = Program("t")
    program.add("learner", Laborious)
    watch = Watch(lambda c: c.total("env_steps") > 5, seconds=60)
    drive(program, "local", tmp_path, watch, Faults(hang_seconds=1.0))
    assert watch.reason == "until"
    assert watch.final["learner-0"]["learner_steps"] == 2, "its second step was taken for a hang"
    (text,) = watch.texts("restart")  # and a real hang is noticed
    seconds = float(text.partition("no sign of life for ")[2].partition(" s")[0])
    assert 3 * 1.1 < seconds < 30


@pytest.mark.parametrize(("name", "value"), [
    ("exceptions_per_minute", 0), ("exceptions_per_minute", -1), ("deaths_without_step", 0), ("hang_seconds", 0.0),
    ("hang_seconds", math.nan), ("start_seconds", -3.0), ("start_seconds", 0.5)])
def test_senseless_faults_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"--faults.{name.replace('_', '-')} is {value}; it must be at least 1 "):
        Faults(**{name: value}).validate()


def test_sensible_faults_are_not():
    Faults().validate()
    Faults(hang_seconds=math.inf, start_seconds=math.inf, exceptions_per_minute=1, deaths_without_step=1).validate()


def test_cores_in_use_by_processes(tmp_path, monkeypatch):
    """A process that sleeps uses none, one that computes uses some; one that dies takes nothing back."""
    monkeypatch.setattr("shoal.runtime.core_use.STAT", tmp_path / "none")
    began, busy, idle = time.monotonic(), CoreUse(), CoreUse()
    codes = ("while True: pass", "import time; time.sleep(99)")
    worker, sleeper = (subprocess.Popen([sys.executable, "-c", code]) for code in codes)
    try:
        while processor_seconds(worker.pid) < 0.1:  # both have started
            time.sleep(0.02)
        assert math.isnan(busy.look([worker.pid], time.monotonic())) and math.isnan(idle.look([sleeper.pid], time.monotonic()))
        while busy.look([worker.pid], time.monotonic()) == 0.0:
            assert time.monotonic() < began + 60
            time.sleep(0.05)
        assert idle.look([sleeper.pid], time.monotonic()) < busy.look([worker.pid], time.monotonic()) < 1.5
    finally:
        for process in (worker, sleeper):
            process.kill()
            process.wait()
    assert 0.0 < busy.look([worker.pid], time.monotonic()) < 1.5


def stat(path, **ticks):
    """What /proc/stat says of cores: user, idle and iowait ticks of each (and some steal)."""
    lines = [f"{name} {user} 0 0 {idle} {iowait} 0 0 {steal} 0 0" for name, (user, idle, iowait, steal) in ticks.items()]
    path.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 0 0", *lines, "intr 5 0 0", "ctxt 9"]) + "\n")


def test_cores_that_anybody_uses_are_in_use(tmp_path, monkeypatch):
    """Other programs and what environments start count too; idle is idle, also with a disk at work; other cores are not ours."""
    monkeypatch.setattr("shoal.runtime.core_use.STAT", tmp_path / "stat")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2})
    use = CoreUse()
    stat(tmp_path / "stat", cpu0=(50, 900, 0, 0), cpu1=(0, 0, 0, 0), cpu2=(70, 70, 70, 0))
    assert math.isnan(use.look([], 10.0))
    stat(tmp_path / "stat", cpu0=(150, 900, 0, 0), cpu1=(100, 0, 0, 0), cpu2=(90, 100, 100, 20))
    assert use.look([], 11.0) == pytest.approx(1.4)  # all of the first; of the third 20 and 20 stolen of 100
    stat(tmp_path / "stat", cpu0=(150, 1000, 0, 0), cpu1=(200, 0, 0, 0), cpu2=(90, 150, 150, 20))
    assert use.look([], 12.0) == pytest.approx(0.7)
    stat(tmp_path / "stat", cpu0=(250, 1000, 0, 0), cpu1=(300, 0, 0, 0), cpu2=(190, 150, 150, 20))
    assert use.look([os.getpid()], 12.0 + 60) == pytest.approx(2.0)  # of the last minute only


def test_kernel_counts_somebody_elses_work():
    use, began = CoreUse(), time.monotonic()
    assert math.isnan(use.look([], began))
    with subprocess.Popen([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"]) as worker:
        assert worker.wait(60) == 0
    now = time.monotonic()
    assert use.look([], now) * (now - began) > 0.35


class Waits:
    """Starts slowly, then steps."""

    def __init__(self, me):
        self.me = me
        time.sleep(1.0)

    async def step(self):
        await any_of(timeout=0.01)
        self.me.stats.add("env_steps")


def test_cores_from_the_first_step(tmp_path):
    """The time in which everybody starts, and cores stand idle, is not counted."""
    seen = []

    def act(control):
        before, busy = control.total("env_steps"), control.surroundings()["cores_busy"]
        seen.append((before, busy, control._cores, control.total("env_steps")))  # it may step in between

    program = Program("t")
    program.add("actor", Waits)
    watch = drive(program, "local", tmp_path, Watch(lambda c: c.total("env_steps") > 10, act, seconds=60))
    assert watch.reason == "until"
    assert len({id(cores) for *_, cores, after in seen if not after}) > 1  # begun anew with every look ...
    assert all(math.isnan(busy) for _, busy, _, after in seen if not after)
    assert len({id(cores) for before, _, cores, _ in seen if before}) == 1  # ... until there was a step
    assert any(math.isfinite(busy) for before, busy, _, _ in seen if before)
