"""A trained policy as an opponent in matches."""

from __future__ import annotations

import numpy as np
import torch

from shoal.core import Tree
from shoal.envs import BatchedEnv, Step
from shoal.envs.opponent_env import Opponent, OpponentMaker
from shoal.learning import Algorithm
from shoal.roles.asked_seats import AskedSeats

__all__ = ["policy_opponent"]


def policy_opponent(algorithm: Algorithm, published: Tree) -> OpponentMaker:
    """Plays greedily with these weights, with a memory for each of its seats."""

    def make(env: BatchedEnv, seed: int) -> Opponent:
        policy, rng = algorithm.policy(), torch.Generator().manual_seed(seed)
        policy.load(published)
        seats = AskedSeats(policy.act, policy.initial_state(env.num_seats))
        viewer = algorithm.record.viewer(env.num_seats)
        nothing = np.zeros((env.num_seats, *(env.action_space.shape or ())), env.action_space.dtype)

        def choose(step: Step, rows: np.ndarray) -> np.ndarray:
            view = viewer.of(step, seats.action)
            return seats.act(view, rows, None, rng) if rows.any() else nothing

        return choose

    return make
