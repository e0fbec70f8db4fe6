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
from shoal.runtime.cores import CoreUse, processor_seconds
from tests.runtime.harness import Watch, drive, gone, up
from tests.runtime.test_faults import beaters


def test_a_stopped_fork_server_is_replaced(tmp_path, monkeypatch):
    """It reports no deaths and starts nobody, so everybody is started again by another one."""
    monkeypatch.setattr("shoal.runtime.local.ANSWER_SECONDS", 0.5)
    monkeypatch.setattr("shoal.runtime.local.ASK_SECONDS", 0.2)
    seen = {}

    def act(control):
        if not seen and up(control) and control.total("env_steps") > 10:
            seen["stopped"], seen["pids"] = control.nursery.process.pid, [child.pid for child in control.children.values()]
            os.kill(seen["stopped"], signal.SIGSTOP)
            os.kill(seen["pids"][0], signal.SIGKILL)  # of which nobody hears
        elif seen and "steps" not in seen and control.nursery.process.pid != seen["stopped"] and up(control):
            seen["steps"] = control.total("env_steps")

    def until(control):
        return "steps" in seen and control.total("alive") == 2 and control.total("env_steps") > seen["steps"] + 10

    watch = Watch(until, act, seconds=60)
    drive(beaters(actor=2), "local", tmp_path, watch, Faults(hang_seconds=1.5))
    assert watch.reason == "until"
    assert watch.texts("hang") == ["no sign of life for 1.5 s; it is killed"]
    assert any("the fork server died" in text for text in watch.texts("restart"))
    assert gone(seen["stopped"]) and all(map(gone, seen["pids"]))
    assert all(row["restarts"] >= 1 for row in watch.final.values())


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


def test_whoever_computes_for_longer_than_the_limit_and_comes_back_is_given_more_the_next_time(tmp_path):
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
    with pytest.raises(ConfigError, match=rf"faults.{name}={value} is not possible: .*--faults.{name.replace('_', '-')} 1 or more"):
        Faults(**{name: value}).validate()


def test_sensible_faults_are_not():
    Faults().validate()
    Faults(hang_seconds=math.inf, start_seconds=math.inf, exceptions_per_minute=1, deaths_without_step=1).validate()


def test_cores_in_use_are_what_the_kernel_counts():
    """A process that sleeps uses none, one that computes uses some; one that dies takes nothing back."""
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
