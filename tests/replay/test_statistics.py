"""Blind Cliffwalk (E3 of specs/value.md) through the real server: prioritized replay must need far fewer updates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal import replay


def transitions(n: int) -> list[tuple[int, int, float, int, int]]:
    """Every action sequence once: (state, action, reward, terminal, next); 2^(n+1) - 2 of them."""
    found = []
    for wrong_at in range(n):
        for _ in range(2 ** (n - 1 - wrong_at)):
            found += [(s, 1, 0.0, 0, s + 1) for s in range(wrong_at)] + [(wrong_at, 0, 0.0, 1, 0)]
    found += [(s, 1, 0.0, 0, s + 1) for s in range(n - 1)] + [(n - 1, 1, 1.0, 1, 0)]
    return found


def updates_needed(n: int, selector: replay.Uniform | replay.Prioritized, seed: int, address: str | None) -> int:
    data = transitions(n)
    assert len(data) == 2 ** (n + 1) - 2 and sum(t[2] for t in data) == 1
    rng = np.random.default_rng(seed)
    gamma = 1 - 1 / n
    truth = np.zeros((n, 2))
    truth[:, 1] = gamma ** np.arange(n - 1, -1, -1.0)
    q = rng.normal(0, 0.1, (n, 2))
    server = replay.Server([replay.Table("t", selector)], address=address, seed=seed)
    client = server.client() if address is None else replay.Client(server.address, timeout=10)
    client.insert_batch({"i": rng.permutation(len(data))}, {"t": np.ones(len(data))})
    table = np.array(data)
    updates = 0
    try:
        while updates < 200_000:
            for _ in range(50):
                batch = client.sample("t", 1)
                s, a, r, terminal, following = table[batch.data["i"][0]]
                target = r + (0.0 if terminal else gamma * q[int(following)].max())
                delta = target - q[int(s), int(a)]
                q[int(s), int(a)] += 0.25 * delta
                client.update_priorities("t", batch.info.keys, [abs(delta) + 1e-4])
            updates += 50
            if np.mean((q - truth) ** 2) < 1e-3:
                return updates
        return updates
    finally:
        client.close()
        server.close()


def ratio(n: int, seeds: int, address: str | None) -> float:
    uniform = np.median([updates_needed(n, replay.Uniform(), seed, address) for seed in range(seeds)])
    prioritized = np.median([updates_needed(n, replay.Prioritized(0.6), seed, address) for seed in range(seeds)])
    return float(uniform / prioritized)


def test_cliffwalk_of_eight() -> None:
    assert ratio(8, 5, None) >= 3


@pytest.mark.slow
def test_cliffwalk_of_ten_through_the_socket(tmp_path: Path) -> None:
    assert ratio(10, 5, f"ipc://{tmp_path}/s") >= 5
