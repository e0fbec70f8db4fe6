"""Section 3, Writer: what is read back is exactly what was selected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import replay
from shoal.replay.client.history import runs_of
from shoal.replay.errors import Refused
from shoal.replay.table.compression import decode, decode_row, encode
from tests.replay.conftest import Start


def test_first_value_fixes_dtype_and_shape(start: Start) -> None:
    _, client = start(replay.Table("t"))
    writer = client.writer(max_history=3)
    writer.append({"a": {"b": np.zeros(3, np.float32)}, "c": 1})
    with pytest.raises(replay.SignatureMismatch, match="'a/b'"):
        writer.append({"a": {"b": np.zeros(4, np.float32)}, "c": 1})
    with pytest.raises(replay.SignatureMismatch, match="'a/b'"):
        writer.append({"a": {"b": np.zeros(3, np.float64)}, "c": 1})
    with pytest.raises(replay.SignatureMismatch, match="'c'"):
        writer.append({"a": {"b": np.zeros(3, np.float32)}, "c": 1.5})
    assert len(writer.history) == 1
    writer.close()


def test_an_older_cell_is_refused(start: Start) -> None:
    _, client = start(replay.Table("t"))
    with client.writer(max_history=3) as writer:
        for i in range(5):
            writer.append({"x": i})
        with pytest.raises(replay.InvalidItem, match="max_history 3"):
            writer.history["x"][-4]
        kept = writer.history["x"][-3]
        writer.append({"x": 5})
        with pytest.raises(replay.InvalidItem, match="left the history"):
            writer.create_item("t", 1.0, {"x": kept})
        with pytest.raises(replay.InvalidItem, match="empty"):
            writer.history["x"][3:3]


def test_int_slice_and_list(start: Start) -> None:
    _, client = start(replay.Table("t", replay.Fifo(), max_times_sampled=1), replay.Table("one"))
    with client.writer(max_history=50) as writer:
        for i in range(50):
            writer.append({"x": np.array([i, -i])})
        writer.create_item("one", 1.0, {"x": writer.history["x"][-2]})
        wanted: list[Any] = [slice(-3, None), slice(None, None, 7), slice(None, None, -1), slice(40, 2, -5), [3, 1, 1, 49, 0]]
        for index in wanted:
            writer.create_item("t", 1.0, {"x": writer.history["x"][index]})
        writer.flush()
    assert client.sample("one").data["x"].tolist() == [[48, -48]]  # an int drops the time axis
    whole = np.stack([np.arange(50), -np.arange(50)], 1)
    for index in wanted:
        assert np.array_equal(client.sample("t").data["x"][0], whole[index])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_selection_across_chunk_borders(data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 60))
    history = data.draw(st.integers(1, 60))
    kept = min(steps, history)
    index = data.draw(
        st.one_of(
            st.integers(-kept, kept - 1),
            st.lists(st.integers(-kept, kept - 1), min_size=1, max_size=30),
            st.slices(kept).filter(lambda s: len(range(*s.indices(kept))) > 0),
        )
    )
    with replay.Server([replay.Table("t")]) as server:
        client = server.client()
        with client.writer(max_history=history) as writer:
            for i in range(steps):
                writer.append({"x": np.full((200, 50), i), "y": i})  # 80 kB: 13 rows to a chunk
            writer.create_item("t", 1.0, {"x": writer.history["x"][index], "y": writer.history["y"][:]})
        batch = client.sample("t")
        expected = np.arange(steps)[-kept:]
        assert np.array_equal(batch.data["y"][0], expected)
        assert np.array_equal(batch.data["x"][0][..., 0, 0], expected[index])
        assert (batch.data["x"][0] == batch.data["x"][0][..., :1, :1]).all()


@given(st.lists(st.integers(0, 20), max_size=40))
def test_runs_give_the_steps_back(steps: list[int]) -> None:
    assert [run.start + i * run.step for run in runs_of(steps) for i in range(run.cells)] == steps


def test_columns_of_different_lengths(start: Start) -> None:
    _, client = start(replay.Table("t"))
    with client.writer(max_history=4) as writer:
        for i in range(4):
            writer.append({"obs": np.full(2, i), "action": i, "state": np.full(3, i)})
        h = writer.history
        writer.create_item("t", 1.0, {"obs": h["obs"][:], "action": h["action"][:-1], "state": h["state"][0]})
        writer.flush()
    data = client.sample("t").data
    assert data["obs"][0, :, 0].tolist() == [0, 1, 2, 3]
    assert data["action"].tolist() == [[0, 1, 2]] and data["state"].tolist() == [[0, 0, 0]]


def test_partial_steps_share_a_step(start: Start) -> None:
    _, client = start(replay.Table("t"))
    with client.writer(max_history=3) as writer:
        for i in range(3):
            writer.append({"obs": i}, partial=True)
            assert len(writer.history["obs"]) == i + 1
            writer.append({"action": 10 * i})
        writer.append({"obs": 3}, partial=True)
        with pytest.raises(replay.InvalidItem, match="already given"):
            writer.append({"obs": 4})
        h = writer.history
        writer.create_item("t", 1.0, {"obs": h["obs"][-3:], "action": h["action"][-2:], "last": h["obs"][-1]})
        writer.flush()
    data = client.sample("t").data
    assert data["obs"].tolist() == [[1, 2, 3]] and data["action"].tolist() == [[10, 20]] and data["last"].tolist() == [3]


def test_column_not_given(start: Start) -> None:
    """A column that was not given cannot be selected."""
    _, client = start(replay.Table("t"))
    with client.writer(max_history=3) as writer:
        writer.append({"a": 1})
        writer.append({"a": 2, "b": 5})
        writer.append({"a": 3})
        writer.create_item("t", 1.0, {"b": writer.history["b"][1]})
        for index in (0, 2, slice(None)):
            with pytest.raises(replay.InvalidItem, match="'b' was not appended"):
                writer.create_item("t", 1.0, {"b": writer.history["b"][index]})
    assert client.sample("t").data["b"].tolist() == [5]


def test_back_pressure_with_a_timeout(start: Start) -> None:
    _, client = start(replay.Table.queue("q", 2))
    writer = client.writer(max_history=1, max_in_flight=1)
    made = 0
    with pytest.raises(replay.Timeout):
        for i in range(10):
            writer.append({"x": i})
            writer.create_item("q", 1.0, {"x": writer.history["x"][-1]}, timeout=0.5)
            made += 1
    assert 2 <= made <= 3  # a remote writer has one on its way
    assert client.sample("q", made, timeout=2).data["x"].tolist() == list(range(made))
    with pytest.raises(replay.Timeout):
        client.sample("q", timeout=0.2)  # what timed out does not come later
    writer.close()


def test_end_episode_closes_chunks(start: Start) -> None:
    server, client = start(replay.Table("t"))
    with client.writer(max_history=10) as writer:
        for i in range(3):
            writer.append({"x": np.full(1000, i)})
        writer.create_item("t", 1.0, {"x": writer.history["x"][:]})
        writer.end_episode()
        assert len(writer.history) == 0
        writer.append({"x": np.full(1000, 9)})
        with pytest.raises(replay.InvalidItem):
            writer.history["x"][-2]
        writer.flush()
    assert client.sample("t").data["x"][0, :, 0].tolist() == [0, 1, 2]
    assert server.core.store.stored_bytes == 24_000  # three rows, however many the chunk had room for


def test_append_batch(start: Start) -> None:
    """Append batch without a loop over environments."""
    _, client = start(replay.Table("t", replay.Fifo(), max_times_sampled=1))
    with client.writer(max_history=3) as writer:
        for t in range(5):
            writer.append_batch({"x": np.arange(8) + 100 * t})
        keys = writer.create_items("t", np.arange(8) + 1.0, {"x": writer.history["x"][-3:], "e": np.arange(8)})
        assert len(keys) in (0, 8)
        writer.end_episode(np.arange(8) == 5)
        writer.append_batch({"x": np.arange(8) + 500})
        with pytest.raises(replay.InvalidItem, match="environment 5"):
            writer.create_items("t", 1.0, {"x": writer.history["x"][-3:], "e": np.arange(8)})
        assert writer.episode_steps.tolist() == [3, 3, 3, 3, 3, 1, 3, 3]
        where = writer.episode_steps >= 3
        writer.create_items("t", 1.0, {"x": writer.history["x"][-3:], "e": np.flatnonzero(where)}, where=where)
        writer.flush()
    batch = client.sample("t", 15)
    expected = [[e + 200, e + 300, e + 400] for e in range(8)] + [[e + 300, e + 400, e + 500] for e in range(8) if e != 5]
    assert batch.data["x"].tolist() == expected
    assert batch.data["e"].tolist() == [*range(8), *(e for e in range(8) if e != 5)]
    assert batch.info.priorities[:8].tolist() == list(range(1, 9))


def test_frames_of_stacks_are_stored_once(start: Start) -> None:
    server, client = start(replay.Table("t"))
    with client.writer(max_history=4) as writer:
        for t in range(400):
            writer.append({"frame": np.full((84, 84), t % 256, np.uint8)})
            if t >= 3:
                writer.create_item("t", 1.0, {"obs": writer.history["frame"][-4:]})
        writer.flush()
    per_item = server.core.store.stored_bytes / 397
    assert per_item < 1.2 * 84 * 84
    batch = client.sample("t", 32)
    first = batch.data["obs"][:, 0, 0, 0].astype(int)
    assert all(np.array_equal(batch.data["obs"][:, k, 5, 7], (first + k) % 256) for k in range(4))


def test_expressions_at_the_writer(start: Start) -> None:
    _, client = start(replay.Table("t"))
    with client.writer(max_history=3) as writer:
        for r in (1.0, 2.0, 3.0):
            writer.append({"r": np.float32(r), "d": np.float32(1)})
        ret, product, _ = replay.n_step(replay.column("r"), replay.column("d"), 0.9, 3)
        writer.create_item("t", 1.0, {"return": ret[0], "discount": product[0]})
        writer.flush()
    data = client.sample("t").data
    assert data["return"][0] == pytest.approx(5.23) and data["discount"][0] == pytest.approx(0.729)  # T1


def test_a_closed_writer_refuses(start: Start) -> None:
    _, client = start(replay.Table("t"))
    writer = client.writer(max_history=1)
    writer.append({"x": 1})
    writer.close()
    with pytest.raises(replay.Closed):
        writer.append({"x": 2})


def test_batch_of_many_compressed_chunks() -> None:
    """A batch may come from more compressed chunks than fit into a list."""
    with replay.Server([replay.Table("t", replay.Fifo(), max_times_sampled=1)], compression={"x": "lz4"}) as server:
        rng = np.random.default_rng(0)
        with server.client().writer(max_history=100) as writer:
            for episode in range(700):
                for _ in range(100):
                    writer.append({"x": np.full(8, episode)})
                writer.create_item("t", 1.0, {"x": writer.history["x"][rng.permutation(100).tolist()]})
                writer.end_episode()
        assert (server.client().sample("t", 700).data["x"] == np.arange(700)[:, None, None]).all()


@pytest.mark.parametrize("codec", ["lz4", "lz4+delta", "lz4+rows"])
def test_compressed_items_are_padded(codec: str) -> None:
    """Compressed items of different lengths are padded with zeros."""
    with replay.Server([replay.Table("t")], compression={"x": codec}) as server:
        client = server.client()
        with client.writer(max_history=6) as writer:
            for i in range(1, 7):
                writer.append({"x": np.full((32, 32), i, np.uint8)})
                writer.create_item("t", 1.0, {"x": writer.history["x"][-i:]})
        for _ in range(2):  # the second batch lies where the first did
            batch = client.sample("t", 100)
            assert set(batch.info.lengths["x"]) == set(range(1, 7))
            for data, length in zip(batch.data["x"], batch.info.lengths["x"], strict=True):
                assert (data[:length, 0, 0] == np.arange(1, length + 1)).all() and not data[length:].any()
            del batch, data


def test_rows_compressed_by_themselves() -> None:
    """Rows that were compressed by themselves are read one by one and damaged ones refused."""
    rows = np.random.default_rng(0).integers(0, 3, (5, 900), np.uint8)
    for codec in ("lz4+rows", "zstd+rows"):
        data = encode(rows, codec)
        assert all(decode_row(data, codec, at, 900) == rows[at].tobytes() for at in range(5))
        whole = np.empty_like(rows)
        decode(data, codec, whole)
        assert (whole == rows).all()
        for bad in (data[:20], b"", data[:-1], b"\xff" * len(data), bytes(len(data))):
            with pytest.raises(Refused):
                decode(bad, codec, whole)
        with pytest.raises(Refused):
            decode_row(data, codec, 4, 899)
        words = np.array([b"a" * 700, b"b" * 700], "S700")  # rows without an axis of their own
        found = np.zeros_like(words)
        decode(encode(words, codec), codec, found)
        assert (found == words).all()
