"""Places (several roles in one process) and the control handle (elastic graphs), on both runtimes."""

import os
import threading
import time

import numpy as np
import pytest

from shoal.core import any_of
from shoal.errors import ProgramError
from shoal.runtime import CONTROL, Program
from shoal.slots import Field, Layout
from tests.runtime.harness import RUNTIMES, Files, Killer, Watch, drive, up

LAYOUT = Layout({"x": Field((1,), "i8"), "who": Field((1,), "i8")})


class Producer:
    """Sends who and where it is; the thread and the process are told through counters."""

    def __init__(self, me, out, pause=0.0, model=None):
        self.me, self.out, self.pause, self.model, self.sent = me, out, pause, model, 0
        me.stats.set("eval_version", os.getpid())

    async def step(self):
        slot = await self.out.slot()
        slot.data["x"][0], slot.data["who"][0] = self.sent, self.me.index
        slot.send()
        self.sent += 1
        self.me.stats.add("env_steps")
        self.me.stats.set("eval_std", threading.get_ident() % 2**50)
        if self.model is not None:
            self.model.append(self.me.name)
        if self.pause:
            await any_of(timeout=self.pause)


class Consumer:
    def __init__(self, me, source, model=None):
        self.me, self.source, self.model = me, source, model
        me.stats.set("eval_version", os.getpid())

    async def step(self):
        await self.source.take(1)
        self.me.stats.add("samples_consumed")
        self.me.stats.set("eval_std", threading.get_ident() % 2**50)
        if self.model is not None:
            self.me.stats.set("episodes", len(self.model))


@pytest.mark.parametrize("kind", RUNTIMES)
@pytest.mark.parametrize("threaded", [False, True])
def test_roles_in_one_place(kind, threaded, tmp_path):
    """Roles in one place share a process and objects."""
    program = Program("t")
    items = program.stream("items", LAYOUT)
    model = []  # one object in the place, shared by all that hold it
    program.add("producer", Producer, out=items.sink, replicas=2, place="home", model=model)
    program.add("consumer", Consumer, source=items.source, place="home", model=model)
    if threaded:
        program.threaded("home")
    watch = drive(program, kind, tmp_path, Watch(lambda c: c.total("samples_consumed") >= 200))
    assert watch.reason == "until"
    rows = [watch.final[name] for name in ("producer-0", "producer-1", "consumer-0")]
    assert len({row["eval_version"] for row in rows}) == 1
    assert rows[2]["episodes"] >= 200
    assert len({row["eval_std"] for row in rows}) == (3 if threaded and kind == "local" else 1)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_place_dies_and_restarts_as_a_unit(threaded, tmp_path):
    program = Program("t")
    items = program.stream("items", LAYOUT)
    program.add("producer", Producer, out=items.sink, replicas=2, place=lambda i: f"bundle-{i}")
    program.add("consumer", Consumer, source=items.source, replicas=2, place=lambda i: f"bundle-{i}")
    if threaded:
        program.threaded("bundle-0")
        program.threaded("bundle-1")
    killer = Killer(("bundle-0", "bundle-1"), times=4, progress="samples_consumed", every=50)
    watch = drive(program, "local", tmp_path, Watch(killer.done, killer))
    assert watch.reason == "until" and watch.unbalanced == 0
    for name in ("producer-0", "consumer-0", "producer-1", "consumer-1"):
        assert watch.final[name]["restarts"] == 2 and watch.final[name]["incarnation"] == 2


class Long:
    """Computes for long without waiting."""

    def __init__(self, me):
        self.me = me

    async def step(self):
        time.sleep(0.2)


