"""The stream wire: order, back-pressure, drop-oldest, and real kills on both sides."""

import time

import numpy as np
import pytest

from shoal.core import any_of
from shoal.errors import ProgramError, WireError
from shoal.runtime import Program
from shoal.runtime.wires.stream import StreamWire
from shoal.slots import Field, Layout
from tests.runtime.harness import RUNTIMES, Killer, Watch, drive, kill
from tests.runtime.test_crashes import built, now

LAYOUT = Layout({"number": Field((1,), "i8"), "producer": Field((1,), "i8"), "data": Field((3, 4), "f4", join=1)})
BIG = Layout({"number": Field((1,), "i8"), "data": Field((1 << 18,), "i8")})


class Producer:
    """Sends numbered slots."""

    def __init__(self, me, out, limit=None, pause=0.0):
        self.me, self.out, self.limit, self.pause, self.sent = me, out, limit, pause, 0

    async def step(self):
        if self.limit is not None and self.sent >= self.limit:
            await any_of(timeout=0.05)
            return
        slot = await self.out.slot()
        slot.data["number"][0] = self.sent
        slot.data["producer"][0] = self.me.index
        slot.data["data"][:] = self.sent
        slot.send()
        self.sent += 1
        self.me.stats.add("env_steps")
        if self.pause:
            await any_of(timeout=self.pause)


class Consumer:
    """Checks that slots of each producer come whole and in order."""

    def __init__(self, me, source, count=1, pause=0.0):
        self.me, self.source, self.count, self.pause = me, source, count, pause
        self.next = {}

    async def step(self):
        batch = await self.source.take(self.count)
        for k in range(self.count):
            number, producer = int(batch["number"][k]), int(batch["producer"][k])
            assert (batch["data"][:, 4 * k : 4 * k + 4] == number).all()
            assert number >= self.next.get(producer, 0)
            self.next[producer] = number + 1
        self.me.stats.add("samples_consumed", self.count)
        if self.pause:
            await any_of(timeout=self.pause)


@pytest.mark.parametrize("kind", RUNTIMES)
@pytest.mark.parametrize(("producers", "consumers", "count"), [(1, 1, 1), (3, 1, 2), (4, 2, 3)])
def test_everything_arrives_in_order(kind, producers, consumers, count, tmp_path):
    """Everything sent arrives whole and in order."""
    program = Program("t")
    stream = program.stream("items", LAYOUT, depth=2)
    program.add("producer", Producer, out=stream.sink, replicas=producers)
    program.add("consumer", Consumer, source=stream.source, count=count, replicas=consumers)
    watch = drive(program, kind, tmp_path, Watch(until=lambda c: c.total("samples_consumed") >= 600))
    assert watch.reason == "until"
    assert watch.wires["items"]["written"] >= 600
    assert watch.unbalanced == 0


def test_paired_keep_their_consumer():
    stream = built(StreamWire("items", LAYOUT, depth=2, paired=True), sink=4, source=2)
    sources = [stream.attach("source", c, 0) for c in range(2)]
    for sink in (3, 0, 1, 2, 0):
        now(stream.attach("sink", sink, 0).slot()).send()
    for source, members in zip(sources, ([0, 2, 0], [1, 3]), strict=True):
        now(source.take(len(members)))
        assert source.last_members == members
        assert not source.waiting(1)


def test_paired_needs_enough_producers():
    with pytest.raises(ProgramError, match="1 producers cannot serve 2 consumers in pairs"):
        built(StreamWire("items", LAYOUT, paired=True), sink=1, source=2)


