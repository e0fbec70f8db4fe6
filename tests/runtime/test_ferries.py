"""Ferries between the places of a cluster, in one process: who dies when, without having to wait for it."""

import time

import numpy as np
import pytest

from shoal.runtime import Program
from shoal.runtime.ray.fabric import Fabric, Word
from shoal.slots import Field, Layout
from tests.runtime.test_crashes import now

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

ITEM = Layout({"number": Field((1,), "i8")})
VALUE = Layout({"value": Field((4,), "f4")})


class Town:
    """The places of a program, joined by direct calls; a place is replaced like a process that was killed."""

    def __init__(self, draw):
        self.draw, self.fabrics, self.lives, self.held = draw, {}, {}, None
        self.program = draw()
        for place in self.program.places:
            self.start(place)

    def start(self, place, silent=False):
        """A (new) process for a place; `silent`: the supervisor has not told the others yet."""
        self.lives[place] = self.lives.get(place, -1) + 1
        fabric = self.fabrics[place] = Fabric(self.draw(), place, "127.0.0.1", self.send)
        fabric.told([word for home in self.lives for word in self.words(home)])
        if not silent:
            self.tell(place)
        return fabric

    def words(self, place):
        return [Word(port.wire.name, port.end, port.wire.member_number(port.end, node, index), self.lives[place], True, True)
                for node, index in self.program.places[place].members for port in self.program.nodes[node].ports.values()]

    def tell(self, place):
        for name, fabric in self.fabrics.items():
            if name != place:
                fabric.told(self.words(place))

    def send(self, place, message, payload=None):
        if self.held is not None:
            self.held.append((place, message, payload))
        else:
            self.fabrics[place].receive(message, None if payload is None else payload.copy())

    def release(self):
        held, self.held = self.held, None
        for one in held:
            self.send(*one)

    def end(self, node, argument, index=0):
        """The endpoint that a role is given."""
        program = self.fabrics[program_place := self.program.place_of(node, index).name].program
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


def test_a_consumers_successor_is_given_what_was_not_read():
    town = Town(streams())
    sink, source = town.end("producer", "out"), town.end("consumer", "source")
    put(sink, 1)
    assert take(source) == 1
    put(sink, 2)
    put(sink, 3)
    assert not sink._collect()  # both slots are on their way or unread
    town.start("consumer-0")
    source = town.end("consumer", "source")
    assert [take(source), take(source)] == [2, 3]
    put(sink, 4)
    assert take(source) == 4
    row = town.fabrics["producer-0"].numbers()["items"]
    assert (row["written"], row["consumed"], row["occupied"]) == (4, 4, 0)


def test_a_slot_that_a_dead_producer_left_is_read_before_its_successors():
    town = Town(streams())
    source = town.end("consumer", "source")
    put(town.end("producer", "out"), 1)
    town.start("producer-0")
    sink = town.end("producer", "out")
    put(sink, 2)  # into the slot of the same number
    put(sink, 3)
    assert not sink._collect()
    assert [take(source) for _ in range(3)] == [1, 2, 3]
    put(sink, 4)
    put(sink, 5)
    assert [take(source) for _ in range(2)] == [4, 5]


def test_a_slot_that_is_carried_twice_is_read_once():
    town = Town(streams())
    sink, source = town.end("producer", "out"), town.end("consumer", "source")
    town.held = []
    put(sink, 1)
    town.held *= 2
    town.release()
    assert take(source) == 1
    assert not source.waiting(1)


def test_a_dropping_stream_drops_its_oldest_and_carries_one_at_a_time():
    town = Town(streams("drop_oldest"))
    sink, source = town.end("producer", "out"), town.end("consumer", "source")
    for number in range(1, 6):
        put(sink, number)
    assert [take(source), take(source)] == [1, 5]  # the first was on its way already
    row = town.fabrics["producer-0"].numbers()["items"]
    assert (row["written"], row["dropped"], row["consumed"]) == (5, 3, 2)


def test_one_that_does_not_use_its_value_is_given_a_newer_one_after_a_while(monkeypatch):
    monkeypatch.setattr("shoal.runtime.ray.ferries.broadcast.RENEW_SECONDS", 0.0)
    town = Town(broadcasts)
    publisher, reader = town.end("publisher", "weights"), town.end("reader", "weights")
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