def test_threads_run_beside_a_busy_role(tmp_path):
    program = Program("t")
    items = program.stream("items", LAYOUT)
    program.add("producer", Producer, out=items.sink, place="home", pause=0.005)
    program.add("consumer", Consumer, source=items.source, place="home")
    program.add("long", Long, place="home")
    program.threaded("home")
    rows = {}

    def act(control):  # commands rouse every thread, once
        control.pause("producer") if watch.age < 0.2 else control.resume("producer")
        rows.update(control.snapshot())

    watch = Watch(lambda c: c.total("samples_consumed") >= 60, act)
    drive(program, "local", tmp_path, watch)
    assert watch.reason == "until"
    assert rows["consumer-0"]["steps"] > 4 * rows["long-0"]["steps"]
    assert rows["consumer-0"]["busy_seconds"] < 0.3 * watch.age


# ---------------------------------------------------------------------------------------------- the control handle
class Coordinator:
    """Plays a script of kept_settings through the control handle; each is carried out when it returns."""

    def __init__(self, me, control, script, books):
        self.me, self.control, self.script, self.books, self.at, self.marks = me, control, script, books, 0, {}

    async def step(self):
        if self.at == len(self.script):
            assert self.told
            self.me.finish("done")
            await any_of(timeout=5)
            return
        request = self.script[self.at]
        self.at += 1
        name, *arguments = request
        if name == "check":
            for patience in range(250, -1, -1):  # a busy machine may keep a role from a step for a while
                await any_of(timeout=0.08)
                try:
                    return arguments[0](self.books.data, self.marks)
                except AssertionError:
                    remember(self.books.data, self.marks)
                    if not patience:
                        raise
        values = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        try:
            await getattr(self.control, name)(*arguments, **values)
        except ProgramError as error:
            self.me.note(str(error))

    def set(self, told):
        self.told = told


class Worker:
    """Counts its steps in shared memory, where the coordinator's checks can see them."""

    def __init__(self, me, books, out):
        self.me, self.books, self.out, self.lr, self.drained = me, books.data, out, 1.0, False
        self.weight = np.array([float(me.index)])
        self.books["born"][me.index] += 1
        self.books["lr"][me.index] = self.lr

    async def step(self):
        assert not self.drained
        self.books["steps"][self.me.index] += 1
        self.books["weight"][self.me.index] = self.weight[0]
        slot = await self.out.slot()
        slot.data["who"][0] = self.me.index
        slot.send()
        self.me.stats.add("env_steps")
        await any_of(timeout=0.001)

    def set(self, lr):
        self.lr = self.books["lr"][self.me.index] = lr

    def state(self):
        return {"weight": self.weight}

    def load(self, state):
        self.weight = state["weight"].copy()

    def drain(self):
        self.drained = True
        self.books["drained"][self.me.index] += 1


class Barrier:
    """Goes on with the members that are there."""

    def __init__(self, me, source):
        self.me, self.source = me, source

    async def step(self):
        batch = await self.source.take_each()
        self.me.stats.add("samples_consumed")
        self.me.stats.set("eval_episodes", len(batch["who"]))


FIELDS = {name: Field((4,), "f8") for name in ("born", "steps", "lr", "weight", "drained")}


def remember(books, marks):
    marks["steps"] = books["steps"].copy()


def expect(**expected):
    """A check of the books: `going` are those whose steps grow from one check to the next."""

    def check(books, marks):
        steps = books["steps"].copy()
        going = [k for k in range(4) if steps[k] > marks["steps"][k]]
        for name, value in expected.items():
            actual = going if name == "going" else books[name].tolist()
            assert actual == value, f"{name} is {actual}, not {value}"
        remember(books, marks)

    return check


