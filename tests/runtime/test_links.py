"""Links between the places of a cluster, in one process: who dies when, without having to wait for it."""

import time

import numpy as np
import pytest

from shoal.runtime import Program
from shoal.runtime.ray.place_wires import MemberStatus, PlaceWires
from shoal.slots import Field, Layout
from tests.runtime.test_crashes import now

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

ITEM = Layout({"number": Field((1,), "i8")})
VALUE = Layout({"value": Field((4,), "f4")})


class Places:
    """The places of a program, joined by direct calls; a place is replaced like a process that was killed."""

    def __init__(self, draw):
        self.draw, self.wires, self.lives, self.held = draw, {}, {}, None
        self.program = draw()
        for place in self.program.places:
            self.start(place)

    def start(self, place, silent=False):
        """A (new) process for a place; `silent`: the supervisor has not told the others yet."""
        self.lives[place] = self.lives.get(place, -1) + 1
        wires = self.wires[place] = PlaceWires(self.draw(), place, "127.0.0.1", self.send)
        wires.told([status for home in self.lives for status in self.statuses(home)])
        if not silent:
            self.tell(place)
        return wires

    def statuses(self, place):
        life = self.lives[place]
        return [MemberStatus(port.wire.name, port.end, port.wire.member_number(port.end, node, index), life, True, True)
                for node, index in self.program.places[place].members for port in self.program.nodes[node].ports.values()]

    def tell(self, place):
        for name, wires in self.wires.items():
            if name != place:
                wires.told(self.statuses(place))

    def send(self, place, message, payload=None):
        if self.held is not None:
            self.held.append((place, message, payload))
        else:
            self.wires[place].receive(message, None if payload is None else payload.copy())

    def release(self):
        held, self.held = self.held, None
        for one in held:
            self.send(*one)

    def end(self, node, argument, index=0):
        """The endpoint that a role is given."""
        program = self.wires[program_place := self.program.place_of(node, index).name].program
        return program.endpoint(program.nodes[node].ports[argument], node, index, self.lives[program_place])


def role(me, **arguments):
    """Never made: the tests hold its endpoints."""


def streams(full="block"):
    def draw():
        program = Program("t")
        items = program.stream("items", ITEM, depth=2, full=full)
        program.add("producer", role, out=items.sink)
        program.add("consumer", role, source=items.source)
        return program

    return draw


def put(sink, number):
    slot = now(sink.slot())
    slot.data["number"][0] = number
    slot.send()


def take(source):
    return int(now(source.take(1))["number"][0])


def test_successor_of_a_consumer():
    """A consumer's successor is given what was not read."""
    places = Places(streams())
    sink, source = places.end("producer", "out"), places.end("consumer", "source")
    put(sink, 1)
    assert take(source) == 1
    put(sink, 2)
    put(sink, 3)
    assert not sink._collect()  # both slots are on their way or unread
    places.start("consumer-0")
    source = places.end("consumer", "source")
    assert [take(source), take(source)] == [2, 3]
    put(sink, 4)
    assert take(source) == 4
    row = places.wires["producer-0"].numbers()["items"]
    assert (row["written"], row["consumed"], row["occupied"]) == (4, 4, 0)


def test_a_dead_producers_slot_is_read_first():
    places = Places(streams())
    source = places.end("consumer", "source")
    put(places.end("producer", "out"), 1)
    places.start("producer-0")
    sink = places.end("producer", "out")
    put(sink, 2)  # into the slot of the same number
    put(sink, 3)
    assert not sink._collect()
    assert [take(source) for _ in range(3)] == [1, 2, 3]
    put(sink, 4)
    put(sink, 5)
    assert [take(source) for _ in range(2)] == [4, 5]


def test_slot_carried_twice():
    """A slot that is carried twice is read once."""
    places = Places(streams())
    sink, source = places.end("producer", "out"), places.end("consumer", "source")
    places.held = []
    put(sink, 1)
    places.held *= 2
    places.release()
    assert take(source) == 1
    assert not source.waiting(1)


def test_dropping_stream_one_at_a_time():
    places = Places(streams("drop_oldest"))
    sink, source = places.end("producer", "out"), places.end("consumer", "source")
    for number in range(1, 6):
        put(sink, number)
    assert [take(source), take(source)] == [1, 5]  # the first was on its way already
    row = places.wires["producer-0"].numbers()["items"]
    assert (row["written"], row["dropped"], row["consumed"]) == (5, 3, 2)


def test_an_unused_value_is_renewed(monkeypatch):
    monkeypatch.setattr("shoal.runtime.ray.links.broadcast_link.RENEW_SECONDS", 0.0)
    places = Places(broadcasts)
    publisher, reader = places.end("publisher", "weights"), places.end("reader", "weights")
    for value in range(1, 6):
        publish(publisher, value)
    assert pull(reader) == (5, 5.0)


def broadcasts():
    program = Program("t")
    weights = program.broadcast("weights", VALUE)
    program.add("publisher", role, weights=weights.publisher)
    program.add("reader", role, weights=weights.reader, replicas=2)
    return program


