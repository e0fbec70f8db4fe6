"""Faults, by really doing them: kills, hangs, exceptions."""

import contextlib
import os
import re
import signal
import time

import psutil
import pytest

from shoal.core import any_of
from shoal.errors import RoleFailed
from shoal.runtime import Faults, Program
from shoal.slots import Field, Layout
from tests.runtime.harness import RUNTIMES, Killer, Watch, drive, kill, up

LAYOUT = Layout({"x": Field((1,), "i8")})


class Beater:
    """Steps, and says what it is."""

    def __init__(self, me, weights=None, pause=0.005):
        self.me, self.pause = me, pause
        me.stats.set("eval_return", float(me.rng().integers(2**40)))
        me.stats.set("eval_version", os.getpid())

    async def step(self):
        self.me.stats.add("env_steps")
        await any_of(timeout=self.pause)


def beaters(**replicas):
    program = Program("t", seed=3)
    for name, count in replicas.items():
        program.add(name, Beater, replicas=count)
    return program


# ---------------------------------------------------------------------------------------------- deaths
def test_totals_never_run_backwards(tmp_path):
    """Named in its process's title, with another seed in each life, and counters that go on."""
    program = beaters(actor=2, learner=1)
    killer = Killer(("actor-0", "actor-1", "learner-0"), times=6, every=30)
    totals, titles, seeds = [], set(), []

    def act(control):
        totals.append(control.total("env_steps"))
        seeds.extend((name, row["incarnation"], row["eval_return"]) for name, row in control.snapshot().items() if row["alive"])
        for child in control.children.values():
            if child.pid and child.ready:
                with contextlib.suppress(psutil.Error):  # it was killed a moment ago
                    titles.add(" ".join(psutil.Process(child.pid).cmdline()))
        killer(control)

    watch = drive(program, "local", tmp_path, Watch(killer.done, act))
    assert watch.reason == "until"
    assert totals == sorted(totals) and totals[-1] > 180
    assert {"shoal: actor 0", "shoal: actor 1", "shoal: learner 0"} <= {title.strip() for title in titles}
    assert [row["restarts"] for row in watch.final.values()] == [2, 2, 2]
    assert len({seed for _, _, seed in seeds}) == len({(name, life) for name, life, _ in seeds}) == 9
    assert all(re.search(r"killed by SIGKILL; restarted \(\d so far\)", text) for text in watch.texts("restart"))


class LongBirth(Beater):
    """Takes its time to come back."""

    def __init__(self, me):
        super().__init__(me)
        if me.incarnation and me.index == 0:
            time.sleep(1.0)


def test_others_go_on(tmp_path):
    """The others go on while one is being replaced."""
    program = Program("t", seed=3)
    program.add("actor", LongBirth, replicas=3)
    seen = {}

    def act(control):
        rows = control.snapshot()
        if not seen and up(control) and control.total("env_steps") > 30:
            seen["pid"] = kill(control, "actor-0")
        elif "pid" in seen and not rows["actor-0"]["alive"]:  # noticed, and not back yet
            steps = [rows[name]["env_steps"] for name in ("actor-1", "actor-2")]
            seen.setdefault("first", steps)
            seen["last"] = steps

    watch = drive(program, "local", tmp_path, Watch(lambda c: "last" in seen and up(c) and c.snapshot()["actor-0"]["alive"], act))
    assert watch.reason == "until" and [row["restarts"] for row in watch.final.values()] == [1, 0, 0]
    assert all(last > first for first, last in zip(seen["first"], seen["last"], strict=True))


@pytest.mark.parametrize("kind", RUNTIMES)
def test_same_seed_gives_the_same_streams(kind, tmp_path):
    rows = [drive(beaters(actor=2, learner=1), kind, tmp_path, Watch(lambda c: c.total("alive") == 3)).final for _ in range(2)]
    first, second = ([row["eval_return"] for row in final.values()] for final in rows)
    assert first == second and len(set(first)) == 3


class Failing:
    """Fails after some steps, in its constructor, or dies in native code."""

    def __init__(self, me, how, steps=0):
        self.me, self.how, self.steps = me, how, steps
        print("here I am")
        if how == "constructor":
            raise ValueError("a bad beginning")

    async def step(self):
        if self.me.stats.get("steps") - self.steps * self.me.incarnation < self.steps:
            await any_of(timeout=0.001)
            return
        if self.how == "exception":
            raise ValueError("a bad step")
        if self.how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "exit":
            os._exit(0)
        if self.how == "memory":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "fail":
            self.me.fail("it makes no sense to go on")
            self.me.fail("really")
            await any_of(timeout=0.01)