SCRIPT = [
    ("check", remember), ("check", expect(going=[0, 1], born=[1, 1, 0, 0])),
    ("scale", "worker", 4), ("check", expect(born=[1, 1, 1, 1])), ("check", expect(going=[0, 1, 2, 3])),
    ("scale", "worker", 1), ("check", expect(drained=[0, 1, 1, 1])), ("check", expect(going=[0])),
    ("scale", "worker", 2), ("check", expect(born=[1, 2, 1, 1])), ("check", expect(going=[0, 1])),
    ("pause", "worker"), ("check", remember), ("check", expect(going=[])),
    ("resume", "worker-1"), ("check", expect(going=[1])), ("resume", "worker"), ("check", expect(going=[0, 1])),
    ("set", "worker", {"lr": 0.5}), ("check", expect(lr=[0.5, 0.5, 1.0, 1.0])),
    ("set", "worker-1", {"lr": 0.25}), ("check", expect(lr=[0.5, 0.25, 1.0, 1.0])),
    ("copy_state", "worker-1", "worker-0"), ("check", remember), ("check", expect(weight=[1.0, 1.0, 2.0, 3.0])),
    ("set", "worker", {"nonsense": 1}), ("set", "barrier", {"lr": 1}), ("scale", "worker", 9), ("scale", "nobody", 1),
    ("copy_state", "barrier-0", "worker-0"), ("copy_state", "worker-3", "worker-0"),
    ("set", "coordinator", {"told": 1}),  # of itself: it does not wait for its own obedience
]


@pytest.mark.parametrize(("kind", "home"), [("inline", None), ("local", None), ("local", "all together"),
                                            ("local", "with the barrier")])
def test_control_requests_are_carried_out(kind, home, tmp_path):
    program = Program("t", store=Files())
    items = program.stream("items", LAYOUT, full="drop_oldest")  # a worker that was resumed alone must not wait for the barrier
    books = program.shared("books", Layout(FIELDS))
    place = None if home is None else (lambda i: "home") if home == "all together" else (lambda i: "home" if i % 2 else f"own-{i}")
    program.add("worker", Worker, books=books.view, out=items.sink, replicas=(1, 2, 4), place=place)
    program.add("barrier", Barrier, source=items.source, place="home" if home else None)
    program.add("coordinator", Coordinator, control=CONTROL, script=SCRIPT, books=books.view)
    watch = drive(program, kind, tmp_path)
    assert watch.reason == "done", watch.texts("restart")
    assert not watch.texts("restart")  # no assertion failed, and no role died of a wrong request
    notes = "\n".join(watch.texts("note"))
    for part in ("set(nonsense=1) failed", "has no set()", "1 to 4 replicas, not 9", "no role nobody", "no state to copy",
                 "worker-3 is not running"):
        assert part in notes, notes
    assert watch.final["barrier-0"]["samples_consumed"] > 50
    assert watch.final["barrier-0"]["eval_episodes"] == 2


@pytest.mark.parametrize("kind", RUNTIMES)
def test_a_pause_does_not_wait_for_the_step(kind, tmp_path):
    """worker-1 is ahead and waits within its step for the barrier, which waits for worker-0, which is paused already."""
    program = Program("t", store=Files())
    items, books = program.stream("items", LAYOUT), program.shared("books", Layout(FIELDS))
    script = [("pause", "worker-0"), ("check", remember), ("check", remember), ("pause", "worker"), ("check", remember),
              ("check", expect(going=[])), ("resume", "worker"), ("check", expect(going=[0, 1])),
              ("set", "coordinator", {"told": 1})]
    program.add("worker", Worker, books=books.view, out=items.sink, replicas=2)
    program.add("barrier", Barrier, source=items.source)
    program.add("coordinator", Coordinator, control=CONTROL, script=script, books=books.view)
    watch = drive(program, kind, tmp_path)
    assert watch.reason == "done" and not watch.texts("restart")


