"""Death between any two lines: an endpoint is stopped at every single line of its wire's code, then replaced.

Real kills (the other files) hit whatever moment they hit; here each moment is hit in turn, on the inline allocator, whose
memory and channels behave like shared memory and pipes as far as one process can tell.
"""

import contextlib
import sys

import numpy as np
import pytest

from shoal.core import Wait
from shoal.errors import GroupChanged
from shoal.runtime.program import RoleNode
from shoal.runtime.wires import BroadcastWire, CallWire, GroupWire, StreamWire
from shoal.slots import Field, InlineAllocator, Layout

LAYOUT = Layout({"a": Field((2,), "i8"), "b": Field((3,), "i8")})


class Killed(BaseException):
    """Nothing catches it, and no wire has a `finally`: as abrupt as SIGKILL."""


def dies_at(line, action):
    """Do `action`, but die at the given line of the wires' code, counted from its start; None when it lived."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if "/wires/" not in frame.f_code.co_filename and not frame.f_code.co_filename.endswith("layout.py"):
            return None
        if event == "line":
            count += 1
            if count == line:
                raise Killed
        return trace

    sys.settrace(trace)
    try:
        return (action(),)
    except Killed:
        return None
    finally:
        sys.settrace(None)


def now(coroutine):
    """The result of a coroutine that need not wait, or None."""
    try:
        waiting = coroutine.send(None)
    except StopIteration as end:
        return end.value
    assert isinstance(waiting, Wait)
    coroutine.close()
    return None


def built(wire, **ends):
    for end, count in ends.items():
        wire.join(end, RoleNode(end, object, {}, count, count, count, 1))
    wire.build(InlineAllocator())
    for end, count in ends.items():
        for member in range(count):
            wire.enlist(end, member, True)
            wire.membership(end, member, True)
    return wire


# ---------------------------------------------------------------------------------------------- stream
class Flow:
    """A producer and a consumer of one stream, in lock-step; each may be replaced at any time."""

    def __init__(self, full):
        self.stream = built(StreamWire("s", LAYOUT, depth=2, full=full), sink=1, source=1)
        self.lives, self.sent, self.received = 0, 0, []
        self.sink = self.source = None
        self.replace("sink")
        self.replace("source")

    def replace(self, end):
        self.lives += 1
        self.stream.membership(end, 0, False)
        setattr(self, end, self.stream.attach(end, 0, self.lives))
        self.stream.membership(end, 0, True)

    def send(self):
        slot = now(self.sink.slot())
        if slot is not None:
            self.sent += 1
            slot.data["a"][:] = slot.data["b"][:] = self.sent
            slot.send()
        return slot is not None

    def take(self):
        batch = now(self.source.take(1))
        if batch is not None:
            assert len({*batch["a"].tolist(), *batch["b"].tolist()}) == 1, "torn"
            self.received.append(int(batch["a"][0]))
        return batch is not None

    def check(self):
        """Nothing is lost, torn or out of order, the books balance, and every slot can be used again."""
        while self.take():
            pass
        assert self.received == sorted(set(self.received))
        numbers = self.stream.numbers()
        table = self.stream.table()
        assert (table.counts()[:, 0] == table.counts()[:, 3] + table.counts()[:, 1] + table.held()).all(), numbers
        for _ in range(2):
            before = self.sent
            assert self.send() and self.sent == before + 1, "a slot is lost"
        assert self.stream.numbers()["occupied"] == 2
        assert self.take() and self.take() and self.received[-1] == self.sent


@pytest.mark.parametrize("full", ["block", "drop_oldest"])
@pytest.mark.parametrize("victim", ["sink", "source"])
@pytest.mark.parametrize("backlog", [0, 1, 2])
def test_a_stream_survives_death_at_any_line(full, victim, backlog):
    for line in range(1, 200):
        flow = Flow(full)
        for _ in range(3):
            flow.send()
            flow.take()
        for _ in range(backlog):
            flow.send()
        sent, received = flow.sent, len(flow.received)
        lived = dies_at(line, flow.send if victim == "sink" else flow.take)
        flow.replace(victim)
        if full == "block":
            while flow.take():
                pass
            # What was sent arrives, but for one slot that a dying consumer had already copied and freed.
            missing = set(range(received + 1, sent + 1)) - set(flow.received)
            assert len(missing) <= (victim == "source")
            flow.check()
        else:
            for _ in range(5):  # a number that died with its holder is found once later ones have passed
                flow.send()
                flow.take()
            flow.check()
        if lived:
            return
    raise AssertionError("it never lived")


def test_a_death_during_recovery():
    for line in range(1, 300):
        flow = Flow("block")
        flow.send()
        flow.take()
        flow.send()
        dies_at(20, flow.send)
        lived = dies_at(line, lambda: flow.replace("sink" if line % 2 else "source"))  # noqa: B023
        flow.replace("sink")
        flow.replace("source")
        flow.check()
        if lived and line > 100:
            return
    raise AssertionError("it never lived")


def test_lost_slots(monkeypatch):
    """The counts tell a lost slot from one that is on its way."""
    from shoal.runtime.wires import lanes as module

    flow = Flow("block")
    for _ in range(3):
        flow.send()
        flow.take()
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    assert flow.stream.conserved()
    table = flow.stream.table()
    table.words[0, module.WRITTEN] += 1  # between the state and the count: a moment later all is well
    assert flow.stream.conserved()
    clock[0] += 1
    table.words[0, module.WRITTEN] -= 1
    assert flow.stream.conserved()
    table.words[0, module.WRITTEN] += 1  # for good
    assert flow.stream.conserved()
    clock[0] += 3
    assert not flow.stream.conserved()
    flow.stream.membership("sink", 0, False)  # a dead producer's successor mends its words: no alarm in between
    assert flow.stream.conserved()


# ---------------------------------------------------------------------------------------------- broadcast
def test_broadcast_survives_any_death():
    for line in range(1, 100):
        wire = built(BroadcastWire("b", LAYOUT), publisher=1, reader=1)
        publisher, reader, into = wire.attach("publisher", 0, 0), wire.attach("reader", 0, 0), LAYOUT.empty()
        seen = {}

        def look(reader=reader, into=into, seen=seen):
            version = reader.pull(into)
            values = {*into["a"].tolist(), *into["b"].tolist()}
            assert len(values) == 1, "torn"
            assert seen.setdefault(version, values) == values, "one version, two values"
            assert version == max(seen), "the version decreased"
            return version

        for value in (1, 2, 3):
            publisher.publish({"a": np.full(2, value), "b": np.full(3, value)})
            look()
        lived = dies_at(line, lambda p=publisher: p.publish({"a": np.full(2, 9), "b": np.full(3, 9)}))
        assert look() in (3, 4)
        successor = wire.attach("publisher", 0, 1)
        assert successor.publish({"a": np.full(2, 5), "b": np.full(3, 5)}) > max(seen)
        look()
        if lived:
            return
    raise AssertionError("it never lived")


# ---------------------------------------------------------------------------------------------- call
SCALAR = Layout({"x": Field((4,), "i8")})


def asked(client, x):
    draft = now(client.slot())
    if draft is None:
        return None
    draft.data["x"][:] = x
    return draft.send()


def answer(server, most=8):
    requests = now(server.take(most)) or []
    for request in requests:
        request.reply({"x": request.data["x"] * 10})
    return len(requests)


@pytest.mark.parametrize(("victim", "moment"), [("client", "ask"), ("client", "result"), ("server", "answer")])
def test_a_call_survives_death_at_any_line(victim, moment):
    for line in range(1, 250):
        wire = built(CallWire("c", SCALAR, SCALAR, depth=2), client=2, server=1)
        client, other, server = wire.attach("client", 0, 0), wire.attach("client", 1, 0), wire.attach("server", 0, 0)
        kept = asked(other, 7)  # of a client that is not concerned
        first = asked(client, 1) if moment != "ask" else None
        if moment == "result":
            answer(server)
        action = {"ask": lambda: asked(client, 1), "answer": lambda: answer(server),  # noqa: B023
                  "result": lambda: now(first.result())}[moment]  # noqa: B023
        lived = dies_at(line, action)
        if victim == "client":
            client = wire.attach("client", 0, 1)
        else:
            server = wire.attach("server", 0, 1)
        while answer(server):
            pass
        if victim == "server":
            assert now(first.result())["x"].tolist() == [10] * 4
        assert now(kept.result())["x"].tolist() == [70] * 4
        for x in (3, 4, 5):  # every slot is usable, and each reply is the right one
            pending = [asked(client, x), asked(client, 100 + x)]
            assert all(pending)
            answer(server)
            assert now(pending[1].result())["x"].tolist() == [1000 + 10 * x] * 4
            assert now(pending[0].result())["x"].tolist() == [10 * x] * 4
        if lived:
            return
    raise AssertionError("it never lived")


def test_reply_to_replaced_client():
    """The server has looked whether the client still waits, and not yet written: now the client is replaced and asks anew."""
    wire = built(CallWire("c", SCALAR, SCALAR, depth=1), client=1, server=1)
    client, server = wire.attach("client", 0, 0), wire.attach("server", 0, 0)
    asked(client, 1)
    (request,) = now(server.take(1))
    original, successors = wire.reply.copy, []

    def copy(into, tree):
        wire.reply.copy = original
        successors.append(wire.attach("client", 0, 1))
        successors.append(asked(successors[0], 2))
        original(into, tree)

    wire.reply.copy = copy
    request.reply({"x": np.full(4, -1)})
    assert now(successors[1].result()) is None, "the predecessor's reply reached the successor"
    assert answer(server) == 1
    assert now(successors[1].result())["x"].tolist() == [20] * 4


def test_restarted_server():
    """A restarted server hears of no request twice."""
    wire = built(CallWire("c", SCALAR, SCALAR, depth=2), client=1, server=1)
    client = wire.attach("client", 0, 0)
    pending = asked(client, 1)
    server = wire.attach("server", 0, 1)  # it finds the request in the headers, and its number is still in the channel
    (request,) = now(server.take(1))
    asked(client, 2)
    (second,) = now(server.take(8))
    assert int(second.data["x"][0]) == 2
    request.reply({"x": np.full(4, 5)})
    assert now(pending.result())["x"][0] == 5


def test_requests_of_leaving_server():
    wire = built(CallWire("c", SCALAR, SCALAR, depth=2), client=2, server=2)
    clients, servers = [[wire.attach(end, k, 0) for k in range(2)] for end in ("client", "server")]
    pending = [asked(clients[0], 1), asked(clients[0], 2), asked(clients[1], 3)]
    (kept,) = now(servers[0].take(1))
    wire.membership("server", 0, False)
    wire.enlist("server", 0, False)
    assert answer(servers[1]) == 3
    kept.reply({"x": np.zeros(4)})  # too late, from a server that should be silent: dropped
    assert [int(now(p.result())["x"][0]) for p in pending] == [10, 20, 30]
    pending = asked(clients[0], 4)
    assert answer(servers[1]) == 1 and now(pending.result())["x"][0] == 40


# ---------------------------------------------------------------------------------------------- group
def test_group_of_another_epoch(monkeypatch):
    """A member is still adding up when the group changes and another one already writes for the new epoch."""
    from shoal.runtime.wires import group as module

    wire = built(GroupWire("g", 64), member=3)
    members = [wire.attach("member", k, 0) for k in range(3)]
    states = [np.full(8, float(k)) for k in range(3)]
    syncs = [member.sync(state) for member, state in zip(members, states, strict=True)]
    for _ in range(2):
        for sync in syncs:
            with_end(sync)
    assert all((state == 0).all() for state in states)
    original, armed = module.added, []

    def added(vectors):
        if not armed:
            return original(vectors)
        wire.membership("member", 2, False)  # member 0 is inside its sum: member 2 dies ...
        total = original(vectors[:1])
        members[1].sync(np.full(8, 1e9)).send(None)  # ... and member 1 goes ahead into the new epoch
        return total + original(vectors[1:])

    monkeypatch.setattr(module, "added", added)
    sums = [member.sum(np.full(8, 1.0)) for member in members]
    assert sums[0].send(None) and sums[1].send(None)
    with pytest.raises(StopIteration):
        sums[2].send(None)
    armed.append(True)
    with pytest.raises(GroupChanged):
        sums[0].send(None)
    assert wire.numbers()["discarded"] == 1


def with_end(coroutine):
    with contextlib.suppress(StopIteration, RuntimeError):
        coroutine.send(None)
