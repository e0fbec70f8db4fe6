"""The call wire: batches, late and out-of-order replies, time-outs, and kills on both sides."""

import numpy as np
import pytest

from shoal.core import any_of
from shoal.errors import Timeout
from shoal.runtime import Program
from shoal.slots import Field, Layout
from tests.runtime.harness import RUNTIMES, Killer, Watch, drive

REQUEST = Layout({"x": Field((2,), "i8"), "client": Field((), "i8")})
REPLY = Layout({"y": Field((64,), "i8")})


class Client:
    """Asks for squares, always with two requests in flight; each reply must be its own."""

    def __init__(self, me, server):
        self.me, self.server = me, server
        self.next = 1_000_000 * me.incarnation
        self.pending = []

    async def send(self):
        self.next += 1
        draft = await self.server.slot()
        draft.data["x"][:], draft.data["client"][...] = self.next, self.me.index
        self.pending.append((self.next, draft.send()))

    async def step(self):
        while len(self.pending) < 2:
            await self.send()
        x, pending = self.pending.pop(self.next % 2)  # now the older, now the younger one first
        reply = await pending.result(timeout=20)
        assert (reply["y"] == 3 * x + self.me.index).all(), "a reply to another request"
        self.me.stats.add("samples_consumed")


class Server:
    """Keeps requests until it has a batch, or for a moment if no others come, and answers them in any order."""

    def __init__(self, me, clients, batch=3):
        self.me, self.clients, self.batch, self.kept = me, clients, batch, []
        self.rng = me.rng()

    async def step(self):
        # The clients whose requests it keeps may send no others before they have a reply.
        idle = bool(self.kept) and not await any_of(self.clients.asked(), timeout=0.01)
        self.kept += self.clients.pending(most=4) if self.kept else await self.clients.take(most=4)
        if len(self.kept) < self.batch and not idle:
            return
        self.rng.shuffle(self.kept)
        late = self.kept.pop() if self.me.stats.get("steps") % 3 == 0 and not idle else None
        for request in self.kept:
            request.reply({"y": np.full(64, 3 * int(request.data["x"][0]) + int(request.data["client"]))})
            self.me.stats.add("env_steps")
        self.kept = [late] if late is not None else []


def program_of(clients=3, servers=1, batch=3, **options):
    program = Program("t")
    call = program.call("call", REQUEST, REPLY, depth=2)
    program.add("client", Client, server=call.client, replicas=clients)
    program.add("server", Server, clients=call.server, replicas=servers, batch=batch, **options)
    return program


@pytest.mark.parametrize("kind", RUNTIMES)
def test_answers_late_and_out_of_order(kind, tmp_path):
    """Requests are answered in batches, late and out of order."""
    watch = drive(program_of(), kind, tmp_path, Watch(lambda c: c.total("samples_consumed") >= 600))
    assert watch.reason == "until"
    numbers = watch.wires["call"]
    assert numbers["answered"] >= 600 and numbers["asked"] <= numbers["answered"] + 6
    assert numbers["batches"] <= numbers["answered"] and numbers["timeouts"] == 0


@pytest.mark.parametrize("kind", RUNTIMES)
def test_several_servers_share_the_clients(kind, tmp_path):
    watch = drive(program_of(clients=4, servers=2, batch=2), kind, tmp_path,
                  Watch(lambda c: min(c.snapshot()[f"server-{k}"]["env_steps"] for k in range(2)) >= 100))
    assert watch.reason == "until"


@pytest.mark.parametrize(("victims", "servers"), [(("server-0",), 1), (("client-0", "client-1"), 1), (("server-1", "client-2"), 2)])
def test_kill_9_on_either_side(victims, servers, tmp_path):
    """Kill -9 on either side loses and mixes nothing."""
    killer = Killer(victims, times=6, progress="samples_consumed", every=40)
    watch = drive(program_of(servers=servers, batch=2), "local", tmp_path, Watch(killer.done, killer))
    assert watch.reason == "until"  # a lost request would hold its client for 20 s, and then fail it
    assert sum(row["restarts"] for row in watch.final.values()) == 6


class Impatient:
    """Asks with a deadline that the server sometimes misses; a late reply must not be taken for the next one."""

    def __init__(self, me, server):
        self.me, self.server, self.x = me, server, 0

    async def step(self):
        self.x += 1
        try:
            reply = await self.server.ask({"x": np.full(2, self.x), "client": 0}, timeout=0.04)
        except Timeout:
            self.me.stats.add("episodes")
            return
        assert (reply["y"] == 3 * self.x).all(), "a late reply was taken for this one"
        self.me.stats.add("samples_consumed")