@pytest.mark.parametrize(("how", "steps", "why"), [
    ("constructor", 0, "failed 3 times within a minute"), ("exception", 0, "failed 3 times within a minute"),
    ("exception", 20, "failed 3 times within a minute"), ("crash", 0, "failed 3 times within a minute"),
    ("exit", 0, "failed 3 times within a minute"), ("fail", 3, "no sense to go on")])
def test_a_role_that_cannot_run_ends_the_run(how, steps, why, tmp_path):
    program = beaters(actor=1)
    program.add("bad", Failing, how=how, steps=steps)
    watch = Watch()
    with pytest.raises(RoleFailed) as error:
        drive(program, "local", tmp_path, watch)
    text = str(error.value)
    assert why in text and watch.error and why in watch.error
    if how in ("constructor", "exception"):
        assert "Traceback" in text and "ValueError: a bad" in text
    if how != "fail":
        log = tmp_path / "logs" / "bad-0.log"
        assert str(log) in text
        assert log.read_text().count("here I am") == 3
        if how == "crash":
            assert "Fatal Python error: Segmentation fault" in log.read_text()
    assert len(watch.texts("restart")) == (2 if how != "fail" else 0)


def test_three_deaths_without_a_step(tmp_path):
    program = beaters(actor=1)
    program.add("bad", Failing, how="exception")
    with pytest.raises(RoleFailed, match="died 2 times without completing a step"):
        drive(program, "local", tmp_path, faults=Faults(exceptions_per_minute=100, deaths_without_step=2))


def test_deaths_from_outside(tmp_path):
    """Also before a step is completed: an evaluator's first one may take longer than the killer's patience."""
    program = beaters(actor=1)
    program.add("waiting", Stepless)
    kills = []

    def act(control):
        if up(control, "waiting-0") and control.children["waiting-0"].pid not in kills:
            kills.append(kill(control, "waiting-0"))

    watch = drive(program, "local", tmp_path, Watch(lambda c: len(kills) > 4, act))
    assert watch.reason == "until" and watch.final["waiting-0"]["restarts"] >= 4


class Stepless:
    def __init__(self, me):
        pass

    async def step(self):
        await any_of(timeout=100)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_lambdas_and_local_classes(kind, tmp_path):
    """Lambdas and local classes are roles and arguments."""

    class Local:
        def __init__(self, me, function, table):
            self.me, self.function, self.table = me, function, table

        async def step(self):
            self.me.stats.add("env_steps", self.function(self.table["two"]))
            await any_of(timeout=0.001)

    offset = 3
    program = Program("t")
    program.add("local", Local, function=lambda x: x + offset, table={"two": 2})
    program.add("made", lambda me: Local(me, lambda x: 0, {"two": 2}))
    watch = drive(program, kind, tmp_path, Watch(lambda c: c.total("env_steps") >= 50))
    assert watch.reason == "until" and watch.final["local-0"]["env_steps"] % 5 == 0


def test_what_cannot_be_unpickled_is_told(tmp_path):
    program = Program("t")
    program.add("bad", Beater, pause=Unloadable())
    with pytest.raises(RoleFailed, match="cannot be loaded here"):
        drive(program, "local", tmp_path)


def refuse():
    raise RuntimeError("cannot be loaded here")


class Unloadable:
    def __reduce__(self):
        return refuse, ()


