"""The ready-made writers: T1, T2 and T29 of specs/value.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal import replay
from shoal.replay.table.columns import flatten, unflatten
from tests.replay.conftest import Start


def drain(client: replay.Client, table: str = "t") -> list[dict[str, Any]]:
    found = []
    while client.info()["tables"][table]["size"]:
        flat = flatten(client.sample(table).data)
        found.append(unflatten({path: value[0].copy() for path, value in flat.items()}))
    return found


@pytest.fixture
def client() -> Any:
    with replay.Server([replay.Table("t", replay.Fifo(), max_times_sampled=1)]) as server:
        yield server.client(timeout=5)


def test_t2_emission(client: replay.Client) -> None:
    writer = replay.TransitionWriter(client, "t", n=3, gamma=0.9)
    for t in range(5):
        writer.append(np.float32(t), t, 1.0, 1.0)
        assert client.info()["tables"]["t"]["size"] == max(0, t - 2)
    writer.end(np.float32(5))
    items = drain(client)
    assert [float(i["observation"]) for i in items] == [0, 1, 2, 3, 4]
    assert [float(i["next_observation"]) for i in items] == [3, 4, 5, 5, 5]
    assert [float(i["discount"]) for i in items] == pytest.approx([0.729, 0.729, 0.729, 0.81, 0.9])
    assert [int(i["action"]) for i in items] == [0, 1, 2, 3, 4]


def test_t1_returns(client: replay.Client) -> None:
    writer = replay.TransitionWriter(client, "t", n=3, gamma=0.9)
    for r in (1.0, 2.0, 3.0):
        writer.append(np.float32(0), 0, r, 1.0)
    writer.end(np.float32(0))
    first = drain(client)[0]
    assert first["reward"] == pytest.approx(5.23) and first["discount"] == pytest.approx(0.729)
    for last, expected in ((0.0, 0.0), (1.0, 0.81)):  # terminated, truncated after the second reward
        writer.append(np.float32(0), 0, 1.0, 1.0)
        writer.append(np.float32(0), 0, 2.0, last)
        writer.end(np.float32(0))
        first = drain(client)[0]
        assert first["reward"] == pytest.approx(2.8) and first["discount"] == pytest.approx(expected)


def test_episodes_do_not_mix(client: replay.Client) -> None:
    writer = replay.TransitionWriter(client, "t", n=2, gamma=1.0, priority=lambda item: abs(float(item["reward"])))
    for episode in range(3):
        for t in range(4):
            writer.append(np.float32(10 * episode + t), t, float(t), 1.0, q=np.float32(t))
        writer.end(np.float32(10 * episode + 4))
    items = drain(client)
    assert len(items) == 12
    assert all(int(i["observation"]) // 10 == int(i["next_observation"]) // 10 for i in items)
    assert [float(i["extras"]["q"]) for i in items[:4]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("steps", "period", "length", "burn_in", "expected"),
    [
        (9, 2, 4, 2, [(0, 0, 4), (2, 2, 4), (4, 2, 4), (6, 2, 3)]),
        (200, 40, 80, 40, [(0, 0, 80), (40, 40, 80), (80, 40, 80), (120, 40, 80)]),
        (3, 2, 4, 2, [(0, 0, 3)]),
    ],
)
@pytest.mark.parametrize("end", ["pad", "write", "truncate"])
def test_t29_windows(
    client: replay.Client, steps: int, period: int, length: int, burn_in: int, expected: Any, end: str
) -> None:
    writer = replay.SequenceWriter(client, "t", length, period, burn_in, end)
    for _ in range(2):  # the second episode is like the first
        for t in range(steps):
            writer.append({"obs": np.int64(t)}, state={"h": np.full(2, t)})
        writer.end_episode()
        items = drain(client)
        if end == "truncate":
            expected = [window for window in expected if window[2] == length]
        assert len(items) == len(expected)
        for item, (start, burn, whole) in zip(items, expected, strict=True):
            assert int(item["burn_in"]) == burn
            real = np.arange(start - burn, start + whole)
            assert item["obs"][: len(real)].tolist() == real.tolist()
            assert item["valid"].sum() == len(real)
            assert len(item["obs"]) == burn + (length if end == "pad" else whole)
            assert item["state"]["h"].tolist() == [start - burn] * 2


def test_sequences_continue_across_episodes(client: replay.Client) -> None:
    writer = replay.SequenceWriter(client, "t", 4, 4, end="continue")
    for t in range(3):
        writer.append({"obs": t})
    writer.end_episode()
    for t in range(3, 8):
        writer.append({"obs": t})
    assert [i["obs"].tolist() for i in drain(client)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_whole_episodes(client: replay.Client) -> None:
    writer = replay.EpisodeWriter(client, "t", max_steps=10)
    for length in (3, 7, 1):
        for t in range(length):
            writer.append({"obs": np.full(2, t), "info": {"r": float(t)}})
        writer.end_episode()
    items = drain(client)
    assert [len(i["obs"]) for i in items] == [3, 7, 1]
    assert items[1]["info"]["r"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    for t in range(10):
        writer.append({"obs": np.full(2, t), "info": {"r": float(t)}})
    with pytest.raises(replay.InvalidItem, match="max_steps"):
        writer.append({"obs": np.full(2, 0), "info": {"r": 0.0}})


@pytest.mark.parametrize("n", [1, 3])
def test_transitions_of_many_environments(n: int) -> None:
    """Three environments with episodes of different lengths: the same items as three writers of one."""
    rng = np.random.default_rng(n)
    steps, envs = 40, 3
    obs = rng.random((steps + 1, envs, 2)).astype(np.float32)
    last = rng.random((steps + 1, envs, 2)).astype(np.float32)
    rewards, ended = rng.random((steps, envs)).astype(np.float32), rng.random((steps, envs)) < 0.2
    ended[-1] = True
    found = []
    for vector in (True, False):
        with replay.Server([replay.Table("t", replay.Fifo(), max_times_sampled=1)]) as server:
            client = server.client()
            if vector:
                many = replay.VectorTransitionWriter(client, "t", envs, n, 0.9)
                for t in range(steps):
                    discounts = np.where(ended[t], 0, 1)
                    many.append(obs[t], np.full(envs, t), rewards[t], discounts, ended[t], last[t], env=np.arange(envs))
                many.close()
            else:
                for e in range(envs):
                    one = replay.TransitionWriter(client, "t", n, 0.9)
                    for t in range(steps):
                        one.append(obs[t, e], np.int64(t), rewards[t, e], 0 if ended[t, e] else 1, env=np.int64(e))
                        if ended[t, e]:
                            one.end(last[t, e])
                    one.close()
            data = client.sample("t", envs * steps).data
            order = np.lexsort([data["action"], data["extras"]["env"]])
            found.append({"env": data["extras"]["env"][order], **{k: v[order] for k, v in data.items() if k != "extras"}})
    for name, values in found[0].items():
        assert len(values) == envs * steps
        np.testing.assert_allclose(values, found[1][name], rtol=1e-6)


def episodes(seed: int, envs: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Observations that tell environment, episode and step apart, and where episodes end."""
    ended = np.random.default_rng(seed).random((steps, envs)) < 0.15
    ended[-1] = True
    episode = np.cumsum(np.vstack([np.zeros((1, envs), bool), ended[:-1]]), 0)
    return np.stack(np.broadcast_arrays(np.arange(envs), episode, np.arange(steps)[:, None]), -1), ended


