"""What a wire says of the bytes that went through it is what the roles really handed over."""

import numpy as np
import pytest

from shoal.runtime import Program
from shoal.slots import Field, Layout
from tests.runtime.harness import RUNTIMES, drive

ITEM, VALUE = Layout({"x": Field((100,), "f8")}), Layout({"w": Field((1000,), "f4")})
ASK, ANSWER = Layout({"q": Field((8,), "f8")}), Layout({"a": Field((64,), "f8")})


class Left:
    """Sends two items, publishes once, asks three times and sums with the other one once; then waits for ever."""

    def __init__(self, me, items, weights, server, group):
        self.me, self.items, self.weights, self.server, self.group = me, items, weights, server, group

    async def step(self):
        for _ in range(2):
            (await self.items.slot()).send()
        self.weights.publish(VALUE.empty())
        for _ in range(2):
            await self.server.ask(ASK.empty(), timeout=60)
        await (await self.server.slot()).send(unused=16).result(60)
        await self.group.sync(np.zeros(50))
        await self.group.sum(np.zeros(50))
        self.me.finish("done")
        await self.items.slot()
        await self.items.slot()
        await self.items.slot()


class Right:
    def __init__(self, me, items, weights, clients, group):
        self.items, self.weights, self.clients, self.group = items, weights, clients, group

    async def step(self):
        await self.items.take(2)
        await self.weights.newer_than(0)
        self.weights.pull(VALUE.empty())
        self.weights.pull(VALUE.empty())
        answered = 0
        while answered < 3:
            for request in await self.clients.take(1):
                request.reply(ANSWER.empty())
                answered += 1
        await self.group.sync(np.zeros(50))
        await self.group.sum(np.zeros(50))
        await self.items.take(2)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_bytes_moved(runtime, tmp_path):
    program = Program("t")
    items, weights = program.stream("items", ITEM, depth=2), program.broadcast("weights", VALUE)
    call, group = program.call("call", ASK, ANSWER), program.group("sums", 8 * 50)
    program.add("left", Left, items=items.sink, weights=weights.publisher, server=call.client, group=group.member)
    program.add("right", Right, items=items.source, weights=weights.reader, clients=call.server, group=group.member)
    moved = {name: wire["bytes_moved"] for name, wire in drive(program, runtime, tmp_path).wires.items()}
    sizes = {"items": 2 * ITEM.nbytes, "weights": 2 * VALUE.nbytes, "call": 3 * (ASK.nbytes + ANSWER.nbytes) - 16}
    assert {name: moved[name] for name in sizes} == sizes
    assert moved["sums"] >= 2 * 8 * 50  # the sum, read once by each, and what it took to agree on a state
