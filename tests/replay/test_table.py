"""Section 3, Table, and the faults of section 6, in-process and over the network alike."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from shoal import replay
from tests.replay.conftest import Start


def values(client: replay.Client, table: str, n: int = 200) -> set[int]:
    return set(client.sample(table, n, timeout=2).data["x"].tolist())


def test_five_lines() -> None:
    server = replay.Server([replay.Table("replay", replay.Prioritized(0.6))])
    client = server.client()
    client.insert({"obs": np.zeros(4, np.float32), "action": 1}, {"replay": 1.0})
    batch = client.sample("replay", batch_size=8)
    client.update_priorities("replay", batch.info.keys, np.full(8, 2.0))
    assert batch.data["obs"].shape == (8, 4) and batch.data["action"].tolist() == [1] * 8
    assert client.sample("replay").info.priorities.tolist() == [2.0]
    server.close()


def test_remover_above_max_size(start: Start) -> None:
    _, client = start(replay.Table("t", replay.Uniform(), replay.Fifo(), max_size=3))
    client.insert_batch({"x": np.arange(5)}, {"t": np.ones(5)})
    assert values(client, "t") == {2, 3, 4}
    assert client.info()["tables"]["t"]["size"] == 3


def test_the_remover_may_pick_the_new_item(start: Start) -> None:
    _, client = start(replay.Table("t", replay.Uniform(), replay.MinHeap(), max_size=2))
    client.insert({"x": 1}, {"t": 5.0})
    client.insert({"x": 2}, {"t": 6.0})
    client.insert({"x": 3}, {"t": 1.0})
    assert values(client, "t") == {1, 2}


def test_max_bytes(start: Start) -> None:
    _server, client = start(replay.Table("t", replay.Uniform(), max_size=1000, max_bytes=100_000))
    with client.writer(max_history=1) as writer:
        for i in range(100):
            writer.append({"x": np.full(1250, i)})  # 10,000 bytes, one to a chunk
            writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
        writer.flush()
    info = client.info()["tables"]["t"]
    assert info["bytes"] <= 100_000 and info["size"] == 10
    assert client.sample("t", 300).data["x"].min() >= 90
    assert client.info()["stored_bytes"] <= 120_000


def test_held_batch_keeps_its_values(start: Start) -> None:
    """A batch keeps its values while somebody holds it."""
    _, client = start(replay.Table("t", replay.Uniform(), max_size=4))
    held = []
    for i in range(12):
        client.insert_batch({"x": np.full((4, 3), i)}, {"t": np.ones(4)})
        held.append(client.sample("t", 5).data["x"])
    assert all((array == i).all() for i, array in enumerate(held))


def test_max_times_sampled_deletes(start: Start) -> None:
    _, client = start(replay.Table("t", replay.Fifo(), max_times_sampled=2))
    client.insert_batch({"x": np.arange(3)}, {"t": np.ones(3)})
    batch = client.sample("t", 6)
    assert batch.data["x"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.info.times_sampled.tolist() == [1, 2, 1, 2, 1, 2]
    assert client.info()["tables"]["t"]["size"] == 0


def test_queue_and_stack(start: Start) -> None:
    _, client = start(replay.Table.queue("q", 4), replay.Table.stack("s", 4))
    for i in range(4):
        client.insert({"x": i}, {"q": 1.0, "s": 1.0})
    with pytest.raises(replay.Timeout):
        client.insert({"x": 4}, {"q": 1.0}, timeout=0.05)
    assert client.sample("q", 4).data["x"].tolist() == [0, 1, 2, 3]
    assert client.sample("s", 4).data["x"].tolist() == [3, 2, 1, 0]
    with pytest.raises(replay.Timeout):
        client.sample("q", timeout=0.05)


def test_batch_in_part_at_the_deadline(start: Start) -> None:
    """A batch is served in part when the time is over."""
    _, client = start(replay.Table.queue("q", 10))
    for i in range(3):
        client.insert({"x": i}, {"q": 1.0})
    began = time.monotonic()
    assert client.sample("q", 5, timeout=0.2).data["x"].tolist() == [0, 1, 2]
    assert 0.15 < time.monotonic() - began < 9  # not the client's own timeout


def test_timeout_zero_means_now(start: Start) -> None:
    _, client = start(replay.Table.queue("q", 1))
    began = time.monotonic()
    with pytest.raises(replay.Timeout):
        client.sample("q", timeout=0)
    client.insert({"x": 1}, {"q": 1.0}, timeout=0)
    with pytest.raises(replay.Timeout):
        client.insert({"x": 2}, {"q": 1.0}, timeout=0)
    assert time.monotonic() - began < 9  # not the client's own timeout
    assert client.sample("q", 3, timeout=0).data["x"].tolist() == [1]


def test_timeout_none_waits(start: Start) -> None:
    _, client = start(replay.Table.queue("q", 1))
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(client.sample("q", 2, timeout=None).data["x"].tolist()))
    thread.start()
    time.sleep(0.2)
    client.insert({"x": 7}, {"q": 1.0}, timeout=None)
    client.insert({"x": 8}, {"q": 1.0}, timeout=None)
    thread.join(10)
    assert found == [7, 8]


def test_unknown_updates_are_counted(start: Start) -> None:
    _, client = start(replay.Table("t", replay.Prioritized(1.0)))
    key = client.insert({"x": 1}, {"t": 1.0})["t"]
    client.update_priorities("t", [key, key + 1, 12345], [3.0, 9.0, 9.0])
    assert client.sample("t").info.priorities.tolist() == [3.0]
    assert client.info()["tables"]["t"]["unknown_updates"] == 2


def test_one_bad_item_is_refused(start: Start) -> None:
    """One bad item is refused with a reason and the others are applied."""
    _, client = start(replay.Table("t", replay.Uniform()))
    with pytest.raises(replay.InvalidItem, match="priority nan of item 1"):
        client.insert_batch({"x": np.arange(4)}, {"t": np.array([1.0, np.nan, 2.0, 3.0])})
    assert values(client, "t") == {0, 2, 3}
    assert client.info()["tables"]["t"]["refused_items"] == 1


def test_a_negative_priority_ends_nothing(start: Start) -> None:
    _, client = start(replay.Table("t", replay.Prioritized(0.6)))
    client.insert({"x": 1}, {"t": 1.0})
    for _ in range(3):
        with pytest.raises(replay.InvalidItem):
            client.insert({"x": 2}, {"t": -1.0})
        with pytest.raises(replay.InvalidItem):
            client.update_priorities("t", client.sample("t", timeout=2).info.keys, [-1.0])
    client.insert({"x": 3}, {"t": 1.0}, timeout=2)
    assert values(client, "t") == {1, 3}


def test_timed_out_insert_stays_out(start: Start) -> None:
    _, client = start(replay.Table.queue("q", 1))
    client.insert({"x": 1}, {"q": 1.0})
    with pytest.raises(replay.Timeout):
        client.insert({"x": 2}, {"q": 1.0}, timeout=0.1)
    assert client.sample("q").data["x"].tolist() == [1]
    time.sleep(0.3)
    with pytest.raises(replay.Timeout):
        client.sample("q", timeout=0.1)
    client.insert({"x": 3}, {"q": 1.0})
    assert client.sample("q").data["x"].tolist() == [3]


def test_a_closed_server_confirms_nothing(start: Start) -> None:
    server, client = start(replay.Table.queue("q", 1))
    client.insert({"x": 1}, {"q": 1.0})
    raised: list[BaseException] = []

    def insert() -> None:
        try:
            client.insert({"x": 2}, {"q": 1.0}, timeout=5)
        except replay.ReplayError as error:
            raised.append(error)

    thread = threading.Thread(target=insert)
    thread.start()
    time.sleep(0.2)
    server.close()
    thread.join(10)
    assert len(raised) == 1
    with pytest.raises((replay.Closed, replay.Timeout)):
        client.insert({"x": 3}, {"q": 1.0}, timeout=0.2)


def test_late_updates_and_a_new_item(start: Start) -> None:
    """Late updates do not touch a new item in the old slot."""
    _server, client = start(replay.Table("t", replay.Prioritized(1.0), max_size=2))
    old = client.insert_batch({"x": np.arange(2)}, {"t": np.ones(2)})["t"]
    client.insert_batch({"x": np.arange(2, 4)}, {"t": np.full(2, 7.0)})
    client.update_priorities("t", old, [99.0, 99.0])
    assert set(client.sample("t", 50).info.priorities.tolist()) == {7.0}


def test_late_updates_of_a_sampled_batch(start: Start) -> None:
    """Where a batch lies is remembered for the updates that follow: what has gone since must not be found there."""
    _server, client = start(replay.Table("t", replay.Prioritized(1.0), max_size=2))
    client.insert_batch({"x": np.arange(2)}, {"t": np.ones(2)})
    batch = client.sample("t", 8)
    client.update_priorities("t", batch.info.keys, np.full(8, 5.0))
    assert set(client.sample("t", 50).info.priorities.tolist()) == {5.0}
    client.insert_batch({"x": np.arange(2, 5)}, {"t": np.full(3, 7.0)})  # every slot has been used again
    client.update_priorities("t", batch.info.keys, np.full(8, 99.0))
    assert set(client.sample("t", 50).info.priorities.tolist()) == {7.0}
    assert client.info()["tables"]["t"]["unknown_updates"] == 8


def test_updates_in_another_order(start: Start) -> None:
    """Updates in another order than drawn find their items."""
    _server, client = start(replay.Table("t", replay.Prioritized(1.0)))
    keys = client.insert_batch({"x": np.arange(50)}, {"t": np.ones(50)})["t"]
    batch = client.sample("t", 30)
    first = batch.info.keys[0]
    mixed = np.concatenate([[first], keys[keys != first][::-1]])  # begins like the batch
    client.update_priorities("t", mixed, mixed.astype(float))
    drawn = client.sample("t", 200).info
    assert np.array_equal(drawn.priorities, drawn.keys.astype(float))


def test_keys_are_never_used_again(start: Start) -> None:
    _, client = start(replay.Table("t", max_size=5))
    seen: set[int] = set()
    for _ in range(20):
        keys = client.insert_batch({"x": np.arange(7)}, {"t": np.ones(7)})["t"].tolist()
        assert not seen & set(keys)
        seen |= set(keys)
    client.reset("t")
    assert client.insert({"x": 1}, {"t": 1.0})["t"] not in seen


def test_signatures_are_checked(start: Start) -> None:
    signature = {"x": replay.Array((3,), np.float32), "y": replay.Array((None, 2), np.int64)}
    _, client = start(replay.Table("t", signature=signature))
    good = {"x": np.zeros(3, np.float32), "y": np.zeros((5, 2), np.int64)}
    client.insert(good, {"t": 1.0})
    mismatch = (replay.SignatureMismatch, replay.InvalidItem)
    for path, bad in [("x", np.zeros(4, np.float32)), ("x", np.zeros(3)), ("y", np.zeros((5, 3), np.int64))]:
        with pytest.raises(mismatch, match=f"'{path}'"):
            client.insert({**good, path: bad}, {"t": 1.0})
    with pytest.raises(mismatch, match="'y' is missing"):
        client.insert({"x": good["x"]}, {"t": 1.0})
    with pytest.raises(mismatch, match="'z'"):
        client.insert({**good, "z": 1}, {"t": 1.0})
    assert client.info()["tables"]["t"]["size"] == 1


def test_first_item_fixes_the_signature(start: Start) -> None:
    """The first item fixes an unsigned table until reset."""
    _, client = start(replay.Table("t"))
    client.insert({"x": np.zeros(3)}, {"t": 1.0})
    with pytest.raises((replay.SignatureMismatch, replay.InvalidItem), match="'x'"):
        client.insert({"x": np.zeros(4)}, {"t": 1.0})
    client.reset("t")
    client.insert({"x": np.zeros(4)}, {"t": 1.0})


def test_prefetch_counts_consumed(start: Start) -> None:
    _, client = start(replay.Table("t", replay.Uniform()))
    client.insert_batch({"x": np.arange(10)}, {"t": np.ones(10)})
    with client.dataset("t", batch_size=4, prefetch=3) as dataset:
        for _ in range(5):
            next(dataset)
        deadline = time.monotonic() + 60
        while not client.info()["tables"]["t"]["reserved"] and time.monotonic() < deadline:
            time.sleep(0.02)
        info = client.info()["tables"]["t"]
        assert info["samples"] == 20 and info["reserved"] > 0
    info = client.info()["tables"]["t"]
    assert info["samples"] == 20 and info["reserved"] == 0


def test_queue_dataset_reads_not_ahead(start: Start) -> None:
    _, client = start(replay.Table.queue("q", 10))
    for i in range(6):
        client.insert({"x": i}, {"q": 1.0})
    with client.dataset("q", batch_size=2, prefetch=4) as dataset:
        assert next(dataset).data["x"].tolist() == [0, 1]
    assert client.info()["tables"]["q"]["size"] == 4


def test_unknown_table(start: Start) -> None:
    _, client = start(replay.Table("t"))
    with pytest.raises(replay.NotFound, match="nope"):
        client.sample("nope", timeout=1)
    with pytest.raises((replay.NotFound, replay.InvalidItem), match="nope"):
        client.insert({"x": 1}, {"nope": 1.0})
    client.insert({"x": 1}, {"t": 1.0})


def test_chunks_shared_by_tables(start: Start) -> None:
    """Chunks are shared by tables and freed with the last item."""
    server, client = start(replay.Table("a", replay.Uniform()), replay.Table("b", replay.Uniform()))
    with client.writer(max_history=4) as writer:
        for i in range(4):
            writer.append({"x": np.full(1000, i)})
        for table in ("a", "b"):
            writer.create_item(table, 1.0, {"x": writer.history["x"][:]})
        writer.create_item("a", 1.0, {"x": writer.history["x"][-2:]})
        writer.flush()
    info = client.info()
    assert info["tables"]["a"]["bytes"] == info["tables"]["b"]["bytes"] == info["stored_bytes"]
    client.reset("a")
    assert client.info()["stored_bytes"] > 0
    client.reset("b")
    time.sleep(0.1)
    assert server.core.store.stored_bytes == 0 and server.core.store.live == 0


def test_items_of_different_lengths(start: Start) -> None:
    """Items of different lengths are padded and say so."""
    _, client = start(replay.Table("t", replay.Fifo(), max_times_sampled=1))
    with client.writer(max_history=5) as writer:
        for i in range(5):
            writer.append({"x": i + 1})
        writer.create_item("t", 1.0, {"x": writer.history["x"][-2:]})
        writer.create_item("t", 1.0, {"x": writer.history["x"][-4:]})
        writer.flush()
    batch = client.sample("t", 2)
    assert batch.data["x"].tolist() == [[4, 5, 0, 0], [2, 3, 4, 5]]
    assert batch.info.lengths is not None and batch.info.lengths["x"].tolist() == [2, 4]


def test_values_and_selections_in_a_batch(start: Start) -> None:
    """Values given whole and selections of steps share a batch."""
    _, client = start(replay.Table("t", replay.Fifo(), max_times_sampled=1, signature={"x": replay.Array((None,), np.int64)}))
    wanted = [[7, 8, 9, 10], [0, 1, 2], [10, 11, 12], [5]]
    for order in (wanted, wanted[::-1]):
        for values in order:
            if values == [10, 11, 12]:
                with client.writer(max_history=3) as writer:
                    for value in values:
                        writer.append({"x": value})
                    writer.create_item("t", 1.0, {"x": writer.history["x"][-3:]})
            else:
                client.insert({"x": np.array(values)}, {"t": 1.0})
        batch = client.sample("t", 4)
        assert batch.data["x"].tolist() == [values + [0] * (4 - len(values)) for values in order]
        assert batch.info.lengths is not None and batch.info.lengths["x"].tolist() == [len(values) for values in order]


def test_only_the_first_axis_may_vary() -> None:
    with replay.Server([replay.Table("t", signature={"x": replay.Array((None, None), np.int64)})]) as server:
        client = server.client()
        client.insert({"x": np.zeros((2, 3), np.int64)}, {"t": 1.0})
        client.insert({"x": np.zeros((5, 3), np.int64)}, {"t": 1.0})
        with pytest.raises(replay.SignatureMismatch, match=r"'x'.*only the first axis may vary"):
            client.insert({"x": np.zeros((2, 4), np.int64)}, {"t": 1.0})


def test_64_threads() -> None:
    table = replay.Table("t", replay.Prioritized(0.6), max_size=500)
    with replay.Server([table]) as server:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                rng = np.random.default_rng(seed)
                client = server.client(timeout=20)
                for _ in range(20):
                    client.insert_batch({"x": rng.integers(0, 9, (8, 3)), "y": rng.random(8)}, {"t": rng.random(8)})
                    batch = client.sample("t", 16)
                    assert batch.data["x"].max() < 9
                    client.update_priorities("t", batch.info.keys, rng.random(16))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert table.limiter.inserts == 64 * 160 and table.limiter.samples == 64 * 320
        assert server.core.table("t").size == 500
