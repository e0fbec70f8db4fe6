"""The contract of populations: what an algorithm offers that learns from the returns of perturbed policies alone.

    Algorithm ── record ────▶ ScoreRecord      how every member did: workers add theirs up on a group wire
              ── members() ─▶ Members          act, all in one batched forward pass
              ── learn() ───▶ PopulationLearn  everybody's scores -> the same update at every worker

It is an ordinary Algorithm otherwise (`learning.py`), with a policy for evaluators and for those who use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from shoal.acting import Record, StepView
from shoal.core import Tree
from shoal.learning import Learn

if TYPE_CHECKING:
    import torch

__all__ = ["Evolves", "Members", "PopulationLearn", "ScoreRecord"]


class ScoreRecord(Record):
    """How the members of a population did in one iteration. Workers fill in the members that they played and leave zeros
    elsewhere, so the sum of everybody's is the whole: one number each, however many parameters a member has.

    Its layout has the fields `score` and `decisions` [N], and `observation_moments` where observations are normalised.
    """

    members: int    # N
    episodes: int   # of each member; its score is their mean return


class Members(Protocol):
    """Perturbed copies of one policy, each on a row of its own: all act in one batched forward pass.

        members.load(published)                      # what is perturbed, and the statistics that observations are seen through
        members.perturb(iteration, numbers)          # row r is the numbers[r]-th member of this iteration
        action = members.act(view, rng)              # [R, ...]
    """

    def load(self, published: Tree) -> None: ...
    def perturb(self, iteration: int, numbers: np.ndarray) -> None: ...
    def act(self, view: StepView, rng: torch.Generator) -> Tree: ...


class PopulationLearn(Learn, Protocol):
    """A Learn without a loss: its one minibatch is what all members scored, which `sums` puts into a vector that workers add up.
    Every worker computes the same gradient from it, so neither gradients nor parameters travel."""

    @property
    def longest_episode(self) -> int: ...            # decisions after which an episode of this iteration is cut off
    @property
    def reference_wanted(self) -> int: ...           # observations of random play that it needs before it begins; 0: none
    def refer_to(self, observations: np.ndarray) -> None: ...
    @property
    def fingerprint(self) -> int: ...                # of what workers must have in common besides `state`: the table of noise


@runtime_checkable
class Evolves(Protocol):
    """An algorithm that learns from the returns of perturbed policies alone (evolution strategies)."""

    @property
    def record(self) -> ScoreRecord: ...
    def members(self, seed: int, rows: int) -> Members: ...
    def learn(self, seed: int) -> PopulationLearn: ...