# ---------------------------------------------------------------------------------------------- hangs
class Hanging:
    """Stops giving signs of life after a while, once."""

    def __init__(self, me, seconds):
        self.me, self.seconds = me, seconds
        if self.seconds == "constructor" and me.incarnation == 0:
            time.sleep(60)

    async def step(self):
        self.me.stats.add("env_steps")
        if self.seconds == "step" and self.me.incarnation == 0 and self.me.stats.get("steps") == 5:
            time.sleep(60)
        if self.seconds == "beats" and self.me.stats.get("steps") == 5:
            for _ in range(30):
                time.sleep(0.1)
                self.me.beat()
        if self.seconds == "first" and self.me.stats.get("steps") == 0:
            time.sleep(2.5)  # compilation
        if self.seconds == "late" and self.me.stats.get("steps") == 0:
            await any_of(timeout=2.0)  # the first batch
            time.sleep(1.2)            # and the first update
        await any_of(timeout=0.01)


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("how", ["SIGSTOP", "step", "constructor"])
def test_a_role_that_hangs_is_replaced(how, threaded, tmp_path):
    program = beaters(actor=1)
    program.add("hanging", Hanging, seconds=how, place="home")
    program.add("other", Beater, place="home")
    if threaded:
        program.threaded("home")
    stopped = []

    def act(control):
        if how == "SIGSTOP" and not stopped and up(control) and control.total("env_steps") > 60:
            stopped.append(kill(control, "home", signal.SIGSTOP))

    watch = Watch(lambda c: c.snapshot()["hanging-0"]["restarts"] and c.snapshot()["hanging-0"]["env_steps"] > 20, act, seconds=20)
    drive(program, "local", tmp_path, watch, Faults(hang_seconds=1.0, start_seconds=2.0 if how == "constructor" else 60))
    assert watch.reason == "until"
    assert watch.final["other-0"]["restarts"] == 1 and watch.final["actor-0"]["restarts"] == 0
    assert any("no sign of life for" in text or "not started within 2 s" in text for text in watch.texts("restart"))


def test_what_is_not_hanging(tmp_path):
    """A role that waits, beats or compiles does not hang."""
    program = Program("t")
    weights = program.broadcast("weights", LAYOUT)
    program.add("beats", Hanging, seconds="beats")
    program.add("compiles", Hanging, seconds="first")
    program.add("waits", Reader, weights=weights.reader)
    program.add("publisher", Beater, weights=weights.publisher)
    watch = Watch(lambda c: watch.age > 4 and c.snapshot()["beats-0"]["env_steps"] > 10)
    drive(program, "local", tmp_path, watch, Faults(hang_seconds=1.0))
    assert watch.reason == "until"
    assert not watch.texts("restart")


def test_first_step_is_timed_after_its_wait(tmp_path):
    program = Program("t")
    program.add("late", Hanging, seconds="late")
    watch = Watch(lambda c: c.snapshot()["late-0"]["env_steps"] > 10)
    drive(program, "local", tmp_path, watch, Faults(start_seconds=2.5))
    assert watch.reason == "until" and not watch.texts("restart")


class Reader:
    def __init__(self, me, weights):
        self.weights = weights

    async def step(self):
        await self.weights.newer_than(0)


# ---------------------------------------------------------------------------------------------- inline
class Noisy:
    """Draws numbers, sends them, and remembers what came when."""

    def __init__(self, me, out, source, trace):
        self.me, self.out, self.source, self.trace, self.rng = me, out, source, trace, me.rng()

    async def step(self):
        slot = await self.out.slot()
        slot.data["x"][0] = self.rng.integers(1 << 40)
        slot.send()
        batch = await self.source.take(2)
        self.trace.append((self.me.index, self.me.stats.get("steps"), batch["x"].tolist()))


def test_inline_runs_are_the_same(tmp_path):
    """Inline runs are the same to the last step."""
    traces = []
    for _ in range(2):
        trace = []
        program = Program("t", seed=5)
        items = program.stream("items", LAYOUT, depth=4)
        program.add("noisy", Noisy, out=items.sink, source=items.source, trace=trace, replicas=3)
        program.add("spare", Spare, out=items.sink)
        drive(program, "inline", tmp_path, Watch(lambda c: c.total("steps") >= 200))
        traces.append(trace)
    assert traces[0] == traces[1] and len(traces[0]) > 50


class Spare:
    def __init__(self, me, out):
        self.me, self.out = me, out

    async def step(self):
        slot = await self.out.slot()
        slot.data["x"][0] = self.me.stats.get("steps")
        slot.send()


def test_exception_of_a_role(tmp_path):
    """An exception of a role is raised as it is."""
    program = beaters(actor=1)
    program.add("bad", Failing, how="exception")
    watch = Watch()
    with pytest.raises(ValueError, match="a bad step"):
        drive(program, "inline", tmp_path, watch)
    assert watch.error == "ValueError: a bad step"
