"""How an actor makes the items of a replay table: what transitions and windows have in common.

    recorder.begin(env.reset())
    action, following, extras = policy.act(recorder.view(step), state, explore, rng)
    step = env.step(action)
    recorder.write(action, state, extras, step, version)       # state: the one before this act
    if recorder.ready >= K: recorder.take(into, priority)      # the K oldest items, in the layout of record.layout.joined(K)

A recorder remembers the newest steps of every seat's episode and lets a record cut items out of them, those of several
steps at once: NumPy takes hardly longer for many than for one. Items never cross an episode. An item is finished when the
policy has acted on its last observation, or at once where its episode ends. What the actor thinks of an item, its first
priority, comes from the estimates of its own policy (first_priority.py).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import gymnasium as gym
import numpy as np

from shoal.acting import FrameStacks, ItemRecord, StepView
from shoal.algorithms.records.first_priority import Estimates
from shoal.algorithms.records.frame_runs import FrameRuns
from shoal.algorithms.records.moments import MomentSums
from shoal.algorithms.records.spaces import Leaf, action_leaf, float_paths, leaf_tree, observation_fields
from shoal.algorithms.records.step_view import StepViewer, executed
from shoal.algorithms.records.unroll import Unroll
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.ops import priorities
from shoal.slots import Field, Layout, assign, leaf_at, map_tree

if TYPE_CHECKING:
    from shoal.envs import Step

__all__ = ["EpisodeItems", "EpisodeMemory", "EpisodeRecorder", "RelabelledItems", "Rows"]

LATER = 16  # steps that may pass before items are cut that have become due

Rows = dict[str, Any]  # a tree of arrays [K, ...]


@dataclass(frozen=True)
class EpisodeItems(ItemRecord):
    """A learning.ItemRecord of items that are cut out of episodes. A kind of item says what it looks like and where to cut.

    `begin` and `end` are numbers of steps in the seats' episodes.
    """

    seats: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    mask_size: int = 0
    """Length of a row of the action mask; 0 where there is none."""
    gamma: float = 0.99
    n_step: int = 1
    """Rewards in a return before it bootstraps."""
    reward_clip: float = 0.0
    """Rewards are clipped to this size before anything is made of them; 0 keeps them."""
    reward_scale: float = 1.0
    """What they are multiplied by first."""
    reward_shift: float = 0.0
    """What is added then."""
    estimates: Estimates | None = None
    """Where first priorities come from; None gives every item the priority 1."""
    extras: Mapping[str, Leaf] = field(default_factory=dict)
    """What items keep of the policy's extras, by name: shape and dtype of one seat's."""
    observation_moments: int = 0
    """How many numbers of an observation are normalised; 0 for none."""
    frame_stack: int = 1
    """Frames in an observation: within an episode each observation is the one before, moved by one frame."""

    # -------------------------------------------------------------------------------- what a kind of item says
    @property
    @abstractmethod
    def observed(self) -> tuple[str, ...]:
        """The fields that are observations."""

    @property
    def apart(self) -> int:
        """Steps from the beginning of one item to that of the next."""
        return 1

    @property
    @abstractmethod
    def reach(self) -> int:
        """How many steps must be remembered."""

    @abstractmethod
    def columns(self) -> dict[str, Tree]:
        """What to remember besides what every item needs: trees of leaves."""

    @abstractmethod
    def due(self, count: np.ndarray) -> np.ndarray:
        """Which episodes, now at observation `count` [B] and going on, have an item that ends there."""

    @abstractmethod
    def first_due(self, count: np.ndarray) -> np.ndarray:
        """Where an item that is due at `count` [K] begins."""

    @abstractmethod
    def endings(self, count: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For episodes that end at `count` [K], yield (which of them, where their item begins) for every item left to cut."""

    @abstractmethod
    def cut(self, memory: EpisodeMemory, seats: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Rows:
        """Rows [K, ...] of items, all but the time at which they were made."""

    @abstractmethod
    def errors(self, estimates: Estimates, memory: EpisodeMemory, items: Rows, seats: np.ndarray, begin: np.ndarray,
               end: np.ndarray) -> np.ndarray:
        """How wrong the actor's estimates were about these items [K]."""

    # -------------------------------------------------------------------------------- what all have in common
    @property
    def from_steps_alone(self) -> bool:
        return self.estimates is None and not self.extras and "state" not in self.columns()

    @property
    def steps(self) -> Unroll:
        return Unroll(1, self.seats, self.observation_space, self.action_space, mask_size=self.mask_size)

    @property
    def index_sizes(self) -> dict[str, np.ndarray]:
        space = self.action_space
        if isinstance(space, gym.spaces.Discrete):
            return {"action": np.asarray(space.n)}
        return {"action": np.asarray(space.nvec)} if isinstance(space, gym.spaces.MultiDiscrete) else {}

    @cached_property
    def stacks(self) -> FrameStacks | None:
        """What overlapping items share; None where observations are no stacks of frames."""
        if self.frame_stack == 1:
            return None
        (size, *shape), dtype = leaf_tree(self.observation_space)
        return FrameStacks(self.observed, size, tuple(shape), dtype, self.reach + size - 1, self.apart, self.seats)

    def of_seats(self, seats: int) -> Self:
        return replace(self, seats=seats, frame_stack=1)  # for recordings: nobody knows of what their observations were made

    def recorder(self, seats: int | None = None) -> EpisodeRecorder:
        if seats not in (None, self.seats):
            raise ConfigError(f"this record was made for {self.seats} seats, not {seats}; create the algorithm for that many")
        return EpisodeRecorder(self)

    def viewer(self, seats: int) -> StepViewer:
        shape, dtype = action_leaf(self.action_space)
        return StepViewer(np.zeros((seats, *shape), dtype) if self.previous else None)

    def observation_rows(self, *lead: int) -> Tree:
        """Fields of observations with these leading axes."""
        return observation_fields(self.observation_space, *lead)

    def action_rows(self, *lead: int) -> Field:
        shape, dtype = action_leaf(self.action_space)
        return Field((*lead, *shape), dtype)

    def extra_rows(self, *lead: int) -> dict[str, Field]:
        return {name: Field((*lead, *shape), dtype) for name, (shape, dtype) in self.extras.items()}


class EpisodeMemory:
    """The newest steps of every seat's episode, as a ring: step s lies in row s % rows.

    Step s has what was seen (observation, and mask, prev_action, prev_reward where there are), what the policy had
    (state, its estimates `taken` and `value`, extras) and what came of it (action, reward, discount, version).
    """

    def __init__(self, rows: int, seats: int, columns: Mapping[str, Tree]) -> None:
        """`columns` has trees of leaves of one seat's step."""
        self.rows, self.seats = rows, np.arange(seats)
        self.data = map_tree(lambda leaf: np.zeros((rows, seats, *leaf[0]), leaf[1]), columns)
        self.count = np.zeros(seats, np.int64)
        """Decisions of the episode so far: the number of its newest observation."""

    def put(self, seats: np.ndarray, **values: Tree) -> None:
        """Write values [K, ...] of these seats at their newest step; a number counts for all."""
        at = self.count[seats] % self.rows
        for name, rows in values.items():
            assign(self.data[name], (at, seats), rows)

    def get(self, name: str, step: np.ndarray, seats: np.ndarray) -> Any:
        """Values at these steps of these seats' episodes; the shapes broadcast."""
        return map_tree(lambda ring: ring[step % self.rows, seats], self.data[name])

    def __contains__(self, name: str) -> bool:
        return name in self.data


class EpisodeRecorder:
    """A learning.ItemRecorder. The record says where to cut."""

    def __init__(self, record: EpisodeItems) -> None:
        self.record, self._viewer = record, record.viewer(record.seats)
        self._view = self._viewer.view
        action = action_leaf(record.action_space)
        stacks = record.stacks
        self._frames = None if stacks is None else FrameRuns(record.seats, stacks.size, stacks.shape, stacks.dtype)
        columns: dict[str, Tree] = {
            "observation": leaf_tree(record.observation_space) if stacks is None else ((), "int64"),  # pixels, or a stack's name
            "action": action,
            "version": ((), "int32"),
            "reward": ((), "float32"),
            "discount": ((), "float32"),
            **record.extras,
            **record.columns(),
        }
        if record.estimates is not None:
            estimate = record.estimates.shape, "float32"
            columns.update(taken=estimate, value=estimate)
        if record.mask_size:
            columns["mask"] = ((record.mask_size,), "bool")
        if record.previous:
            columns.update(prev_action=action, prev_reward=((), "float32"))
        self._memory = EpisodeMemory(record.reach + LATER, record.seats, columns)
        self._moments = MomentSums(record.observation_moments)
        self._floats = float_paths(record.observation_space)
        self._later: list[tuple[np.ndarray, np.ndarray, np.ndarray, float]] = []  # seats, begin, end, time: due, not yet cut
        self._waited = 0  # steps since the first of them
        self._blocks: deque[tuple[Rows, np.ndarray]] = deque()  # finished items and their priorities, as they were cut
        self._used = 0  # rows of the oldest block that were taken
        self.ready = 0
        """Finished items that wait to be taken, cut or not."""

    def view(self, step: Step) -> StepView:
        """What the policy sees of this step. The same object every time."""
        return self._viewer.of(step)

    def begin(self, step: Step) -> None:
        """Episodes begin everywhere; what was unfinished, or finished and not taken, is dropped."""
        self._blocks.clear()
        self._later.clear()
        self.ready = self._used = self._waited = 0
        self._memory.count[:] = 0
        self._see(replace(step, first=np.ones_like(step.first)))

    def write(self, action: Tree, state: Tree, extras: Tree, step: Step, version: int) -> None:
        """Record that `action`, chosen with `state` and these `extras`, led to `step`."""
        memory, record, whole = self._memory, self.record, bool(step.valid.all())
        alive = memory.seats if whole else np.flatnonzero(step.valid)
        done = executed(action, step)

        def living(rows: Any) -> np.ndarray:
            return np.asarray(rows) if whole else np.asarray(rows)[alive]

        if record.observation_moments and len(alive):
            self._measure(alive)
        reward = step.reward
        if (record.reward_scale, record.reward_shift) != (1.0, 0.0):
            reward = reward * np.float32(record.reward_scale) + np.float32(record.reward_shift)
        if record.reward_clip:
            reward = np.clip(reward, -record.reward_clip, record.reward_clip)
        memory.put(alive, action=living(done), reward=living(reward), discount=living(step.discount), version=version)
        value = None
        if record.estimates is not None:
            taken, value = record.estimates.of(extras, done)
            memory.put(alive, taken=living(taken), value=living(value))
        if "state" in memory:
            memory.put(alive, state=map_tree(living, state))
        if record.extras:
            memory.put(alive, **{name: living(extras[name]) for name in record.extras})
        due = alive[record.due(memory.count[alive])]
        if len(due):
            end = memory.count[due]
            self._later.append((due, record.first_due(end), end, time.time()))
            self.ready += len(due)
        memory.count[alive] += 1
        over = alive[living(step.last)]
        if len(over):
            self.catch_up()  # the next episode is written over this one
            self._end(over, done, value, step)
        elif self._later:
            self._waited += 1
            if self._waited == LATER:
                self.catch_up()
        if record.previous:
            self._viewer.of(step, action)
        self._see(step)

    def take(self, into: Tree, priority: np.ndarray) -> None:
        """Move the oldest items into arrays [K, ...] and their priorities into `priority` [K]. Those of items that share frames
        have `frames`, for `frame_count` of them, and places of stacks among them instead of observations."""
        count, done = len(priority), 0
        if count > self.ready:
            raise ValueError(f"{count} items were asked for, but {self.ready} are ready")
        self.catch_up()
        while done < count:
            items, values = self._blocks[0]
            rows = min(count - done, len(values) - self._used)
            there = slice(self._used, self._used + rows)
            assign({name: into[name] for name in items}, slice(done, done + rows), map_tree(lambda x, some=there: x[some], items))
            priority[done : done + rows] = values[there]
            done, self._used = done + rows, self._used + rows
            if self._used == len(values):
                self._blocks.popleft()
                self._used = 0
        self.ready -= count
        if self._frames is not None:
            into["frame_count"][0] = self._frames.collect([into[name] for name in self.record.observed], into["frames"])

    def take_moments(self, into: Tree) -> None:
        """Write the moments of the observations acted on since the last call, in the layout of moments.moment_fields."""
        self._moments.take(into)

    def catch_up(self) -> None:
        """Cut everything that has become due; `take` does it too."""
        if self._later:
            seats, begin, end = (np.concatenate(rows) for rows in list(zip(*self._later, strict=True))[:3])
            times = np.repeat([when for *_, when in self._later], [len(due) for due, *_ in self._later])
            self._later.clear()
            self._waited = 0
            self._cut(seats, begin, end, times)

    def _see(self, step: Step) -> None:
        """What will be acted on next."""
        memory = self._memory
        memory.count[step.first] = 0
        memory.put(memory.seats, observation=self._kept(memory.seats, step.observation, step.first))
        if self.record.mask_size:
            memory.put(memory.seats, mask=step.action_mask)
        if self.record.previous:
            memory.put(memory.seats, prev_action=self._view.prev_action, prev_reward=self._view.prev_reward)

    def _kept(self, seats: np.ndarray, observation: Tree, anew: np.ndarray) -> Tree:
        """What to remember of these seats' observations: themselves, or the names of their frames."""
        if self._frames is None:
            return observation
        if self._frames.full:
            memory, ring = self._memory, self._memory.data["observation"]
            steps = memory.count - 1 - np.arange(memory.rows - 1)[:, None]  # of the episodes under way
            cut = [items[name] for items, _ in self._blocks for name in self.record.observed]
            used = np.where(steps >= 0, ring[steps % memory.rows, memory.seats], 0)
            self._frames.make_room(np.concatenate([used.ravel(), *(names.ravel() for names in cut)]), [ring, *cut])
        return self._frames.push(seats, np.asarray(observation), anew)

    def _measure(self, alive: np.ndarray) -> None:
        """Add what these seats acted on to the moments."""
        seen = self._memory.get("observation", self._memory.count[alive], alive)
        rows = [leaf_at(seen, path).reshape(len(alive), -1) for path in self._floats]
        self._moments.add(np.concatenate(rows, 1, dtype=np.float64))

    def _end(self, over: np.ndarray, done: np.ndarray, value: np.ndarray | None, step: Step) -> None:
        """Episodes ended in these seats: put their last observation where the next would be, and cut."""
        memory = self._memory
        memory.put(over, observation=self._last_observations(over, step))
        if value is not None:
            memory.put(over, value=value[over])
        if self.record.mask_size:
            memory.put(over, mask=True)  # where terminated nothing depends on it
            if step.final_action_mask is not None:
                memory.put(step.final_rows, mask=step.final_action_mask)
        if self.record.previous:
            memory.put(over, prev_action=done[over], prev_reward=step.reward[over])
        for which, begin in self.record.endings(memory.count[over]):
            if len(begin):
                seats = over[which]
                self._cut(seats, begin, memory.count[seats], np.full(len(seats), time.time()))
                self.ready += len(seats)

    def _last_observations(self, over: np.ndarray, step: Step) -> Tree:
        """The true last observation where truncated; zeros where terminated: nothing depends on it, and it is not known."""
        rows = map_tree(lambda ring: np.zeros((len(over), *ring.shape[2:]), ring.dtype), self._memory.data["observation"])
        if len(step.final_rows):
            last = self._kept(step.final_rows, step.final_observation, np.zeros(len(step.final_rows), bool))
            assign(rows, np.searchsorted(over, step.final_rows), last)
        return rows

    def _cut(self, seats: np.ndarray, begin: np.ndarray, end: np.ndarray, times: np.ndarray) -> None:
        record, priority = self.record, np.ones(len(seats))
        items = record.cut(self._memory, seats, begin, end)
        if record.estimates is not None:
            error = record.errors(record.estimates, self._memory, items, seats, begin, end)
            priority = error.astype(np.float64) + priorities.FLOOR
        self._blocks.append(({**items, "time": times}, priority))


@dataclass(frozen=True)
class RelabelledItems:
    """A learning.StoredItems: items that were recomputed on their way from one replay table to another.

    The role that relabels fills in the fields that every such item has (see learning.Relabels).
    """

    fields: Mapping[str, Any]
    """What the algorithm makes of an item, with a leading axis of 1."""
    decisions: int = 1
    observation_moments: int = 0

    @cached_property
    def layout(self) -> Layout:
        own = {"key": Field((1,), "int64"), "label_version": Field((1,), "int32"), "weights_version": Field((1,), "int32"),
               "time": Field((1,), "float64")}
        return Layout({**self.fields, **own})