@pytest.mark.parametrize(("full", "count"), [("block", 1), ("block", 2), ("drop_oldest", 1)])
def test_lanes_are_served_in_turns(full, count):
    """The first producer fills its lane and keeps it full; the second one's only slot is in the next batch."""
    stream = built(StreamWire("items", LAYOUT, depth=6, full=full), sink=2, source=1)
    many, few, source = stream.attach("sink", 0, 0), stream.attach("sink", 1, 0), stream.attach("source", 0, 0)
    for sink in 6 * [many]:
        now(sink.slot()).send()
    assert now(source.take(count)) is not None and source.last_members == count * [0]
    now(few.slot()).send()
    now(many.slot()).send()
    assert now(source.take(count)) is not None and 1 in source.last_members


@pytest.mark.parametrize("seed", range(20))
def test_every_lane_has_its_turn(seed):
    """ceil(slots / batch) batches begun after it was sent, however much others send: what bounds the lag of data."""
    rng = np.random.default_rng(seed)
    lanes, depth, batch = (int(n) for n in rng.integers((2, 2, 1), (5, 6, 5)))
    stream = built(StreamWire("items", LAYOUT, depth=depth), sink=lanes, source=1)
    sinks, source = [stream.attach("sink", k, 0) for k in range(lanes)], stream.attach("source", 0, 0)
    zeal, taken, longest = rng.uniform(0.1, 1.0, lanes), 0, 0
    while taken < 300:
        for sink, eager in zip(sinks, zeal, strict=True):
            while rng.random() < eager and (slot := now(sink.slot())) is not None:
                slot.data["number"][0] = taken  # batches begun before it was sent
                slot.send()
        if stream.numbers()["occupied"] >= batch:
            taken += 1
            longest = max(longest, taken - int(now(source.take(batch))["number"].min()))
    assert longest <= -(-lanes * depth // batch)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_a_full_stream_blocks_its_producer(kind, tmp_path):
    program = Program("t")
    stream = program.stream("items", LAYOUT, depth=3)
    program.add("producer", Producer, out=stream.sink)
    program.add("consumer", Consumer, source=stream.source, count=1, pause=0.05)
    watch = drive(program, kind, tmp_path, Watch(until=lambda c: c.total("samples_consumed") >= 10))
    assert watch.wires["items"]["dropped"] == 0
    assert watch.final["producer-0"]["env_steps"] <= watch.final["consumer-0"]["samples_consumed"] + 3 + 1
    assert watch.final["producer-0"]["wait_seconds/items"] > 0.2


@pytest.mark.parametrize("kind", RUNTIMES)
def test_drop_oldest(kind, tmp_path):
    """`drop_oldest` never blocks, and counts what it drops."""
    program = Program("t")
    stream = program.stream("items", LAYOUT, depth=3, full="drop_oldest")
    program.add("producer", Producer, out=stream.sink, pause=0.002)
    program.add("consumer", Consumer, source=stream.source, count=1, pause=0.05)
    watch = drive(program, kind, tmp_path, Watch(until=lambda c: c.total("samples_consumed") >= 10))
    numbers = watch.wires["items"]
    assert numbers["dropped"] > 20
    assert numbers["written"] == numbers["consumed"] + numbers["dropped"] + numbers["occupied"]
    assert watch.final["producer-0"]["wait_seconds/items"] < 0.3


class Each:
    """A barrier over all producers."""

    def __init__(self, me, source):
        self.me, self.source = me, source

    async def step(self):
        batch = await self.source.take_each()
        producers = batch["producer"].tolist()
        assert producers == sorted(producers)
        self.me.stats.add("samples_consumed", len(producers))
        self.me.stats.set("eval_episodes", max(self.me.stats.get("eval_episodes"), len(producers)))


@pytest.mark.parametrize("kind", RUNTIMES)
def test_barrier(kind, tmp_path):
    """A barrier takes one of each in their order."""
    program = Program("t")
    stream = program.stream("items", LAYOUT)
    program.add("producer", Producer, out=stream.sink, replicas=3)
    program.add("trainer", Each, source=stream.source)
    watch = drive(program, kind, tmp_path, Watch(until=lambda c: c.total("samples_consumed") >= 90))
    assert watch.final["trainer-0"]["eval_episodes"] == 3


def test_a_barrier_skips_outlived_slots():
    stream = built(StreamWire("items", LAYOUT, depth=2), sink=2, source=1)
    first, second = (stream.attach("sink", member, 0) for member in range(2))
    source = stream.attach("source", 0, 0)

    def send(sink, number):
        slot = now(sink.slot())
        slot.data["number"][0] = number
        slot.send()

    def take():
        return now(source.take_each(lambda slot: slot["number"][0] < 5))

    send(first, 3)
    send(second, 5)
    assert take() is None  # the first one's was too old, and it has not sent another
    send(first, 6)
    assert take()["number"].tolist() == [6, 5]
    assert stream.numbers()["consumed"] == stream.numbers()["written"] == 3
    assert stream.conserved()


def test_a_barrier_survives_a_dead_producer(tmp_path):
    program = Program("t")
    stream = program.stream("items", LAYOUT)
    program.add("producer", Producer, out=stream.sink, replicas=3, pause=0.001)
    program.add("trainer", Each, source=stream.source)
    killed = []

    def act(control):
        if control.total("samples_consumed") > 60 and not killed:
            killed.append(kill(control, "producer-1"))

    watch = drive(program, "local", tmp_path, Watch(lambda c: killed and c.total("steps") > 2000, act))
    assert watch.reason == "until"
    assert watch.final["producer-1"]["restarts"] == 1
    assert watch.unbalanced == 0


class SlowWriter:
    """Writes a big slot piece by piece: easy to kill in the middle."""

    def __init__(self, me, out):
        self.me, self.out, self.sent = me, out, me.incarnation * 1_000_000

    async def step(self):
        slot = await self.out.slot()
        self.sent += 1
        slot.data["number"][0] = self.sent
        for piece in np.array_split(slot.data["data"], 8):
            piece[:] = self.sent
            time.sleep(0.001)
        slot.send()
        self.me.stats.add("env_steps")


class WholeReader:
    """Fails on the first torn or repeated slot."""

    def __init__(self, me, source):
        self.me, self.source, self.last = me, source, -1

    async def step(self):
        batch = await self.source.take(1)
        number = int(batch["number"][0])
        assert (batch["data"] == number).all(), "torn"
        self.me.stats.add("samples_consumed")
        time.sleep(0.003)


@pytest.mark.parametrize("full", ["block", "drop_oldest"])
@pytest.mark.parametrize("victims", [("writer-0",), ("reader-0",), ("writer-0", "reader-0")])
def test_kill_9_loses_and_tears_nothing(full, victims, tmp_path):
    program = Program("t")
    stream = program.stream("items", BIG, depth=3, full=full)
    program.add("writer", SlowWriter, out=stream.sink)
    program.add("reader", WholeReader, source=stream.source)
    killer = Killer(victims, times=6, every=12)
    watch = drive(program, "local", tmp_path, Watch(killer.done, killer))
    assert watch.reason == "until"
    assert watch.unbalanced == 0
    assert sum(row["restarts"] for row in watch.final.values()) == 6
    if "writer-0" in victims:
        assert watch.wires["items"]["torn"] >= 1  # at least one kill hit a half-written slot, and it was never read


class Hoarder:
    """Keeps the last three batches: a batch is valid until the third take after it."""

    def __init__(self, me, source):
        self.me, self.source, self.kept, self.count = me, source, [], 0

    async def step(self):
        self.count += 1
        batch = await self.source.take(1 + self.count // 7 % 2)  # two sizes: each has its own staging buffers
        self.kept = [*self.kept, (batch, batch["number"].copy())][-3:]
        for kept, numbers in self.kept:
            assert (kept["number"] == numbers).all(), "a batch was overwritten while it was valid"
        self.me.stats.add("samples_consumed")


@pytest.mark.parametrize("kind", RUNTIMES)
def test_how_long_a_batch_is_valid(kind, tmp_path):
    """A batch is valid until the third take after it."""
    program = Program("t")
    stream = program.stream("items", LAYOUT, depth=4)
    program.add("producer", Producer, out=stream.sink)
    program.add("consumer", Hoarder, source=stream.source)
    watch = drive(program, kind, tmp_path, Watch(until=lambda c: c.total("samples_consumed") >= 40))
    assert watch.reason == "until" and watch.final["consumer-0"]["restarts"] == 0


@pytest.mark.parametrize("kind", RUNTIMES)
def test_a_barrier_over_a_stream_that_drops(kind, tmp_path):
    program = Program("t")
    stream = program.stream("items", LAYOUT, full="drop_oldest", depth=3)
    program.add("producer", Producer, out=stream.sink, replicas=3, pause=0.001)
    program.add("trainer", Each, source=stream.source)
    watch = drive(program, kind, tmp_path, Watch(until=lambda c: c.total("samples_consumed") >= 90))
    assert watch.reason == "until" and watch.final["trainer-0"]["eval_episodes"] == 3
    assert watch.unbalanced == 0


@pytest.mark.parametrize("kind", RUNTIMES)
@pytest.mark.parametrize("full", ["block", "drop_oldest"])
def test_producers_serve_living_consumers(kind, full, tmp_path):
    """One of up to three consumers at first: nothing is sent to the two that do not exist, nor to one that has left."""
    program = Program("t")
    stream = program.stream("items", LAYOUT, depth=2, full=full)
    program.add("producer", Producer, out=stream.sink, replicas=2, pause=0.001)
    program.add("consumer", Consumer, source=stream.source, replicas=(1, 1, 3))
    wanted, at, held = [3, 1], [60], []

    def act(control):
        if control.total("samples_consumed") >= at[0] and control.total("alive") >= len(control.running):
            at[0] = control.total("samples_consumed") + 80
            held.append(control.wires()["items"]["occupied"])
            if wanted:
                control.scale("consumer", wanted.pop(0))

    watch = drive(program, kind, tmp_path, Watch(until=lambda c: len(held) == 3, act=act))
    assert watch.reason == "until"
    assert watch.final["consumer-1"]["samples_consumed"] > 0 and watch.final["consumer-2"]["samples_consumed"] > 0
    assert held[0] <= 4  # the lanes of the one consumer
    assert held[2] <= 4 + 8  # and what was on its way to the two that left
    assert watch.unbalanced == 0


class Twice:
    def __init__(self, me, out):
        self.out = out

    async def step(self):
        slot = await self.out.slot()
        slot.send()
        slot.send()


def test_a_slot_is_sent_once(tmp_path):
    program = Program("t")
    stream = program.stream("items", LAYOUT, depth=2)
    program.add("producer", Twice, out=stream.sink)
    program.add("consumer", Consumer, source=stream.source)
    with pytest.raises(WireError, match="sent once"):
        drive(program, "inline", tmp_path)


class Careless:
    """Loses a slot: takes it out of its lane without sending it on."""

    def __init__(self, me, out):
        self.me, self.out = me, out

    async def step(self):
        slot = await self.out.slot()
        slot.send()
        self.me.stats.add("env_steps")
        if self.me.stats.get("steps") == 5:
            slot._lane.words[0] += 1
        await any_of(timeout=0.01)


def test_a_lost_slot_is_noticed(tmp_path):
    program = Program("t")
    stream = program.stream("items", LAYOUT, depth=2)
    program.add("producer", Careless, out=stream.sink)
    program.add("consumer", Drain, source=stream.source)
    watch = Watch(until=lambda c: watch.unbalanced, seconds=8)
    drive(program, "local", tmp_path, watch)
    assert watch.reason == "until" and watch.age > 2.0
    assert len(watch.texts("unbalanced")) == 1


class Drain:
    def __init__(self, me, source):
        self.source = source

    async def step(self):
        await self.source.take(1)
