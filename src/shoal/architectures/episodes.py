"""Fresh episodes with one policy: what the Evaluator and `shoal eval` count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.core import Policy
from shoal.envs import BatchedEnv

__all__ = ["play_episodes"]


def play_episodes(policy: Policy, record: Any, env: BatchedEnv, episodes: int, seed: int, rng: torch.Generator,
                  explore: np.ndarray | None = None,
                  each_step: Callable[[int], None] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths of `episodes` episodes: of each row the first ones, so that short episodes count no more than
    long ones. `explore` None acts greedily; `each_step` is told how many decisions were made."""
    seats = env.num_seats
    quota = np.full(seats, episodes // seats)
    quota[: episodes % seats] += 1
    totals, lengths = np.zeros(seats), np.zeros(seats, np.int64)
    done: list[tuple[float, int]] = []
    now, action = env.reset(seed), None
    state, sight = policy.initial_state(seats), record.sight(seats)
    while quota.any():
        action, state, _ = policy.act(sight.of(now, action), state, explore, rng)
        now = env.step(action)
        totals += now.reward * now.valid
        lengths += now.valid
        for row in np.flatnonzero(now.last & now.valid):
            if quota[row]:
                quota[row] -= 1
                done.append((float(totals[row]), int(lengths[row])))
            totals[row], lengths[row] = 0.0, 0
        if each_step is not None:
            each_step(int(np.count_nonzero(now.valid)))
    returns, counts = zip(*done, strict=True)
    return np.array(returns), np.array(counts)
