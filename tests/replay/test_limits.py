"""What is too large: items above max_bytes, batches above a table's size, transforms without end."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from shoal import replay
from shoal.replay.client.expressions import Expression
from shoal.replay.errors import Refused
from tests.replay.conftest import Start


def test_chunks_of_a_small_table(start: Start) -> None:
    """Chunks are small where a table holds few bytes."""
    _, client = start(replay.Table("t", replay.Uniform(), max_bytes=500_000))
    for i in range(40):
        client.insert({"x": np.full(1000, i)}, {"t": 1.0})  # 8,000 bytes
    info = client.info()["tables"]["t"]
    assert info["size"] == 40 and info["bytes"] <= 500_000
    for i in range(40, 100):
        client.insert({"x": np.full(1000, i)}, {"t": 1.0})
    info = client.info()["tables"]["t"]
    assert 50 <= info["size"] <= 62 and info["bytes"] <= 500_000


def test_table_of_one_item(start: Start) -> None:
    """Bytes are those of whole chunks: an item may need several that it does not fill."""
    _, client = start(replay.Table("t", replay.Uniform(), max_bytes=9_000))
    with client.writer(max_history=2) as writer:
        for i in range(10):
            writer.append({"x": np.full(500, i)})
            if i:
                writer.create_item("t", 1.0, {"x": writer.history["x"][-2:]})  # 8,000 bytes
    assert client.info()["tables"]["t"]["size"] == 1
    assert client.sample("t").data["x"][0, :, 0].tolist() == [8, 9]


def test_item_larger_than_its_table(start: Start) -> None:
    _, client = start(replay.Table("t", max_bytes=10_000))
    with pytest.raises(replay.InvalidItem, match="at most 10000 bytes"):
        client.insert({"x": np.zeros(2000)}, {"t": 1.0})
    client.insert({"x": np.zeros(1000)}, {"t": 1.0})
    assert client.info()["tables"]["t"]["size"] == 1


def test_batch_larger_than_its_table(start: Start) -> None:
    """A batch larger than its table leaves the last items and no memory."""
    _, client = start(replay.Table("t", replay.Uniform(), max_size=100))
    keys = client.insert_batch({"x": np.arange(8_000 * 500).reshape(8_000, 500)}, {"t": 1.0})["t"]  # 32 MB
    info = client.info()
    assert len(set(keys.tolist())) == 8_000
    assert info["tables"]["t"]["size"] == 100 and info["tables"]["t"]["deletes"] == 7_900
    assert set(client.sample("t", 3000).data["x"][:, 0] // 500) == set(range(7_900, 8_000))
    assert info["stored_bytes"] <= 1 << 24
    client.update_priorities("t", keys, np.ones(8_000))
    assert client.info()["tables"]["t"]["unknown_updates"] == 7_900


def test_a_batch_of_millions_comes_in_pieces(start: Start) -> None:
    _, client = start(replay.Table("t", replay.Fifo(), max_size=2_000_000), replay.Table("u", max_size=10))
    keys = client.insert_batch({"x": np.arange(1_200_000, dtype=np.int32)}, {"t": np.ones(1_200_000), "u": 2.0}, timeout=60)
    assert len(keys["t"]) == len(keys["u"]) == 1_200_000
    assert [client.info()["tables"][name]["size"] for name in "tu"] == [1_200_000, 10]


def test_a_queue_takes_what_fits(start: Start) -> None:
    _, client = start(replay.Table.queue("q", 4))
    with pytest.raises(replay.Timeout):
        client.insert_batch({"x": np.arange(10)}, {"q": np.ones(10)}, timeout=0)
    assert client.sample("q", 10, timeout=0).data["x"].tolist() == [0, 1, 2, 3]


X = replay.column("x")
TOO_LARGE = {
    "pad": X.pad(10**9).sum(),
    "stack": X.stack(10**9).max(),
    "gather": replay.concat([X[[0] * 60_000].window(30_000)] * 4).sum(),
    "outer": (X.pad(50_000).reshape(50_000, 1) + X.pad(50_000).reshape(1, 50_000)).sum(),
    "many": replay.concat([X.pad(10**7)] * 20).sum(),
    "index of a list": Expression("index", [X], at=[0] * 200_000).sum(),
    "gather of lists": Expression("gather", [X], indices=[[0] * 1000] * 200).sum(),
}


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
@pytest.mark.parametrize("name", sorted(TOO_LARGE))
def test_transform_without_end(name: str, kind: str, tmp_path: Any) -> None:
    """A transform without end is refused by the service."""
    address = f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0"
    tables = [replay.Table.queue("q", 4)]
    with replay.Server(tables, address=address) as server, replay.Client(server.address, timeout=30) as client:
        client.insert({"x": np.zeros(10)}, {"q": 1.0})
        wanted = (replay.InvalidItem, "as an integer") if "list" in name else (Refused, "makes more than")
        with pytest.raises(wanted[0], match=wanted[1]) as caught:
            client.sample("q", 1, transform={"y": TOO_LARGE[name]})
        assert len(str(caught.value)) < 1000
        assert client.sample("q", 1, transform={"y": X.pad(20)}).data["y"].shape == (1, 20)


@pytest.mark.parametrize("data", [
    ["add", [["column", [], {"path": "x"}], ["column", [], {"path": "x"}]], {"dtype": "O"}],
    ["add", [["column", [], {"path": "x"}]] * 3, {}],
    ["negative", [["column", [], {"path": "x"}]], {"out": None}],
    ["concat", [], {"axis": 0}],
    ["column", [["column", [], {"path": "x"}]], {"path": "x"}],
])  # fmt: skip
def test_parameters_of_operations(data: list[Any]) -> None:
    """Operations take their own parameters only."""
    with pytest.raises(replay.InvalidItem, match="does not take"):
        Expression.from_data(data)


@pytest.mark.parametrize("transform", [{"y": replay.column("nope")}, {"y": X.window(50)}, {"y": X + X.pad(12)}, {"y": 5}])
def test_transform_that_fails_takes_no_items(start: Start, transform: Any) -> None:
    _, client = start(replay.Table.queue("q", 4))
    client.insert({"x": np.zeros(10)}, {"q": 1.0})
    before = client.info()["tables"]["q"]
    with pytest.raises((replay.InvalidItem, replay.NotFound)):
        client.sample("q", 1, transform=transform)
    after = client.info()["tables"]["q"]
    assert [after[what] for what in ("size", "samples", "deletes")] == [before[what] for what in ("size", "samples", "deletes")]
    assert len(client.sample("q", 1, timeout=0)) == 1


def test_failing_transform_takes_no_items(start: Start) -> None:
    """A transform that fails takes no items that come later."""
    _, client = start(replay.Table.queue("q", 4))
    raised: list[BaseException] = []

    def sample() -> None:
        try:
            client.sample("q", 1, timeout=60, transform={"y": replay.column("nope")})
        except replay.NotFound as error:
            raised.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    while not client.info()["tables"]["q"]["sample_blocked_seconds"]:
        pass
    client.insert({"x": np.zeros(10)}, {"q": 1.0})
    thread.join(60)
    assert raised and client.info()["tables"]["q"]["size"] == 1