def test_settings_hold_for_a_restarted_role(tmp_path):
    """A role that was paused or given values, and is then killed, comes back paused and with these values."""
    program = Program("t", store=Files())
    items, books = program.stream("items", LAYOUT, full="drop_oldest"), program.shared("books", Layout(FIELDS))
    program.add("worker", Worker, books=books.view, out=items.sink, replicas=2)
    program.add("barrier", Barrier, source=items.source)
    killer = Killer(("worker-0", "worker-1"), times=2, every=20)
    seen = {}

    def act(control):
        if up(control) and "told" not in seen:
            control.set("worker", lr=0.125)
            control.pause("worker-1", done=lambda result, error: seen.update(told=True))
            seen["told"] = False
        if seen.get("told"):
            killer(control)
        if killer.kills == 2 and killer.done(control) and "at" not in seen:
            seen["at"], seen["steps"] = watch.age, control.snapshot()["worker-1"]["steps"]
            seen["lr"] = books.attach("view", 0, 0).data["lr"].tolist()
        seen["now"] = control.snapshot()["worker-1"]["steps"]

    watch = Watch(lambda c: "at" in seen and watch.age > seen["at"] + 0.5, act)
    drive(program, "local", tmp_path, watch)
    assert watch.reason == "until"
    assert seen["lr"][:2] == [0.125, 0.125]
    assert seen["now"] == seen["steps"] and watch.final["worker-1"]["incarnation"] == 1


class Blocked:
    """Waits within its step for something that never comes."""

    def __init__(self, me, weights):
        self.me, self.weights = me, weights

    async def step(self):
        await self.weights.newer_than(0)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_role_that_waits_for_ever(kind, tmp_path):
    """A role that waits for ever is drained in the end."""
    program = Program("t")
    weights = program.broadcast("weights", LAYOUT)
    program.add("blocked", Blocked, weights=weights.reader, replicas=(0, 2, 2))
    program.add("publisher", Publisherless, weights=weights.publisher)
    seen = {}

    def act(control):
        if up(control) and not seen:
            seen["told"] = True
            control.scale("blocked", 0, 0.5, done=lambda result, error: seen.update(gone=watch.age))

    watch = Watch(lambda c: "gone" in seen, act)
    drive(program, kind, tmp_path, watch)
    assert watch.reason == "until" and watch.final["blocked-1"]["alive"] == 0


class Publisherless:
    def __init__(self, me, weights):
        pass

    async def step(self):
        await any_of(timeout=0.05)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_checkpoints_are_loaded_at_a_restart(kind, tmp_path):
    program = Program("t", store=Files())
    items = program.stream("items", LAYOUT)
    program.add("counter", Counter, out=items.sink, replicas=2)
    program.add("consumer", Consumer, source=items.source)
    killer = Killer(("counter-0",), times=1, every=1)
    seen = {}

    def act(control):
        if up(control) and not seen and control.total("env_steps") > 20:
            seen["asked"] = True
            control.checkpoint(tmp_path / "one")
        elif watch.saves and kind == "local":
            killer(control)

    watch = Watch(lambda c: watch.saves and (kind == "inline" or (killer.done(c) and c.snapshot()["counter-0"]["episodes"])), act)
    drive(program, kind, tmp_path, watch)
    assert watch.reason == "until" and watch.saves == [(tmp_path / "one", True)]
    for name in ("counter-0", "counter-1"):
        state = Files().load(tmp_path / "one" / f"{name}.safetensors")
        assert state["begun"] == state["ended"] > 0  # not in the middle of a step
    if kind == "local":
        saved = Files().load(tmp_path / "one" / "counter-0.safetensors")
        assert watch.final["counter-0"]["episodes"] == saved["ended"]  # what it began with


class Counter:
    def __init__(self, me, out):
        self.me, self.out, self.begun, self.ended = me, out, 0, 0

    async def step(self):
        self.begun += 1
        slot = await self.out.slot()
        await any_of(timeout=0.001)
        slot.send()
        self.ended += 1
        self.me.stats.add("env_steps")

    def state(self):
        return {"begun": np.array(self.begun), "ended": np.array(self.ended)}

    def load(self, state):
        self.begun, self.ended = int(state["begun"]), int(state["ended"])
        self.me.stats.set("episodes", self.ended)
