"""What must not outlive its owner: the descriptor of a connection, a fork's copy of a client, the memory of a closed server."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import replay
from shoal.replay.table import locked_core
from tests.replay.test_faults import wait_until
from tests.replay.test_network import end, line, spawn

SUCCESSOR = """
import sys
from shoal.replay.client.server_connection import Connection

def say(word):
    print(word, flush=True)
    sys.stdin.readline()

def connect():
    return Connection(sys.argv[1], None)

first = connect()
first.request({"op": "info"}, (), 60)
say("first")
busy = connect()
busy.request({"op": "info"}, (), 60)
say("busy")
busy.send({"op": "info"})
say("held up")
first.close()
say("closed")
second = connect()
second.send({"op": "sample", "table": "q", "n": 1, "timeout": 60.0, "counted": True})
say("waits")
for _ in range(2):
    busy.request({"op": "info"}, (), 60)
say("served on")
print("answered" if second.receive(60) else "forgotten", flush=True)
"""


def test_end_of_a_connection() -> None:
    """A descriptor is used again at once. Here the loop hears of the end only after the next one has spoken through it."""
    with replay.Server([replay.Table.queue("q", 4)], address="tcp://127.0.0.1:0") as server:
        child, spare = spawn(SUCCESSOR, server.address or ""), list[int]()

        def go_on() -> None:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()

        def lower_than(descriptor: int) -> list[int]:
            taken = [os.open(os.devnull, os.O_RDONLY)]
            while taken[-1] < descriptor:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            os.close(taken.pop())
            return taken

        def is_open(descriptor: int) -> bool:
            return os.path.exists(f"/proc/self/fd/{descriptor}")

        try:
            assert line(child) == "first"
            (descriptor,) = server._service._connections
            go_on()
            assert line(child) == "busy"
            with server._locked.lock:  # the loop waits for it as soon as it is asked something
                go_on()
                assert line(child) == "held up"
                time.sleep(0.2)
                go_on()
                assert line(child) == "closed"
                wait_until(lambda: not is_open(descriptor))
                spare = lower_than(descriptor)  # so that the next one is the same
                go_on()
                assert line(child) == "waits"
                time.sleep(0.3)
            wait_until(lambda: server.info()["tables"]["q"]["sample_blocked_seconds"] > 0)
            go_on()
            assert line(child) == "served on"
            go_on()
            server.client().insert({"x": 1}, {"q": 1.0})
            assert line(child) == "answered"
        finally:
            end(child)
            for taken in spare:
                os.close(taken)


def test_checkpoint_outlives_the_server(tmp_path: Path) -> None:
    """The descriptor that wakes the loop may be another file's by then."""
    server = replay.Server([replay.Table("t")], address="tcp://127.0.0.1:0", checkpoint_dir=tmp_path / "c")
    client = replay.Client(server.address, timeout=60)
    client.info()
    begun, go = threading.Event(), threading.Event()

    def save() -> str:
        begun.set()
        go.wait(60)
        return "saved"

    server._service._checkpoint = save
    before = set(threading.enumerate())

    def ask() -> None:
        with pytest.raises(replay.ReplayError):
            client.checkpoint(timeout=1.0)

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(60)
    saving = set(threading.enumerate()) - before - {asking}
    descriptor = server._service._endpoint.wake_fd
    server.close()
    with open(tmp_path / "victim", "wb") as victim:
        if not os.path.exists(f"/proc/self/fd/{descriptor}"):
            os.dup2(victim.fileno(), descriptor)
        go.set()
        for thread in saving:
            thread.join(60)
        assert os.path.getsize(tmp_path / "victim") == 0
        if os.path.sameopenfile(victim.fileno(), descriptor) and descriptor != victim.fileno():
            os.close(descriptor)
    asking.join(60)
    client.close()


FORKER = """
import os, signal, sys
from shoal import replay
client = replay.Client(sys.argv[1], timeout=60)
writer = client.writer()
dataset = client.dataset("t", 1)

def write():
    writer.append({"x": 1})
    writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
    writer.flush()

write()
next(dataset)
client.insert({"x": 1}, {"t": 1.0})
pid = os.fork()
if not pid:
    signal.alarm(60)
    calls = (client.info, lambda: client.sample("t"), lambda: client.insert({"x": 1}, {"t": 1.0}), client.writer,
             lambda: writer.append({"x": 1}), writer.flush, lambda: next(dataset))
    for call in calls:
        try:
            call()
            print("went through", flush=True)
        except replay.Closed as error:
            print(error, flush=True)
    for thing in (dataset, writer, client):
        thing.close()
    with replay.Client(sys.argv[1], timeout=60) as own:
        own.insert({"x": 2}, {"t": 1.0})
    print("ended", flush=True)
    os._exit(0)
os.waitpid(pid, 0)
write()
next(dataset)
dataset.close()
writer.close()
print(client.info()["tables"]["t"]["size"], flush=True)
"""


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_client_belongs_to_its_process(kind: str, tmp_path: Path) -> None:
    with replay.Server([replay.Table("t")], address=f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0") as server:
        process = spawn(FORKER, server.address or "")
        try:
            for what in ("client", "client", "client", "client", "writer", "writer", "dataset"):
                assert line(process) == f"this {what} belongs to the process that made it: make another one after the fork"
            assert line(process) == "ended"
            assert line(process) == "4"  # two of the writer, one insert, and the child's own
        finally:
            end(process)


def test_closed_while_a_batch_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may be closed while a batch is copied."""
    server = replay.Server([replay.Table("t")])
    client = server.client(timeout=60)
    with server.client() as other:
        other.insert_batch({"x": np.arange(100)}, {"t": np.ones(100)})
    copy = locked_core.run_plan

    def close_meanwhile(*given: Any) -> None:
        client.reset("t")  # its chunks are kept for the reader
        server.close()
        copy(*given)

    monkeypatch.setattr(locked_core, "run_plan", close_meanwhile)
    assert set(client.sample("t", 20).data["x"]) <= set(range(100))
    with pytest.raises(replay.Closed):
        client.sample("t", 20)
