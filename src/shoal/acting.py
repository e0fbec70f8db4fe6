"""The contract of acting and recording: what a policy is, and what actors write down of their steps.

    Policy        acts: actors, evaluators and inference servers have one each
    Record        how one unroll or item lies in memory, and the recorder that writes it
      UnrollRecord  T steps of all seats, sent on a stream, learned from as they come
      ItemRecord    transitions or windows, kept in replay tables

`learning.py` has the algorithms that make both. What is optional is a protocol of its own (`DevicePolicy`, `HasModule`,
`ActionProbabilities`, `ActionLikelihood`, `SeatRecord`, `IndexedItems`, `FramedItems`) or a declared field with a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import numpy as np

from shoal.core import Tree
from shoal.slots import Layout

if TYPE_CHECKING:
    import torch

    from shoal.device.placement import Hardware
    from shoal.envs import Step

__all__ = ["SEEN", "STATE", "ActionLikelihood", "ActionProbabilities", "DevicePolicy", "FrameStacks", "FramedItems", "HasModule",
           "IndexedItems", "ItemRecord", "ItemRecorder", "Policy", "Progress", "Record", "SeatRecord", "SeatRecorder", "StepView",
           "StoredItems", "UnrollRecord", "UnrollRecorder", "Viewer"]

SEEN, STATE = "seen", "state"
"""The parts of an observation where values see the state of the environment (`--net.state-value`): what the agent itself sees,
which is all that a policy reads, and that state."""


# ---------------------------------------------------------------------------------------------- acting
@dataclass(frozen=True)
class Progress:
    """How far training is. It travels with the weights; every schedule is a function of it."""

    env_steps: int = 0
    learner_steps: int = 0
    fraction: float = 0.0   # of the env_steps budget; 0 without one

    @classmethod
    def of(cls, numbers: np.ndarray) -> Progress:
        """From what `numbers` gives, as it travels with the weights."""
        return cls(int(numbers[0]), int(numbers[1]), float(numbers[2]))

    @property
    def numbers(self) -> np.ndarray:
        return np.array([self.env_steps, self.learner_steps, self.fraction])


@dataclass
class StepView:
    """What a policy sees of B seats at one moment (arrays [B, ...])."""

    observation: Tree
    first: np.ndarray
    action_mask: np.ndarray | None = None
    prev_action: Tree | None = None
    prev_reward: np.ndarray | None = None


class Viewer(Protocol):
    """Turns the steps of an environment into what the policy sees of them."""

    def of(self, step: Step, action: Tree | None = None) -> StepView: ...  # `action` led to `step`


class Policy(Protocol):
    """Acts. Holds private weights, loaded from what a Learn published."""

    def load(self, published: Tree) -> None: ...
    def bind(self, published: Tree) -> None: ...  # like load, but keeps these arrays: writing them changes the policy
    def initial_state(self, seats: int) -> Tree: ...
    def act(self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator) -> tuple[Tree, Tree, Tree]:
        """-> action [B, ...], next state, extras [B, ...] (log-probabilities, values); explore None means greedily."""


@runtime_checkable
class DevicePolicy(Policy, Protocol):
    """A policy that can also compute on a GPU."""

    def to(self, hardware: Hardware) -> None: ...


@runtime_checkable
class HasModule(Policy, Protocol):
    """A policy whose network can be had as a torch module."""

    @property
    def module(self) -> torch.nn.Module: ...


@runtime_checkable
class ActionProbabilities(Policy, Protocol):
    """A policy over discrete actions that can say how likely each of them is, [B, A]."""

    def probabilities(self, view: StepView) -> np.ndarray: ...


@runtime_checkable
class ActionLikelihood(Policy, Protocol):
    """A policy that can say how likely given actions are, where its net has no memory."""

    def log_prob(self, view: StepView, action: np.ndarray, explore: np.ndarray | None) -> np.ndarray | None:
        """[B], when it explores like this; of Box actions the density, in the environment's units. None where there is none: a
        greedy policy has no density."""


# ---------------------------------------------------------------------------------------------- recording
class Record(ABC):
    """What actors write down of their steps, and how it lies in memory."""

    seats: int      # rows of one actor: environments times agents
    mask_size: int  # length of a row of the action mask; 0 where there is none
    previous: bool  # whether the policy sees the previous action and reward

    @property
    @abstractmethod
    def layout(self) -> Layout: ...  # of one unroll, or of one item

    @abstractmethod
    def viewer(self, seats: int) -> Viewer: ...  # an evaluator has other seats than an actor


class UnrollRecorder(Protocol):
    """Writes T steps of B seats into a slot; environments and recurrent states continue from one unroll to the next.

        recorder.begin(slot.data, step, state, version)          # x_0, and the recurrent state it is seen with
        for t in range(record.length):
            action, state, extras = policy.act(recorder.view(step), state, explore, rng)
            step = env.step(action)
            recorder.write(t, action, extras, step, version)     # a_t, r_t, ..., x_{t+1}
    """

    def view(self, step: Step) -> StepView: ...
    def begin(self, data: Tree, step: Step, state: Tree, version: int) -> None: ...
    def write(self, t: int, action: Tree, extras: Tree, step: Step, version: int) -> None: ...


class UnrollRecord(Record):
    """Unrolls of `length` steps, learned from as they come.

    Besides what the algorithm needs, the layout has fields that roles read: `valid` and `weights_version` [T, B], `time` [T, 1].
    """

    length: int

    @abstractmethod
    def recorder(self, seats: int | None = None) -> UnrollRecorder: ...


class SeatRecorder(Protocol):
    """Fills the columns of a slot one by one, where not all seats are asked at every step (shoal.envs.multi_agent).

        recorder.begin(slot.data)
        while not recorder.full:
            ...                                                             # the policy acts for the seats that are asked
            recorder.act(rows, view, state, action, extras, version)        # what those K seats saw and did, [K, ...]
            step = env.step(actions)
            recorder.settle(step, actions)                                  # closes the decisions of its valid rows
    """

    @property
    def full(self) -> bool: ...
    def view(self, step: Step) -> StepView: ...
    def begin(self, data: Tree) -> None: ...
    def forget(self) -> None: ...  # drop what is under way: it was decided with older weights
    def act(self, rows: np.ndarray, view: StepView, state: Tree, action: Tree, extras: Tree, version: int) -> None: ...
    def settle(self, step: Step, action: Tree) -> None: ...


@runtime_checkable
class SeatRecord(Protocol):
    """An UnrollRecord for games in which seats take turns."""

    def columns(self, seats: int) -> SeatRecorder: ...


class ItemRecorder(Protocol):
    """Remembers the newest steps of every seat and cuts items for a replay table out of them, with their first priorities.

        step = env.reset(seed)
        recorder.begin(step)
        while running:
            action, following, extras = policy.act(recorder.view(step), state, explore, rng)
            step = env.step(action)
            recorder.write(action, state, extras, step, version)      # `state` is the one before this act
            state = following
            if recorder.ready >= K: recorder.take(into, priority)     # the K oldest items
    """

    ready: int  # finished items that wait to be taken

    def view(self, step: Step) -> StepView: ...
    def begin(self, step: Step) -> None: ...
    def write(self, action: Tree, state: Tree, extras: Tree, step: Step, version: int) -> None: ...
    def catch_up(self) -> None: ...  # do now what `take` would have to do first
    def take(self, into: Tree, priority: np.ndarray) -> None: ...
    def take_moments(self, into: Tree) -> None: ...  # of the observations since the last call; where the record has them


class StoredItems(Protocol):
    """What a replay table holds: all that the table itself needs to know of its items. An ItemRecord says it of its own."""

    @property
    def layout(self) -> Layout: ...  # of one item; roles read its fields `weights_version` [1] and `time` [1]
    @property
    def decisions(self) -> int: ...
    @property
    def observation_moments(self) -> int: ...


@runtime_checkable
class IndexedItems(Protocol):
    """Items with fields that hold indices (discrete actions): a table that is loaded is checked, as memory is read by them."""

    @property
    def index_sizes(self) -> Mapping[str, np.ndarray]: ...  # by the name of the field: its values are at least 0 and below this


@dataclass(frozen=True)
class FrameStacks:
    """Fields of items that are stacks of frames. Overlapping items share most of them: wires and tables carry each frame once."""

    fields: tuple[str, ...]
    """Names of the fields [1, ..., size, *shape]."""
    size: int
    """Frames in a stack."""
    shape: tuple[int, ...]
    """Of a frame."""
    dtype: str
    most: int
    """Different frames that one item may have."""
    fresh: int
    """Of these, those that the item before it of the same seat did not have."""
    seats: int
    """Whose items come in one insert."""

    def frames(self, items: int) -> int:
        """About how many different frames this many items of one insert have together."""
        return min(items * self.most, items * self.fresh + self.seats * (self.most - self.fresh))


@runtime_checkable
class FramedItems(Protocol):
    """Items that may be made of stacks of frames. A recorder of theirs also fills an insert of frames and places (`take`)."""

    @property
    def stacks(self) -> FrameStacks | None: ...


class ItemRecord(Record):
    """Items of replay tables: transitions, windows. The record names the extras it keeps and computes first priorities.

    Besides what the algorithm needs, the layout has fields that roles read: `weights_version` [1] and `time` [1].
    """

    observation_moments: int  # how many numbers of an observation are normalised; 0 for none

    @property
    def from_steps_alone(self) -> bool:
        """Whether items hold nothing that a policy gave: no estimates, extras or states. Recorded episodes need no policy then."""
        return False

    @property
    @abstractmethod
    def decisions(self) -> int: ...  # number of decisions in one item

    @property
    @abstractmethod
    def steps(self) -> UnrollRecord: ...  # one step of all seats, as a wire carries it

    @abstractmethod
    def of_seats(self, seats: int) -> Self: ...  # the same items for another number of seats

    @abstractmethod
    def recorder(self, seats: int | None = None) -> ItemRecorder: ...