def publish(publisher, value):
    return publisher.publish({"value": np.full(4, value, np.float32)})


def pull(reader):
    into = VALUE.empty()
    version = reader.pull(into)
    assert (into["value"] == into["value"][0]).all()
    return version, float(into["value"][0])


def test_used_value_is_followed_by_the_next(monkeypatch):
    monkeypatch.setattr("shoal.runtime.ray.links.broadcast_link.RENEW_SECONDS", 1e9)
    places = Places(broadcasts)
    publisher, reader = places.end("publisher", "weights"), places.end("reader", "weights")
    for value in range(1, 6):
        publish(publisher, value)
    assert reader.version == 1  # it has not used the first one yet
    assert pull(reader) == (1, 1.0)
    assert pull(reader) == (5, 5.0)  # then it was given the newest


def test_age_counts_from_publication(monkeypatch):
    monkeypatch.setattr("shoal.runtime.ray.links.broadcast_link.RENEW_SECONDS", 1e9)
    places = Places(broadcasts)
    publisher, reader = places.end("publisher", "weights"), places.end("reader", "weights")
    for value in (1, 2):
        publish(publisher, value)  # the second one is packed only when the first was used
    time.sleep(0.1)
    assert pull(reader) == (1, 1.0)
    assert pull(reader) == (2, 2.0) and reader.age_seconds >= 0.1


def test_version_after_a_replacement():
    """The version goes on when a publisher is replaced."""
    places = Places(broadcasts)
    publisher, reader = places.end("publisher", "weights"), places.end("reader", "weights")
    late = places.end("reader", "weights", 1)
    for value in range(1, 8):
        publish(publisher, value)
        pull(reader)
    places.start("publisher-0")
    publisher = places.end("publisher", "weights")
    assert publisher.version == 7  # everybody has said what they have
    assert publish(publisher, 70) == 8
    assert pull(reader) == (8, 70.0) and pull(late)[1] == 70.0


def test_a_version_comes_with_its_data():
    """Two bundles with a publisher and a reader each, as of two learners: what the first one's reader has is told to the second
    one, which may publish next, and that may be heard before the value itself. A reader there would look for it for ever."""

    def draw():
        program = Program("t")
        weights = program.broadcast("weights", VALUE)
        for name, port in (("publisher", weights.publisher), ("reader", weights.reader)):
            program.add(name, role, weights=port, replicas=2, place=lambda index: f"main-{index}")
        return program

    places = Places(draw)
    publisher, other = places.end("publisher", "weights"), places.end("publisher", "weights", 1)
    near, far = places.end("reader", "weights"), places.end("reader", "weights", 1)
    places.held = []
    publish(publisher, 10)
    near.pull(VALUE.empty())
    values = [one for one in places.held if one[1][1] == "value"]
    wants = [one for one in places.held if one[1][1] == "want"]
    assert [one[0] for one in values] == [one[0] for one in wants] == ["main-1"]
    places.held = wants
    places.release()
    assert far.version == 0 and other.version == 1  # nothing to read yet; but what is published there would be newer
    places.held = values
    places.release()
    into = VALUE.empty()
    assert far.pull(into) == 1 and into["value"][0] == 10
    assert publish(other, 20) == 2


def test_successor_numbers_its_values_again():
    places = Places(broadcasts)
    publisher, reader = places.end("publisher", "weights"), places.end("reader", "weights")
    for value in range(1, 8):
        publish(publisher, value)
        pull(reader)
    places.start("publisher-0", silent=True)
    publisher = places.end("publisher", "weights")
    publish(publisher, 70)
    places.tell("publisher-0")
    assert pull(reader) == (8, 70.0)
    assert publish(publisher, 71) == 9


def calls():
    program = Program("t")
    call = program.call("call", Layout({"x": Field((1,), "i8")}), Layout({"y": Field((1,), "i8")}), depth=1)
    program.add("client", role, server=call.client)
    program.add("server", role, clients=call.server)
    return program


def ask(client, x):
    draft = now(client.slot())
    draft.data["x"][0] = x
    return draft.send()


def test_successor_of_a_server():
    """A server's successor is asked what was not answered."""
    places = Places(calls)
    pending = ask(places.end("client", "server"), 5)
    assert now(places.end("server", "clients").take(8))[0].data["x"][0] == 5  # and dies with it
    places.start("server-0")
    request = now(places.end("server", "clients").take(8))[0]
    request.reply({"y": 2 * request.data["x"]})
    assert now(pending.result())["y"][0] == 10


def test_a_dead_clients_request_is_void():
    places = Places(calls)
    server = places.end("server", "clients")
    ask(places.end("client", "server"), 5)
    old = now(server.take(8))[0]
    places.start("client-0", silent=True)
    pending = ask(places.end("client", "server"), 6)  # it comes before the supervisor names it
    places.tell("client-0")
    assert old.void
    request = now(server.take(8))[0]
    assert not request.void and request.data["x"][0] == 6
    request.reply({"y": np.array([12])})
    assert now(pending.result())["y"][0] == 12
