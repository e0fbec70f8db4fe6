"""After a Timeout nothing is applied later; what a client holds goes with its threads; a server's path is its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import replay
from shoal.errors import ConfigError
from shoal.replay.client import timings
from shoal.replay.client.server_connection import Connection

Process = tuple[subprocess.Popen[str], str, replay.Client]

SERVER = """
import sys, time
from shoal import replay
server = replay.Server([replay.Table("t", max_size=1000), replay.Table.queue("q", 100)], address=sys.argv[1])
print(server.address, flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["ipc", "tcp"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    """A server in a process of its own, with items in both tables."""
    address = f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0"
    server = subprocess.Popen([sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        with replay.Client(address, timeout=60) as client:
            client.insert_batch({"x": np.arange(20)}, {"t": np.ones(20), "q": np.ones(20)})
            yield server, address, client
    finally:
        server.send_signal(signal.SIGCONT)
        server.kill()
        server.wait()
        server.stdout.close()


def stop(server: subprocess.Popen[str]) -> None:
    """SIGSTOP, and wait until it has taken effect: a signal is delivered a moment after it was sent."""
    server.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{server.pid}/task")
    while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads.iterdir()):
        time.sleep(0.001)


def test_what_timed_out_is_not_applied_later(process: Process) -> None:
    server, _, client = process
    keys = client.sample("t", 20).info.keys
    client.sample("q", 1)
    lines = [client._backend._take() for _ in range(4)]  # every call has a connection that knows the server
    for line in lines:
        line.connection.request({"op": "info"}, (), 60)
        client._backend._put(line)
    before = client.info()["tables"]
    stop(server)
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(client.sample, "q", 1, timeout=0.1),
            pool.submit(client.delete, "t", keys, timeout=0.1),
            pool.submit(client.update_priorities, "t", keys, np.full(20, 5.0), timeout=0.1),
            pool.submit(client.reset, "t", timeout=0.1),
        ]
        for call in calls:
            with pytest.raises(replay.Timeout):
                call.result()
    server.send_signal(signal.SIGCONT)
    after = client.info()["tables"]
    for name in ("t", "q"):
        assert {what: after[name][what] for what in ("size", "samples", "deletes", "mass")} == {
            what: before[name][what] for what in ("size", "samples", "deletes", "mass")
        }


def test_sample_waiting_at_a_stop(process: Process) -> None:
    """A sample that waited when the server stopped takes nothing."""
    server, address, client = process
    client.sample("q", 20)
    raised = []

    def sample() -> None:
        try:
            client.sample("q", 1, timeout=1.0)
        except replay.Timeout as error:
            raised.append(error)

    blocked = client.info()["tables"]["q"]["sample_blocked_seconds"]
    thread = threading.Thread(target=sample)
    thread.start()
    while client.info()["tables"]["q"]["sample_blocked_seconds"] == blocked:
        pass  # until it waits at the server
    stop(server)
    thread.join()
    assert raised
    with replay.Client(address, timeout=60) as other:
        late = threading.Thread(target=lambda: other.insert({"x": 7}, {"q": 1.0}))
        late.start()
        time.sleep(0.2)  # whether it comes before or after does not matter
        server.send_signal(signal.SIGCONT)
        late.join()
        assert other.sample("q", 1, timeout=60).data["x"].tolist() == [7]


def test_deadline_on_the_servers_clock() -> None:
    """A request says its deadline on the server's clock."""
    with replay.Server([replay.Table("t")], address="tcp://127.0.0.1:0") as server:
        server.client().insert({"x": 1}, {"t": 1.0})
        connection = Connection(server.address or "", None)
        connection.request({"op": "info"}, (), 60)
        connection.send({"op": "reset", "table": "t", "until": time.monotonic() - 1})
        reply = connection.receive(60)
        assert reply is not None and reply[0]["error"] == "Timeout" and "reset came after its deadline" in reply[0]["reason"]
        assert server.info()["tables"]["t"]["size"] == 1
        connection.request({"op": "reset", "table": "t"}, (), 60)
        assert server.info()["tables"]["t"]["size"] == 0
        connection.close()


def test_changed_clock() -> None:
    """As one of another host at the same address: by its clock every request would come an hour late."""
    with replay.Server([replay.Table("t")], address="tcp://127.0.0.1:0") as server:
        connection = Connection(server.address or "", None)
        connection.request({"op": "info"}, (), 60)
        connection.clock_offset -= 3600
        server._service.incarnation += 1
        assert connection.request({"op": "info"}, (), 60)[0]["info"]["tables"]["t"]["size"] == 0
        assert abs(connection.clock_offset) < 60 and connection.incarnation == server._service.incarnation
        connection.close()


def test_greeting_before_a_sample() -> None:
    """After a restart an answer to an old question may lie in the socket: it says nothing of the request that was sent since."""
    with replay.Server([replay.Table.queue("q", 4)], address="tcp://127.0.0.1:0") as server:
        server.client().insert_batch({"x": np.arange(3)}, {"q": np.ones(3)})
        connection = Connection(server.address or "", None)
        connection.request({"op": "info"}, (), 60)
        server._service.incarnation += 1
        connection.ping()
        assert connection._socket.poll(60_000)
        connection.request({"op": "sample", "table": "q", "n": 1, "timeout": 60.0, "counted": True}, (), 60)
        connection.request({"op": "info"}, (), 60)
        assert server.info()["tables"]["q"]["size"] == 2 and connection.incarnation == server._service.incarnation
        connection.close()


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_call_waits_for_a_dead_server(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for a dead server as long as it may."""
    monkeypatch.setattr(timings, "DEAD_SECONDS", 0.2)
    server = replay.Server([replay.Table("t")], address=f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0")
    client = replay.Client(server.address, timeout=60)
    server.client().insert({"x": 1}, {"t": 1.0})
    client.sample("t")
    server.close()
    with ThreadPoolExecutor() as pool:
        with pytest.raises(replay.Timeout, match="does not answer"):
            client.info(timeout=None)  # nobody waits for ever
        calls = [pool.submit(client.sample, "t"), pool.submit(client.info)]
        time.sleep(1.0)  # longer than the silence of one that is taken for dead
        assert not any(call.done() for call in calls)
        with replay.Server([replay.Table("t")], address=server.address) as again:
            again.client().insert({"x": 2}, {"t": 1.0})
            assert calls[0].result().data["x"].tolist() == [2] and "tables" in calls[1].result()
            client.close()


def test_a_sample_sent_twice_is_drawn_once() -> None:
    """As by a client that finds another incarnation: it cannot know whether the first came through."""
    with replay.Server([replay.Table.queue("q", 4)], address="tcp://127.0.0.1:0") as server:
        connection = Connection(server.address or "", None)
        connection.request({"op": "info"}, (), 60)
        header = {"op": "sample", "table": "q", "n": 1, "timeout": 60.0, "counted": True}
        number = connection.send(dict(header))
        connection.send({**header, "id": number})
        connection.request({"op": "info"}, (), 60)  # both have come
        server.client().insert_batch({"x": np.arange(3)}, {"q": np.ones(3)})
        reply = connection.receive(60)
        assert reply is not None and reply[0]["id"] == number
        connection.request({"op": "info"}, (), 60)
        assert server.info()["tables"]["q"]["size"] == 2
        connection.close()


def test_nobody_waits_behind_a_longer_wait() -> None:
    tables = [replay.Table.queue("q", 4)]
    with replay.Server(tables, address="tcp://127.0.0.1:0") as server, replay.Client(server.address, timeout=60) as client:
        patient = threading.Thread(target=lambda: client.sample("q", 1, timeout=60))
        patient.start()
        while not client.info()["tables"]["q"]["sample_blocked_seconds"]:
            pass
        with pytest.raises(replay.Timeout, match="nothing could be sampled in time"):
            client.sample("q", 1, timeout=0)
        client.insert({"x": 1}, {"q": 1.0})
        patient.join()
        assert client.info()["tables"]["q"]["samples"] == 1


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_sockets_do_not_pile_up_with_threads(kind: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0"
    with replay.Server([replay.Table("t")], address=address) as server, replay.Client(server.address, timeout=60) as client:

        def work() -> None:
            client.insert({"x": 1}, {"t": 1.0})
            client.sample("t")

        counts = []
        for turn in range(40):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if turn in (19, 39):
                counts.append(len(os.listdir("/proc/self/fd")))
        assert client.info()["sessions"] <= 4
        assert counts[1] <= counts[0] + 16  # at most four of each at once, from any client
        assert client.info()["tables"]["t"]["inserts"] == 160


def test_second_server_at_a_path(tmp_path: Path) -> None:
    """A second server at an IPC path is refused."""
    address = f"ipc://{tmp_path}/s"
    with replay.Server([replay.Table("t")], address=address), replay.Client(address, timeout=30) as client:
        client.insert({"x": 1}, {"t": 1.0})
        with pytest.raises(ConfigError, match="another server listens there"):
            replay.Server([replay.Table("t")], address=address)
        with replay.Client(address, timeout=30) as other:
            assert other.info()["tables"]["t"]["size"] == 1
    with replay.Server([replay.Table("t")], address=address):
        pass  # free again


def test_the_path_of_a_dead_server_is_free(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    server = subprocess.Popen([sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline().strip() == address
    server.kill()
    server.wait()
    server.stdout.close()
    assert (tmp_path / "s").exists()
    with replay.Server([replay.Table("t")], address=address), replay.Client(address, timeout=30) as client:
        assert client.info()["tables"]["t"]["size"] == 0


def test_dataset_of_a_dead_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset of a dead server asks it once when it is closed."""
    address = f"ipc://{tmp_path}/s"
    asked: list[threading.Thread] = []
    server = subprocess.Popen([sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline().strip() == address
    with server.stdout, replay.Client(address, timeout=0.5) as client:
        client.insert({"x": 1}, {"t": 1.0})
        dataset = client.dataset("t", 1, prefetch=4)
        deadline = time.monotonic() + 60
        while dataset._ready.qsize() < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert dataset._ready.full()
        server.kill()
        server.wait()
        consume = dataset._backend.consume

        def noted(*values: Any) -> Any:
            asked.append(threading.current_thread())
            return consume(*values)

        monkeypatch.setattr(dataset._backend, "consume", noted)
        monkeypatch.setattr(timings, "DEAD_SECONDS", 0.2)
        dataset.close()
        assert asked.count(threading.main_thread()) == 1  # its own thread asks too, for the batch it could not hand over
