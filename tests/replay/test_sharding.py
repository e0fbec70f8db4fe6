"""Section 3, Sharding, with real servers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal import replay
from shoal.replay.client import timings

Shards = tuple[list[replay.Server], replay.Client]


@pytest.fixture
def shards() -> Iterator[Shards]:
    servers = [
        replay.Server([replay.Table("t", replay.Prioritized(1.0)), replay.Table("u", replay.Uniform())],
                      address="tcp://127.0.0.1:0", seed=i)
        for i in range(3)
    ]  # fmt: skip
    client = replay.Client([server.address for server in servers], timeout=10)
    yield servers, client
    client.close()
    for server in servers:
        server.close()


def test_writers_are_spread(shards: Shards) -> None:
    servers, client = shards
    for w in range(6):
        with client.writer(max_history=1) as writer:
            writer.append({"x": w})
            writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
    assert [server.info()["tables"]["t"]["size"] for server in servers] == [2, 2, 2]
    assert client.info()["tables"]["t"]["size"] == 6


def test_inserts_are_spread(shards: Shards) -> None:
    servers, client = shards
    for i in range(9):
        client.insert({"x": i}, {"t": 1.0})
        client.writer().close()  # writers have turns of their own
    assert [server.info()["tables"]["t"]["size"] for server in servers] == [3, 3, 3]
    for _ in range(3):
        client.insert_batch({"x": np.arange(10)}, {"t": np.ones(10)})
    assert [server.info()["tables"]["t"]["size"] for server in servers] == [13, 13, 13]
    assert all(server.info()["writers"] == 1 for server in servers)


def test_samples_and_updates(shards: Shards) -> None:
    """Samples follow priorities or sizes and updates find their shard."""
    servers, client = shards
    for server, priorities in zip(servers, ([1.0], [2.0, 2.0], [5.0]), strict=True):
        with replay.Client(server.address, timeout=5) as own:
            for priority in priorities:
                own.insert({"x": priority}, {"t": priority, "u": 1.0})
    batch = client.sample("t", 20_000)
    for value, p in ((1.0, 0.1), (2.0, 0.4), (5.0, 0.5)):
        share = (batch.data["x"] == value).mean()
        assert abs(share - p) < 4 * np.sqrt(p * (1 - p) / 20_000)
    assert np.allclose(batch.info.probabilities, batch.data["x"] / 10)
    uniform = client.sample("u", 20_000).data["x"]
    assert abs((uniform == 2.0).mean() - 0.5) < 4 * np.sqrt(0.25 / 20_000)
    client.update_priorities("t", batch.info.keys, batch.data["x"] * 10)
    for server in servers:
        with replay.Client(server.address, timeout=5) as own:
            drawn = own.sample("t", 50)
            assert np.array_equal(drawn.info.priorities, drawn.data["x"] * 10)
    assert client.info()["tables"]["t"]["unknown_updates"] == 0
    assert client.delete("t", np.unique(batch.info.keys)) == 4


SHARD = """
import sys, time
from shoal import replay
server = replay.Server([replay.Table("t", replay.Uniform()), replay.Table.queue("q", 100)], address=sys.argv[1], seed=1)
print(server.address, flush=True)
time.sleep(600)
"""


def start(address: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", SHARD, address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def fill(address: str, value: int) -> None:
    with replay.Client(address, timeout=60) as own:
        own.insert_batch({"x": np.full(50, value)}, {"t": np.ones(50)})


def test_shards_go_on_without_a_dead_one() -> None:
    """The living shards go on without a dead one and take it in again."""
    processes, addresses = zip(*(start("tcp://127.0.0.1:0") for _ in range(3)), strict=True)
    processes = list(processes)
    client = replay.Client(addresses, timeout=60)
    try:
        for shard, address in enumerate(addresses):
            fill(address, shard)
        batch = client.sample("t", 300)
        assert set(batch.data["x"]) == {0, 1, 2}
        end(processes[1])

        again = client.sample("t", 300)
        while not client.info()["down"]:
            again = client.sample("t", 300)
        again = client.sample("t", 300)
        assert set(again.data["x"]) == {0, 2} and np.allclose(again.info.probabilities, 0.01) and again.info.table_size == 100
        info = client.info()
        assert list(info["down"]) == [addresses[1]] and info["tables"]["t"]["size"] == 100 and len(info["shards"]) == 2
        client.update_priorities("t", batch.info.keys, np.ones(300))
        assert client.info()["missed_updates"] == (batch.data["x"] == 1).sum()
        for i in range(4):
            client.insert({"x": 7}, {"t": 1.0})
            with client.writer() as writer:
                writer.append({"x": 10 + i})
                writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
        assert client.info()["tables"]["t"]["size"] == 108
        with client.dataset("t", 32) as batches:
            assert 1 not in next(batches).data["x"]
        with pytest.raises(replay.Timeout, match="did not answer; the other shards have done it"):
            client.reset("q")

        processes[1], address = start(addresses[1])
        assert address == addresses[1]
        fill(address, 1)
        deadline = time.monotonic() + 60
        while client.info()["down"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert client.info()["down"] == {} and client.info()["tables"]["t"]["size"] == 158
        assert 1 in client.sample("t", 300).data["x"]
    finally:
        client.close()
        for process in processes:
            end(process)


def test_insert_after_its_shard_died() -> None:
    """An insert goes to another shard after its own died."""
    processes, addresses = zip(*(start("tcp://127.0.0.1:0") for _ in range(2)), strict=True)
    client = replay.Client(addresses, timeout=60)
    try:
        client.insert({"x": 1}, {"t": 1.0})
        client.insert({"x": 1}, {"t": 1.0})
        end(processes[0])
        with pytest.raises(replay.Timeout):  # its turn
            client.insert({"x": 2}, {"t": 1.0}, timeout=0.1)
        for _ in range(3):
            client.insert({"x": 3}, {"t": 1.0})
        assert client.info()["tables"]["t"]["size"] == 4
        assert set(client.sample("t", 100).data["x"]) == {1, 3}
    finally:
        client.close()
        end(processes[1])


def test_no_shard_at_all(impatient: None) -> None:
    client = replay.Client(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], timeout=0.1)
    with pytest.raises(replay.Timeout, match="none of 2 shards"):
        client.sample("t")
    with pytest.raises(replay.Timeout, match="none of 2 shards"):
        client.info()
    client.close()


def serve(address: str, value: int) -> replay.Server:
    """A shard in this process, with items."""
    server = replay.Server([replay.Table("t", replay.Uniform())], address=address)
    server.client().insert_batch({"x": np.full(50, value)}, {"t": np.ones(50)})
    return server


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_drawn_ahead_of_a_restart() -> None:
    """What was drawn ahead is settled on the others when a shard was restarted."""
    servers = [serve("tcp://127.0.0.1:0", shard) for shard in range(2)]
    with replay.Client([server.address for server in servers], timeout=60) as client:
        with client.dataset("t", 32, prefetch=4) as batches:
            next(batches)
            until(lambda: batches._ready.full())
            servers[0].close()
            servers[0] = serve(servers[0].address or "", 0)
            seen = {int(x) for _ in range(20) for x in next(batches).data["x"]}
            until(lambda: not client.info()["down"])
        assert 1 in seen
        until(lambda: [server.info()["tables"]["t"]["reserved"] for server in servers] == [0, 0])
    for server in servers:
        server.close()


def test_all_shards_are_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all shards down, a call waits for one as long as it may take."""
    monkeypatch.setattr(timings, "DEAD_SECONDS", 1.0)
    servers = [serve("tcp://127.0.0.1:0", shard) for shard in range(2)]
    with replay.Client([server.address for server in servers], timeout=60) as client, ThreadPoolExecutor() as pool:
        batches = client.dataset("t", 4, timeout=0.5)
        next(batches)
        for server in servers:
            server.close()

        def all_down() -> bool:
            with pytest.raises(replay.Timeout) as caught:
                client.sample("t", 4, timeout=0.1)
            return "none of 2 shards" in str(caught.value)

        until(all_down)
        calls, sample = [], client._backend.sample

        def counted(*given: Any) -> replay.Batch:
            calls.append(given)
            return sample(*given)

        monkeypatch.setattr(client._backend, "sample", counted)
        with pytest.raises(replay.Timeout):
            while True:
                next(batches)
        batches.close()
        assert len(calls) < 100  # each waits
        waiting = pool.submit(client.sample, "t", 4)
        with serve(servers[1].address or "", 7):
            assert waiting.result().data["x"].tolist() == [7] * 4