def described(items: list[dict[str, Any]]) -> list[Any]:
    """Items of several environments in an order of their own: by environment, then by age."""
    found = [{path: value.tolist() for path, value in flatten(item).items()} for item in items]
    return sorted(found, key=lambda item: (item["obs"][0][0], item["obs"][0][2], len(item["obs"])))


@pytest.mark.parametrize("burn_in", [0, 3])
@pytest.mark.parametrize("end", ["pad", "write", "truncate", "continue"])
def test_sequences_of_many_environments(end: str, burn_in: int) -> None:
    """Sequences of many environments are those of each."""
    tables = [replay.Table(name, replay.Fifo(), max_times_sampled=1) for name in ("many", "one")]
    with replay.Server(tables) as server:
        compare_sequences(server.client(timeout=5), end, burn_in)


def test_padded_sequences_travel(start: Any) -> None:
    _, client = start(*(replay.Table(name, replay.Fifo(), max_times_sampled=1) for name in ("many", "one")))
    compare_sequences(client, "pad", 2)


def compare_sequences(client: replay.Client, end: str, burn_in: int) -> None:
    envs, steps = 5, 60
    obs, ended = episodes(burn_in, envs, steps)
    found = []
    priority = lambda begin: 1.0 + begin  # noqa: E731
    many = replay.VectorSequenceWriter(client, "many", envs, 6, 4, burn_in, end, priority)
    for t in range(steps):
        many.append({"obs": obs[t]}, {"h": obs[t] + 0.5}, ended[t])
    many.close()
    for e in range(envs):
        one = replay.SequenceWriter(client, "one", 6, 4, burn_in, end, priority)
        for t in range(steps):
            one.append({"obs": obs[t, e]}, {"h": obs[t, e] + 0.5})
            if ended[t, e]:
                one.end_episode()
        one.close()
    for table in ("many", "one"):
        size = client.info()["tables"][table]["size"]
        batches = [client.sample(table) for _ in range(size)]
        items = [unflatten({p: v[0].copy() for p, v in flatten(batch.data).items()}) for batch in batches]
        begins = [float(batch.info.priorities[0]) for batch in batches]
        found.append(described([{**item, "begin": np.array(begin)} for item, begin in zip(items, begins, strict=True)]))
    assert found[0] == found[1] and len(found[0]) > envs
    if end == "pad":
        assert {len(item["obs"]) - item["burn_in"] for item in found[0]} == {6}
        assert any(not all(item["valid"]) for item in found[0])
    if end != "continue":
        assert all(len({tuple(o[:2]) for o, v in zip(i["obs"], i["valid"], strict=True) if v}) == 1 for i in found[0])


