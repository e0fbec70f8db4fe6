"""A whole recording in memory, and what a policy would do at each of its steps: what off-policy evaluation works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from shoal.acting import ActionLikelihood, Policy, StepView
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.offline.recorded_episodes import Demos, RecordingInfo, joined_log_probs
from shoal.slots import leaves, map_tree

__all__ = ["LoggedSteps", "PolicyChoices", "choices_of"]

CHUNK = 4096  # observations that a policy sees at once
DRAWS = 8     # Box actions of a policy that explores, for each observation


@dataclass(frozen=True)
class LoggedSteps:
    """All episodes, one behind the other: N decisions, and an observation more for each of E episodes."""

    info: RecordingInfo
    observation: Tree
    """[N + E, ...]"""
    mask: np.ndarray | None
    """[N + E, M] bool: legal actions, where the recording has masks; what is not known is legal."""
    action: np.ndarray
    """[N, ...]"""
    reward: np.ndarray
    """[N] float32"""
    terminated: np.ndarray
    """[N] bool"""
    log_prob: np.ndarray
    """[N] as the actions were chosen; NaN where that is not known."""
    lengths: np.ndarray
    """[E]"""

    @classmethod
    def of(cls, demos: Demos) -> LoggedSteps:
        episodes = list(demos.episodes())
        mask = None
        if demos.info.mask_size:
            known = np.ones((1, demos.info.mask_size), bool)
            mask = np.concatenate([part for one in episodes for part in
                                   (one.mask, known if one.final_mask is None else one.final_mask[None])])
        return cls(demos.info, map_tree(lambda *parts: np.concatenate(parts), *(one.observation for one in episodes)), mask,
                   np.concatenate([one.action for one in episodes]), np.concatenate([one.reward for one in episodes]),
                   np.concatenate([one.terminated for one in episodes]), joined_log_probs(episodes),
                   np.array([len(one) for one in episodes]))

    @property
    def episode(self) -> np.ndarray:
        """Of each decision, [N]."""
        found: np.ndarray = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return found

    @property
    def here(self) -> np.ndarray:
        """Where the observation of each decision is, [N]; what it led to comes next."""
        found: np.ndarray = np.arange(len(self.reward)) + self.episode
        return found

    @property
    def first(self) -> np.ndarray:
        """Where the first observation of each episode is, [E]."""
        found: np.ndarray = self.here[np.cumsum(self.lengths) - self.lengths]
        return found

    def padded(self, values: np.ndarray) -> np.ndarray:
        """[N] as [E, longest], 0 behind the end of an episode."""
        table = np.zeros((len(self.lengths), int(self.lengths.max())))
        table[np.arange(table.shape[1]) < self.lengths[:, None]] = values
        return table

    def returns(self, gamma: float) -> np.ndarray:
        """The discounted rewards from each decision to the end of its episode, [N]."""
        table, sums = self.padded(self.reward), np.zeros(len(self.lengths))
        for t in reversed(range(table.shape[1])):
            sums = table[:, t] = table[:, t] + gamma * sums
        return table[np.arange(table.shape[1]) < self.lengths[:, None]]


@dataclass(frozen=True)
class PolicyChoices:
    """What a policy would do."""

    probability: np.ndarray | None
    """[N + E, A] of discrete actions."""
    action: np.ndarray | None
    """[N + E, K, D] Box actions, each as likely as the others."""
    log_prob: np.ndarray | None
    """[N] of the recorded actions; None where it is not known."""


def choices_of(policy: Policy, steps: LoggedSteps, explore: float | None, seed: int = 0) -> PolicyChoices:
    """Of a policy without memory, at every observation; `explore` as its act takes it, the same everywhere."""
    space: Any = steps.info.action_space
    if policy.initial_state(1):
        raise ConfigError("the policy has a memory, and off-policy evaluation asks what it does at single steps; evaluate it in "
                          "the simulator (shoal eval)")
    if not isinstance(space, gym.spaces.Discrete | gym.spaces.Box):
        raise ConfigError(f"off-policy evaluation needs Discrete or Box actions, but the recording has {space}; evaluate the "
                          "policy in the simulator (shoal eval)")
    rng, count = torch.Generator().manual_seed(seed), len(next(leaves(steps.observation))[1])
    found: list[np.ndarray] = []
    for begin in range(0, count, CHUNK):
        rows = slice(begin, min(begin + CHUNK, count))
        view = _view(steps, np.arange(rows.start, rows.stop))
        amount = None if explore is None else np.full(rows.stop - begin, explore, np.float32)
        found.append(_probabilities(policy, view, space, amount, rng) if isinstance(space, gym.spaces.Discrete) else
                     _actions(policy, view, amount, rng))
    joined = np.concatenate(found)
    discrete = isinstance(space, gym.spaces.Discrete)
    return PolicyChoices(joined if discrete else None, None if discrete else joined, _recorded(policy, steps, explore))


def _view(steps: LoggedSteps, rows: np.ndarray) -> StepView:
    return StepView(map_tree(lambda x: x[rows], steps.observation), np.zeros(len(rows), bool),
                    None if steps.mask is None else steps.mask[rows])


def _probabilities(policy: Policy, view: StepView, space: gym.spaces.Discrete, explore: np.ndarray | None,
                   rng: torch.Generator) -> np.ndarray:
    actions = int(space.n)
    if explore is None:
        chosen = np.asarray(policy.act(view, {}, None, rng)[0])
        return np.asarray(np.eye(actions, dtype=np.float32)[chosen])
    each = [policy.log_prob(view, np.full(len(view.first), action), explore) if isinstance(policy, ActionLikelihood) else None
            for action in range(actions)]
    known = [one for one in each if one is not None]
    if len(known) < actions:
        raise ConfigError("this policy cannot say how likely its actions are when it explores; leave --explore out")
    found: np.ndarray = np.exp(np.stack(known, 1), dtype=np.float32)
    return found


def _actions(policy: Policy, view: StepView, explore: np.ndarray | None, rng: torch.Generator) -> np.ndarray:
    drawn = [np.asarray(policy.act(view, {}, explore, rng)[0]) for _ in range(1 if explore is None else DRAWS)]
    return np.stack([one.reshape(len(one), -1) for one in drawn], 1)


def _recorded(policy: Policy, steps: LoggedSteps, explore: float | None) -> np.ndarray | None:
    """Log-probabilities of the recorded actions."""
    if not isinstance(policy, ActionLikelihood):
        return None
    here, parts = steps.here, []
    for begin in range(0, len(here), CHUNK):
        rows = here[begin : begin + CHUNK]
        amount = None if explore is None else np.full(len(rows), explore, np.float32)
        part = policy.log_prob(_view(steps, rows), steps.action[begin : begin + CHUNK], amount)
        if part is None:
            return None
        parts.append(part)
    return np.concatenate(parts)
