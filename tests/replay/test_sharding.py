"""Section 3, Sharding, with real servers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shoal import replay

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


def test_samples_follow_priorities_or_sizes_and_updates_find_their_shard(shards: Shards) -> None:
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