def test_episodes_of_many_environments(start: Any) -> None:
    """Episodes of many environments are those of each."""
    envs, steps = 4, 50
    obs, ended = episodes(7, envs, steps)
    _, client = start(*(replay.Table(name, replay.Fifo(), max_times_sampled=1) for name in ("many", "one")))
    many = replay.VectorEpisodeWriter(client, "many", envs, 50)
    for t in range(steps):
        many.append({"obs": obs[t]}, ended[t], priority=np.arange(envs) + 1.0)
    many.close()
    for e in range(envs):
        one = replay.EpisodeWriter(client, "one", 50)
        for t in range(steps):
            one.append({"obs": obs[t, e]})
            if ended[t, e]:
                one.end_episode(e + 1.0)
        one.close()
    found = [described(drain(client, table)) for table in ("many", "one")]
    assert found[0] == found[1] and len(found[0]) == ended.sum()
    late = replay.VectorEpisodeWriter(client, "many", 2, 3)
    for _ in range(3):
        late.append({"obs": np.zeros((2, 3), np.int64)}, [True, False])
    with pytest.raises(replay.InvalidItem, match="environment 1 has more than max_steps = 3"):
        late.append({"obs": np.zeros((2, 3), np.int64)})
    late.close()


def test_flush_and_close_in_a_with(start: Start) -> None:
    """Ready made writers flush and close in a with."""
    _, client = start(replay.Table("t", replay.Fifo()))
    with replay.TransitionWriter(client, "t", n=2) as writer:
        for step in range(5):
            writer.append(np.float32(step), step, 1.0, 1.0)
        writer.flush()
        assert client.info()["tables"]["t"]["size"] == 3 and writer.lost == 0
    with pytest.raises(replay.Closed):
        writer.append(np.float32(5), 5, 1.0, 1.0)
