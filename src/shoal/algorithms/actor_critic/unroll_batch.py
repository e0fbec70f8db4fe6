"""Joined slots as tensors: the learner's view of a batch, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from shoal.core import Tree
from shoal.device.transfer import to_device
from shoal.slots import map_tree

__all__ = ["Finals", "UnrollBatch"]

ABSENT = ("observation_moments", "return_moments", "weights_version", "time", "truncated", "final_index")  # no loss needs them


@dataclass(frozen=True)
class Finals:
    """The true last observations of truncated episodes: row i belongs to step `t[i]` of column `b[i]`."""

    t: torch.Tensor
    b: torch.Tensor
    observation: Tree  # [K, ...]
    prev_action: torch.Tensor | None  # what led to it
    prev_reward: torch.Tensor | None
    joint: Tree = None  # [K, agents, ...]: what all agents of its environment saw last, for a central value
    where: torch.Tensor | None = None  # [T, B]: then row i belongs to column i, which has at most one, if it has one at all

    def put(self, values: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """`values` [T, B] with the values of the true last observations in their places."""
        if self.where is not None:  # always the same shapes, as a CUDA graph needs them
            return torch.where(self.where, found, values)
        values = values.clone()
        values[self.t, self.b] = found
        return values


@dataclass
class UnrollBatch:
    """What a net is unrolled over: R rows of time (T + 1, or T once values are known) by B columns."""

    observation: Tree  # [R, B, ...]
    first: torch.Tensor  # [R, B]
    action_mask: torch.Tensor | None  # [R, B, A]
    prev_action: torch.Tensor | None  # [R, B, ...]
    prev_reward: torch.Tensor | None  # [R, B]
    state: Tree  # [B, ...]: recurrent state before the first row
    action: torch.Tensor  # [T, B, ...]
    log_prob: torch.Tensor  # [T, B]: of the policy that acted
    reward: torch.Tensor  # [T, B]
    discount: torch.Tensor  # [T, B]: 0 where terminated
    keep: torch.Tensor  # [T, B]: 0 where an episode ended, so that no trace crosses
    valid: torch.Tensor | None  # [T, B]; None where all are
    finals: Finals | None
    latent: torch.Tensor | None = None  # [T, B, ...]: the action before it was squashed
    joint: Tree = None  # [R, B, agents, ...]: what all agents of the environment see, for a central value
    moments: Tree = field(default_factory=dict)  # of observations and returns, where a UnrollBatch was made without a slot

    @property
    def length(self) -> int:
        """T."""
        return self.action.shape[0]

    @property
    def regular(self) -> bool:
        """Whether nothing is masked and nothing was truncated: then its shape says all about what is computed from it."""
        return self.valid is None and self.finals is None

    @classmethod
    def of(cls, tree: Tree, seats: int, final_rows: int,
           tensor: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy) -> UnrollBatch:
        """From joined slots of `seats` columns and `final_rows` rows of final observations each; `tensor` may move them."""
        tensors = map_tree(tensor, {name: part for name, part in tree.items() if name not in ABSENT})
        return cls(
            observation=tensors["observation"],
            first=tensors["first"],
            action_mask=tensors.get("action_mask"),
            prev_action=tensors.get("prev_action"),
            prev_reward=tensors.get("prev_reward"),
            state=tensors["state"],
            action=tensors["action"],
            log_prob=tensors["extras"]["log_prob"],
            reward=tensors["reward"],
            discount=tensors["discount"],
            keep=(~tensors["last"]).float(),
            valid=None if tree["valid"].all() else tensors["valid"],
            finals=_finals(tree, tensors, seats, final_rows),
            latent=tensors["extras"].get("latent"),
        )

    def acted(self) -> UnrollBatch:
        """Only the T rows in which an action was chosen."""
        T = self.length
        return replace(
            self,
            observation=map_tree(lambda x: x[:T], self.observation),
            first=self.first[:T],
            action_mask=_cut(self.action_mask, T),
            prev_action=_cut(self.prev_action, T),
            prev_reward=_cut(self.prev_reward, T),
            joint=None if self.joint is None else map_tree(lambda x: x[:T], self.joint),
            finals=None,
        )

    def joined(self, agents: int) -> UnrollBatch:
        """With what all agents of the environment see: in each column its own agent first, then those that follow. The agents of an
        environment are columns beside each other, all of which act at every step."""
        B = self.first.shape[1]
        column = torch.arange(B, device=self.first.device)[:, None]
        turn = torch.arange(agents, device=self.first.device)[None]
        beside = column - column % agents + (column + turn) % agents  # [B, agents]
        joint = map_tree(lambda x: x[:, beside], self.observation)
        if self.finals is None:
            return replace(self, joint=joint)
        finals = self.finals
        row = torch.full(self.keep.shape, -1, device=self.first.device)
        row[finals.t, finals.b] = torch.arange(len(finals.t), device=self.first.device)
        rows = row[finals.t[:, None], beside[finals.b]]  # [K, agents]: -1 where that agent's episode has not been cut off there

        def last(after: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
            there = rows.view(*rows.shape, *(1,) * (final.dim() - 1)) >= 0
            return torch.where(there, final[rows.clamp(min=0)], after[finals.t + 1, finals.b])

        return replace(self, joint=joint, finals=replace(finals, joint=map_tree(last, joint, finals.observation)))

    def flattened(self) -> UnrollBatch:
        """Every step a column of its own, [1, T x B]: for nets without memory."""
        return self._each_column(lambda x: x.reshape(1, -1, *x.shape[2:]))

    def select(self, columns: torch.Tensor) -> UnrollBatch:
        """Some of the columns."""
        chosen = self._each_column(lambda x: x.index_select(1, columns))
        chosen.state = map_tree(lambda x: x.index_select(0, columns), self.state)
        return chosen

    def columns(self) -> np.ndarray:
        """The columns that hold a valid step."""
        width = self.action.shape[1]
        return np.arange(width) if self.valid is None else np.flatnonzero(self.valid.any(0).cpu().numpy())

    def _each_column(self, function: Callable[[torch.Tensor], torch.Tensor]) -> UnrollBatch:
        def each(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else function(x)

        return replace(
            self,
            observation=map_tree(function, self.observation),
            first=function(self.first),
            action_mask=each(self.action_mask),
            prev_action=each(self.prev_action),
            prev_reward=each(self.prev_reward),
            action=function(self.action),
            log_prob=function(self.log_prob),
            reward=function(self.reward),
            discount=function(self.discount),
            keep=function(self.keep),
            valid=each(self.valid),
            finals=None,
            latent=each(self.latent),
            joint=None if self.joint is None else map_tree(function, self.joint),
        )


def _cut(x: torch.Tensor | None, length: int) -> torch.Tensor | None:
    return None if x is None else x[:length]


def _finals(tree: Tree, tensors: Tree, seats: int, final_rows: int) -> Finals | None:
    steps, columns = np.nonzero(tree["final_index"] >= 0)
    if not len(steps):
        return None
    device = tensors["first"].device
    index = tree["final_index"][steps, columns] + (columns // seats) * final_rows  # each slot counts from 0
    rows = to_device(torch.from_numpy(index), device)
    t, b = (to_device(torch.from_numpy(where), device) for where in (steps, columns))
    previous = "prev_action" in tensors
    return Finals(
        t,
        b,
        map_tree(lambda x: x[rows], tensors["final_observation"]),
        tensors["final_action"][rows] if previous else None,
        tensors["reward"][t, b] if previous else None,
    )