class Sluggish:
    """Every third answer comes too late."""

    def __init__(self, me, clients):
        self.me, self.clients, self.count = me, clients, 0

    async def step(self):
        for request in await self.clients.take(most=1):
            self.count += 1
            if self.count % 3 == 0:
                await any_of(timeout=0.1)
            request.reply({"y": np.full(64, 3 * int(request.data["x"][0]))})


@pytest.mark.parametrize("kind", RUNTIMES)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_late_reply_is_dropped_and_counted(kind, depth, tmp_path):
    program = Program("t")
    call = program.call("call", REQUEST, REPLY, depth=depth)
    program.add("client", Impatient, server=call.client)
    program.add("server", Sluggish, clients=call.server)
    watch = drive(program, kind, tmp_path, Watch(lambda c: c.wires()["call"]["late"] >= 5 and c.total("samples_consumed") >= 5))
    assert watch.reason == "until"
    assert watch.final["client-0"]["episodes"] >= 5
    assert watch.wires["call"]["timeouts"] >= watch.wires["call"]["late"]


class Deaf:
    """Takes requests and never answers."""

    def __init__(self, me, clients):
        self.clients = clients

    async def step(self):
        await self.clients.take(most=8)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_deadline_without_a_free_slot(kind, tmp_path):
    """A deadline holds also when no slot is free."""
    program = Program("t")
    call = program.call("call", REQUEST, REPLY, depth=1)
    program.add("client", Impatient, server=call.client)
    program.add("server", Deaf, clients=call.server)
    watch = drive(program, kind, tmp_path, Watch(lambda c: c.total("episodes") >= 4, seconds=15))
    assert watch.reason == "until"


def test_requests_of_a_leaving_server_move(tmp_path):
    program = Program("t")
    call = program.call("call", REQUEST, REPLY, depth=2)
    program.add("client", Client, server=call.client, replicas=4)
    program.add("server", Server, clients=call.server, replicas=(1, 1, 3), batch=1)
    wanted, before = [], np.zeros(4)

    def replies(control):
        pages = control.snapshot()
        return np.array([pages[f"client-{k}"]["samples_consumed"] for k in range(4)])

    def served(control):
        """Every client has had 25 replies since the last change, so every server that was there has answered."""
        return (replies(control) >= before + 25).all()

    def act(control):
        if wanted and served(control):
            control.scale("server", wanted.pop(0))
            before[:] = replies(control)

    for kind in RUNTIMES:
        wanted[:], before[:] = [3, 1, 2, 1], 0
        watch = drive(program, kind, tmp_path, Watch(lambda c: not wanted and served(c), act))
        assert watch.reason == "until", kind  # with one of three servers there, all clients are served
        assert all(watch.final[f"server-{k}"]["env_steps"] > 0 for k in range(3)), kind


class Prompt:
    """Answers at once."""

    def __init__(self, me, clients):
        self.clients = clients

    async def step(self):
        for request in await self.clients.take(most=8):
            request.answer["y"][:] = 3 * int(request.data["x"][0])
            request.reply(request.answer)


class Looker:
    """Reads replies where they lie, the one before while the next is on its way."""

    def __init__(self, me, server):
        self.me, self.server, self.next, self.shown = me, server, 0, None

    async def step(self):
        self.next += 1
        draft = await self.server.slot()
        draft.data["x"][:], draft.data["client"][...] = self.next, self.me.index
        pending = draft.send()
        reply = await pending.look(timeout=20)
        assert (reply["y"] == 3 * self.next).all()
        if self.shown is not None:
            before, seen = self.shown
            assert (seen["y"] == 3 * (self.next - 1)).all(), "a reply was written over before it was given back"
            before.done()
        self.shown = pending, reply
        self.me.stats.add("samples_consumed")


@pytest.mark.parametrize("kind", RUNTIMES)
def test_a_reply_stays_until_done(kind, tmp_path):
    program = Program("t")
    call = program.call("call", REQUEST, REPLY, depth=2)
    program.add("client", Looker, server=call.client)
    program.add("server", Prompt, clients=call.server)
    watch = drive(program, kind, tmp_path, Watch(lambda c: c.total("samples_consumed") >= 300))
    assert watch.reason == "until" and watch.wires["call"]["timeouts"] == 0
