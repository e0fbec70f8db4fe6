"""Policies that do not learn in a program: trained ones with fixed weights, and functions of the user's, as opponents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.acting import Progress
from shoal.core import Tree
from shoal.envs import Step
from shoal.envs.opponent_env import Opponent, OpponentMaker, Seats
from shoal.learning import Algorithm
from shoal.roles.asked_seats import AskedSeats

__all__ = ["PolicyOpponent", "policy_opponent", "script_opponent"]


class PolicyOpponent:
    """An algorithm's policy for the seats it is asked for, with a memory for each. An Opponent whose weights can be changed."""

    def __init__(self, algorithm: Algorithm, env: Seats, seed: int, greedy: bool = True) -> None:
        self.algorithm, self._greedy, self._seats = algorithm, greedy, env.num_seats
        self._policy, self._rng = algorithm.policy(), torch.Generator().manual_seed(seed)
        self._asked = AskedSeats(self._policy.act, self._policy.initial_state(env.num_seats))
        self._viewer = algorithm.record.viewer(env.num_seats)
        self._nothing = no_actions(env)
        self._explore: np.ndarray | None = None

    def load(self, published: Tree) -> None:
        self._policy.load(published)
        if not self._greedy:
            self._explore = self.algorithm.explore(0, 1, self._seats, Progress.of(published["progress"]))

    def __call__(self, step: Step, rows: np.ndarray) -> np.ndarray:
        view = self._viewer.of(step, self._asked.action)
        return self._asked.act(view, rows, self._explore, self._rng) if rows.any() else self._nothing


def policy_opponent(algorithm: Algorithm, published: Tree, greedy: bool = True) -> OpponentMaker:
    """Plays with these weights; not `greedy`: as it explores in training."""

    def make(env: Seats, seed: int) -> Opponent:
        made = PolicyOpponent(algorithm, env, seed, greedy)
        made.load(published)
        return made

    return make


def script_opponent(function: Callable[..., Any], name: str) -> OpponentMaker:
    """Asks a function for each action: `function(observation, ...)` as in recordings (offline.recording.ScriptPolicy)."""

    def make(env: Seats, seed: int) -> Opponent:
        from shoal.offline.recording import ScriptPolicy

        script, actions = ScriptPolicy(function, env, np.random.default_rng(seed), name), no_actions(env)

        def choose(step: Step, rows: np.ndarray) -> np.ndarray:
            if rows.any():
                actions[rows] = script.of_rows(step, np.flatnonzero(rows))
            return actions

        return choose

    return make


def no_actions(env: Seats) -> np.ndarray:
    """Zeros for all seats [B, ...]."""
    return np.zeros((env.num_seats, *(env.action_space.shape or ())), env.action_space.dtype)
