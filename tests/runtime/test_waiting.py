"""Waiting: any_of, deadlines, an error that names what everybody waits for, and a waiting program that costs nothing."""

import time

import psutil
import pytest

from shoal.core import any_of
from shoal.errors import Deadlock, ProgramError
from shoal.runtime import Program
from shoal.runtime.local import STOP_SECONDS
from shoal.slots import Field, Layout
from tests.runtime.harness import RUNTIMES, Watch, drive, up

LAYOUT = Layout({"x": Field((1,), "i8")})


class Ticker:
    def __init__(self, me, out, period):
        self.me, self.out, self.period = me, out, period

    async def step(self):
        began = time.monotonic()
        assert await any_of(timeout=self.period) is False
        self.me.stats.observe("data_age_seconds", time.monotonic() - began)
        self.out.publish({"x": [self.me.index]})


class Chooser:
    """Waits for whichever of two comes first, or a deadline."""

    def __init__(self, me, fast, slow):
        self.me, self.fast, self.slow, self.versions = me, fast, slow, [0, 0]
        self.into = LAYOUT.empty()

    async def step(self):
        came = await any_of(self.fast.newer_than(self.versions[0]), self.slow.newer_than(self.versions[1]), timeout=0.3)
        self.me.stats.add("episodes" if came else "env_steps")
        news = [self.fast.pull(self.into), self.slow.pull(self.into)]
        assert not came or news != self.versions
        self.versions = news


@pytest.mark.parametrize("kind", RUNTIMES)
def test_any_of(kind, tmp_path):
    """`any_of` wakes for the first of its waits, and at the deadline."""
    program = Program("t")
    fast, slow = program.broadcast("fast", LAYOUT), program.broadcast("slow", LAYOUT)
    program.add("fast", Ticker, out=fast.publisher, period=0.02)
    program.add("slow", Ticker, out=slow.publisher, period=0.11)
    program.add("chooser", Chooser, fast=fast.reader, slow=slow.reader)
    watch = drive(program, kind, tmp_path, Watch(lambda c: up(c) and c.total("episodes") >= 30))
    assert watch.reason == "until"
    assert watch.final["chooser-0"]["env_steps"] <= 3
    assert watch.wires["slow"]["version"] >= 2
    row = watch.final["fast-0"]
    assert 0.02 <= row["data_age_seconds/sum"] / row["data_age_seconds/count"] < 5
    assert watch.final["fast-0"]["wait_seconds/clock"] > 0.2


class Silent:
    def __init__(self, me, out):
        self.out = out

    async def step(self):
        await any_of(timeout=0.05)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_deadline_passes_when_nothing_comes(kind, tmp_path):
    program = Program("t")
    fast, slow = program.broadcast("fast", LAYOUT), program.broadcast("slow", LAYOUT)
    program.add("fast", Silent, out=fast.publisher)
    program.add("slow", Silent, out=slow.publisher)
    program.add("chooser", Chooser, fast=fast.reader, slow=slow.reader)
    watch = drive(program, kind, tmp_path, Watch(lambda c: c.total("env_steps") >= 2))
    assert watch.reason == "until" and watch.final["chooser-0"]["episodes"] == 0


class Stuck:
    def __init__(self, me, inbox, outbox):
        self.inbox, self.outbox = inbox, outbox

    async def step(self):
        await self.inbox.take(1)
        await self.outbox.slot()


def ring():
    program = Program("t")
    here, there = program.stream("here", LAYOUT), program.stream("there", LAYOUT)
    program.add("a", Stuck, inbox=here.source, outbox=there.sink)
    program.add("b", Stuck, inbox=there.source, outbox=here.sink)
    return program


def test_deadlock_names_the_waits(tmp_path):
    """A deadlock names what each role waits for."""
    with pytest.raises(Deadlock) as error:
        drive(ring(), "inline", tmp_path)
    assert "a-0 waits for 1 full slots of here" in str(error.value)
    assert "b-0 waits for 1 full slots of there" in str(error.value)


def test_endless_waits_can_be_stopped(tmp_path):
    began = []
    watch = drive(ring(), "local", tmp_path, Watch(lambda c: up(c) and (began.append(time.monotonic()) or True)))
    assert watch.reason == "until"
    assert time.monotonic() - began[0] < STOP_SECONDS  # they were asked to stop, and did: nobody was killed


class Waiting:
    """Waits for weights that never come."""

    def __init__(self, me, weights):
        self.weights = weights

    async def step(self):
        await self.weights.newer_than(0)


class Mute:
    def __init__(self, me, weights, requests):
        self.requests = requests

    async def step(self):
        await self.requests.take(most=4)


class Asking:
    def __init__(self, me, server):
        self.server = server

    async def step(self):
        await self.server.ask({"x": [1]})


def test_waiting_costs_nothing(tmp_path):
    """Under 1 % of a core on an idle machine; the bound is generous because this one may be busy."""
    program = Program("t")
    weights, call = program.broadcast("weights", LAYOUT), program.call("call", LAYOUT, LAYOUT)
    program.add("waiting", Waiting, weights=weights.reader, replicas=3)
    program.add("together", Waiting, weights=weights.reader, replicas=2, place="both")
    program.add("asking", Asking, server=call.client, replicas=2, place="threads")
    program.threaded("threads")
    program.add("mute", Mute, weights=weights.publisher, requests=call.server)
    readings, told = [], []

    def act(control):
        if up(control) and not told:
            told.append(watch.age)
            for role in ("asking", "waiting", "together"):  # commands rouse their loops, once
                control.pause(role)
                control.resume(role)
        if told and watch.age > told[0] + 0.5:
            pids = [child.pid for child in control.children.values()]
            if not readings or watch.age - readings[0][0] > 3:
                times = [psutil.Process(pid).cpu_times() for pid in pids]
                mine = psutil.Process().cpu_times()
                readings.append((watch.age, sum(t.user + t.system for t in times), mine.user + mine.system))

    watch = Watch(lambda c: len(readings) >= 2, act)
    drive(program, "local", tmp_path, watch)
    (t0, places0, me0), (t1, places1, me1) = readings
    assert (places1 - places0) / (t1 - t0) < 0.03
    assert (me1 - me0) / (t1 - t0) < 0.05  # the supervisor, together with this test's session


@pytest.mark.parametrize("broken", ["twice", "nobody", "scalar", "other", "replicas", "clock", "threaded"])
def test_wrong_graph_is_refused(broken):
    program = Program("t")
    with pytest.raises(ProgramError):
        if broken == "twice":
            program.stream("s", LAYOUT)
            program.stream("s", LAYOUT)
        elif broken == "nobody":
            program.add("a", Waiting, weights=program.broadcast("w", LAYOUT).reader)
            from shoal.slots import InlineAllocator

            program.build(InlineAllocator())
        elif broken == "scalar":
            program.stream("s", Layout({"x": Field((), "f4")}))
        elif broken == "other":
            program.add("a", Waiting, weights=Program("other").broadcast("w", LAYOUT).reader)
        elif broken == "replicas":
            program.add("a", Waiting, replicas=(2, 1, 3), weights=program.broadcast("w", LAYOUT).reader)
        elif broken == "clock":
            program.broadcast("clock", LAYOUT)
        elif broken == "threaded":
            program.threaded("nowhere")
