"""The same mistake raises the same error in-process, over ipc and over TCP; none of them is Python's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import replay
from shoal.errors import CheckpointError, ConfigError, ShoalError
from tests.replay.conftest import Start

Call = Callable[[replay.Client], Any]


def through_writer(table: str = "t", priority: Any = 1.0, data: Any = None) -> Call:
    def call(client: replay.Client) -> None:
        with client.writer(max_history=2) as writer:
            writer.append({"x": np.zeros(3)})
            writer.create_item(table, priority, {"x": writer.history["x"][-1]} if data is None else data)
            writer.flush()

    return call


MISTAKES: dict[str, tuple[type[ShoalError], Call]] = {
    "no columns": (replay.InvalidItem, lambda c: c.insert({}, {"t": 1.0})),
    "no such table": (replay.NotFound, lambda c: c.insert({"x": np.zeros(3)}, {"zz": 1.0})),
    "no such table, writer": (replay.NotFound, through_writer("zz")),
    "no columns, writer": (replay.InvalidItem, through_writer(data={})),
    "words for a priority, writer": (replay.InvalidItem, through_writer(priority="high")),
    "words for a priority": (replay.InvalidItem, lambda c: c.insert({"x": np.zeros(3)}, {"t": "high"})),
    "two priorities": (replay.InvalidItem, lambda c: c.insert({"x": np.zeros(3)}, {"t": [1.0, 2.0]})),
    "a negative priority": (replay.InvalidItem, lambda c: c.insert({"x": np.zeros(3)}, {"t": -1.0})),
    "ragged": (replay.InvalidItem, lambda c: c.insert({"x": [[1, 2], [3]]}, {"t": 1.0})),
    "objects": (replay.SignatureMismatch, lambda c: c.insert({"x": object()}, {"t": 1.0})),
    "another shape": (replay.SignatureMismatch, lambda c: c.insert({"x": np.zeros(4)}, {"t": 1.0})),
    "another dtype": (replay.SignatureMismatch, lambda c: c.insert({"x": np.zeros(3, np.float32)}, {"t": 1.0})),
    "rows differ": (replay.InvalidItem, lambda c: c.insert_batch({"x": np.zeros((4, 3)), "y": np.zeros(3)}, {"t": 1.0})),
    "batch of 0": (replay.InvalidItem, lambda c: c.sample("t", 0)),
    "batch of 2.5": (replay.InvalidItem, lambda c: c.sample("t", 2.5)),  # type: ignore[arg-type]
    "sample of no table": (replay.NotFound, lambda c: c.sample("zz")),
    "nothing to sample": (replay.Timeout, lambda c: c.sample("empty", timeout=0)),
    "not a time": (replay.InvalidItem, lambda c: c.sample("t", timeout=float("nan"))),
    "words for a time": (replay.InvalidItem, lambda c: c.sample("t", timeout="1")),  # type: ignore[arg-type]
    "fewer priorities": (replay.InvalidItem, lambda c: c.update_priorities("t", [1, 2], [1.0])),
    "words for priorities": (replay.InvalidItem, lambda c: c.update_priorities("t", [1], ["x"])),
    "keys of 1.5": (replay.InvalidItem, lambda c: c.update_priorities("t", [1.5], [1.0])),
    "update of no table": (replay.NotFound, lambda c: c.update_priorities("zz", [1], [1.0])),
    "delete from no table": (replay.NotFound, lambda c: c.delete("zz", [1])),
    "reset of no table": (replay.NotFound, lambda c: c.reset("zz")),
    "a transform of no column": (replay.NotFound, lambda c: c.sample("t", transform={"y": replay.column("nope")})),
    "a transform that is none": (replay.InvalidItem, lambda c: c.sample("t", transform={"y": 5})),
    "a transform that does not fit": (replay.InvalidItem, lambda c: c.sample("t", transform={"y": replay.column("x").window(9)})),
    "a checkpoint into a file": (CheckpointError, lambda c: c.checkpoint()),
    "an option that is none": (ConfigError, lambda c: c.writer(foo=1)),
    "words for prefetch": (ConfigError, lambda c: c.dataset("t", prefetch="x")),  # type: ignore[arg-type]
    "prefetch of -1": (ConfigError, lambda c: c.dataset("t", prefetch=-1)),
    "a compression that is none": (ConfigError, lambda c: c.writer(compression="zip")),
}


def test_the_same_error_whatever_the_way(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, client = start(replay.Table("t"), replay.Table("empty"), checkpoint_dir=tmp_path / "file")
    client.insert({"x": np.zeros(3)}, {"t": 1.0})
    for name, (kind, call) in MISTAKES.items():
        with pytest.raises(ShoalError) as caught:
            call(client)
        assert type(caught.value) is kind, f"{name}: {caught.value!r}"
    assert client.info()["tables"]["t"]["size"] == 1
    for long in (float("inf"), 1e12):
        assert len(client.sample("t", 2, timeout=long)) == 2


@pytest.mark.parametrize("index", [1.7, "a", None, np.array([True, False, True]), [0.5], [True]])
def test_steps_are_whole_numbers(index: Any) -> None:
    with replay.Server([replay.Table("t")]) as server:
        writer = server.client().writer(max_history=3)
        for i in range(3):
            writer.append({"x": i})
        with pytest.raises(replay.InvalidItem, match="whole number"):
            writer.history["x"][index]


def test_stored_can_be_sent(start: Start) -> None:
    _, client = start(replay.Table("t"))
    with client.writer() as writer:
        writer.append({"when": np.datetime64(5, "100ns"), "name": np.array("abc"), "y": 1})
        writer.create_item("t", 1.0, {name: writer.history[name][-1] for name in ("when", "name", "y")})
    data = client.sample("t").data
    assert data["when"][0] == np.datetime64(5, "100ns") and data["name"][0] == "abc"


def test_an_address_is_an_address() -> None:
    with pytest.raises(ConfigError, match="an address"):
        replay.Client(None)


@pytest.mark.parametrize(
    "options", [{"storage": "disk"}, {"restore": "all"}, {"storage": "memmap", "directory": "/dev/null"}, {"keep": 0}]
)
def test_wrong_server_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replay.Server([replay.Table("t")], **options)


@pytest.mark.parametrize(
    "options",
    [{"max_size": "5"}, {"max_size": 1.5}, {"max_size": float("nan")}, {"max_size": 1 << 63}, {"max_bytes": "1"}, {"max_bytes": 0},
     {"max_times_sampled": 1.5}, {"selector": "uniform"}, {"selector": replay.Fifo}, {"remover": 5}, {"limiter": 5}, {"name": 5}],
)  # fmt: skip
def test_wrong_table_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="name" if "name" in options else min(options)):
        replay.Table(**{"name": "t", **options})
    assert replay.Table("t", max_size=1e6).max_size == 1_000_000  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.5, "x"])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed"):
        replay.Server([replay.Table("t")], seed=seed)


@pytest.mark.parametrize("build", [replay.Client, lambda address: replay.Server([replay.Table("t")], address=address)])
def test_a_port_is_one(build: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="a port is at most 65535"):
        build("tcp://127.0.0.1:99999")


def test_a_limiter_counts_for_one_table() -> None:
    limiter = replay.MinSize(1)
    with pytest.raises(ConfigError, match="a limiter of its own"):
        replay.Server([replay.Table("a", limiter=limiter), replay.Table("b", limiter=limiter)])
    table = replay.Table.queue("q", 1)
    with replay.Server([table]) as server:
        server.client().insert({"x": 1}, {"q": 1.0}, timeout=0)
        with pytest.raises(ConfigError, match="close a server before"):
            replay.Server([table])
    with replay.Server([table]) as server:
        assert server.info()["tables"]["q"]["inserts"] == 0
        server.client().insert({"x": 1}, {"q": 1.0}, timeout=0)


@pytest.mark.parametrize("key", ["secret", replay.Key.generate().public], ids=["word", "public"])
def test_a_key_is_a_key(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"replay\.Key"):
        replay.Client("tcp://127.0.0.1:1", key=key)
    with pytest.raises(ConfigError, match=r"replay\.Key"):
        replay.Server([replay.Table("t")], address="tcp://127.0.0.1:0", key=key)


@pytest.mark.parametrize("bad", [b"short", "short", b"~" * 40, b"#" * 40, 5])
def test_keys_are_checked(bad: Any) -> None:
    good = replay.Key.generate()
    for build in (lambda: replay.Key(bad, good.secret), lambda: replay.Key(good.public, good.secret, server=bad),
                  lambda: good.allowing(bad)):  # fmt: skip
        with pytest.raises(ConfigError, match="Z85"):
            build()
    assert replay.Key(good.public.decode(), good.secret.decode()).public == good.public