def test_a_place_is_given_a_value_when_it_has_used_the_last_one(monkeypatch):
    monkeypatch.setattr("shoal.runtime.ray.ferries.broadcast.RENEW_SECONDS", 1e9)
    town = Town(broadcasts)
    publisher, reader = town.end("publisher", "weights"), town.end("reader", "weights")
    for value in range(1, 6):
        publish(publisher, value)
    assert reader.version == 1  # it has not used the first one yet
    assert pull(reader) == (1, 1.0)
    assert pull(reader) == (5, 5.0)  # then it was given the newest


def test_a_value_is_as_old_as_its_publication_however_late_it_is_wanted(monkeypatch):
    monkeypatch.setattr("shoal.runtime.ray.ferries.broadcast.RENEW_SECONDS", 1e9)
    town = Town(broadcasts)
    publisher, reader = town.end("publisher", "weights"), town.end("reader", "weights")
    for value in (1, 2):
        publish(publisher, value)  # the second one is packed only when the first was used
    time.sleep(0.1)
    assert pull(reader) == (1, 1.0)
    assert pull(reader) == (2, 2.0) and reader.age_seconds >= 0.1


def test_the_version_goes_on_when_a_publisher_is_replaced():
    town = Town(broadcasts)
    publisher, reader, late = (town.end("publisher", "weights"), town.end("reader", "weights"), town.end("reader", "weights", 1))
    for value in range(1, 8):
        publish(publisher, value)
        pull(reader)
    town.start("publisher-0")
    publisher = town.end("publisher", "weights")
    assert publisher.version == 7  # everybody has said what they have
    assert publish(publisher, 70) == 8
    assert pull(reader) == (8, 70.0) and pull(late)[1] == 70.0


def test_a_version_that_another_place_has_is_not_there_before_its_data_are():
    """Two bundles with a publisher and a reader each, as of two learners: what the first one's reader has is told to the second
    one, which may publish next, and that may be heard before the value itself. A reader there would look for it for ever."""

    def draw():
        program = Program("t")
        weights = program.broadcast("weights", VALUE)
        for name, port in (("publisher", weights.publisher), ("reader", weights.reader)):
            program.add(name, role, weights=port, replicas=2, place=lambda index: f"main-{index}")
        return program

    town = Town(draw)
    publisher, other = town.end("publisher", "weights"), town.end("publisher", "weights", 1)
    near, far = town.end("reader", "weights"), town.end("reader", "weights", 1)
    town.held = []
    publish(publisher, 10)
    near.pull(VALUE.empty())
    values = [one for one in town.held if one[1][1] == "value"]
    wants = [one for one in town.held if one[1][1] == "want"]
    assert [one[0] for one in values] == [one[0] for one in wants] == ["main-1"]
    town.held = wants
    town.release()
    assert far.version == 0 and other.version == 1  # nothing to read yet; but what is published there would be newer
    town.held = values
    town.release()
    into = VALUE.empty()
    assert far.pull(into) == 1 and into["value"][0] == 10
    assert publish(other, 20) == 2


def test_what_a_successor_published_before_it_heard_is_numbered_anew():
    town = Town(broadcasts)
    publisher, reader = town.end("publisher", "weights"), town.end("reader", "weights")
    for value in range(1, 8):
        publish(publisher, value)
        pull(reader)
    town.start("publisher-0", silent=True)
    publisher = town.end("publisher", "weights")
    publish(publisher, 70)
    town.tell("publisher-0")
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


def test_a_servers_successor_is_asked_what_was_not_answered():
    town = Town(calls)
    pending = ask(town.end("client", "server"), 5)
    assert now(town.end("server", "clients").take(8))[0].data["x"][0] == 5  # and dies with it
    town.start("server-0")
    request = now(town.end("server", "clients").take(8))[0]
    request.reply({"y": 2 * request.data["x"]})
    assert now(pending.result())["y"][0] == 10


def test_a_dead_clients_question_is_void_and_its_successors_is_not():
    town = Town(calls)
    server = town.end("server", "clients")
    ask(town.end("client", "server"), 5)
    old = now(server.take(8))[0]
    town.start("client-0", silent=True)
    pending = ask(town.end("client", "server"), 6)  # it comes before the supervisor's word
    town.tell("client-0")
    assert old.void
    request = now(server.take(8))[0]
    assert not request.void and request.data["x"][0] == 6
    request.reply({"y": np.array([12])})
    assert now(pending.result())["y"][0] == 12
