"""How an actor makes the items of a replay table: what dqn (transitions.py) and r2d2 (windows.py) record has this in common.

    recorder.begin(env.reset())
    action, new_state, extras = policy.act(recorder.view(step), state, explore, rng)      # extras: the q-values it has anyway
    step = env.step(action)
    recorder.write(action, state, extras, step, version)       # state: the one before this act
    if recorder.ready >= K: recorder.take(into, priority)      # the K oldest items, in the layout of record.layout.joined(K)

A recorder remembers the newest steps of every seat's episode and lets a record cut items out of them, those of several
steps at once: NumPy takes hardly longer for many than for one. Items never cross an episode. One is finished when the
q-values of its last observation are known, one act after that was seen, or at once where its episode ends. Priorities are
|td| by the actor's own net, which selects and evaluates (Ape-X, section 3). An actor does not know the q-values of a
truncated episode's last observation: the best q of the one before stands in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium as gym
import numpy as np

from shoal.algorithms.records import Unroll, leaf_tree
from shoal.algorithms.sight import Sight
from shoal.core import StepView, Tree
from shoal.errors import ConfigError
from shoal.ops import priorities, value
from shoal.slots import Field, map_tree

if TYPE_CHECKING:
    from shoal.envs import Step

__all__ = ["Cutter", "ItemRecord", "Items", "Memory", "Recorder", "Scene"]

LATER = 16  # steps that may pass before items are cut that have become due

Items = tuple[Tree, np.ndarray]  # rows [K, ...] and their priorities [K]


@dataclass(frozen=True)
class Scene:
    """What an item must know of the environment and of the return that is learned."""

    seats: int
    observation_space: gym.Space
    action_space: gym.spaces.Discrete
    mask_size: int = 0
    """Length of a row of the action mask; 0 where there is none."""
    gamma: float = 0.99
    n_step: int = 1
    reward_clip: float = 0.0
    """Rewards are clipped to this size before anything is made of them; 0 keeps them."""
    rescale: bool = False
    """Whether q-values are in the space of ops.value.rescale."""

    @property
    def steps(self) -> Unroll:
        """One step of all seats, as a wire carries it."""
        return Unroll(1, self.seats, self.observation_space, self.action_space, mask_size=self.mask_size)

    def rows(self, *lead: int) -> Tree:
        """Fields of observations with these leading axes."""
        return map_tree(lambda leaf: Field((*lead, *leaf[0]), leaf[1]), leaf_tree(self.observation_space))

    def check_seats(self, seats: int | None) -> None:
        if seats not in (None, self.seats):
            raise ConfigError(f"this record was made for {self.seats} seats, not {seats}; make the algorithm anew")

    def best(self, q: np.ndarray) -> np.ndarray:
        """max_a q, on the scale of rewards: the actor's bootstrap."""
        return value.unrescale(q.max(-1)) if self.rescale else q.max(-1)

    def errors(self, target: np.ndarray, q: np.ndarray) -> np.ndarray:
        """|td| of returns on the scale of rewards, against q-values."""
        return np.abs((value.rescale(target) if self.rescale else target) - q)


class Memory:
    """The newest steps of every seat's episode, as a ring: step s lies in row s % rows.

    Step s has what was seen (observation, and mask, prev_action, prev_reward where there are), what the policy had
    (state, best, q) and what came of it (action, its q as `taken`, reward, discount, version).
    """

    def __init__(self, rows: int, seats: int, columns: Mapping[str, Tree]) -> None:
        """`columns` has trees of (shape, dtype) of one seat's step."""
        self.rows, self.seats = rows, np.arange(seats)
        self.data = map_tree(lambda leaf: np.zeros((rows, seats, *leaf[0]), leaf[1]), columns)
        self.count = np.zeros(seats, np.int64)
        """Decisions of the episode so far: the number of its newest observation."""

    def put(self, seats: np.ndarray, **values: Tree) -> None:
        """Write values [K, ...] of these seats at their newest step; a number counts for all."""
        at = self.count[seats] % self.rows
        for name, rows in values.items():
            _assign(self.data[name], (at, seats), rows)

    def get(self, name: str, step: np.ndarray, seats: np.ndarray) -> Tree:
        """Values at these steps of these seats' episodes; the shapes broadcast."""
        return map_tree(lambda ring: ring[step % self.rows, seats], self.data[name])

    def __contains__(self, name: str) -> bool:
        return name in self.data


class Cutter(Protocol):
    """The two kinds of record. `begin` and `end` are numbers of steps in the seats' episodes."""

    scene: Scene
    previous: bool

    @property
    def reach(self) -> int:
        """How many steps must be remembered."""
        ...

    def columns(self) -> dict[str, Tree]:
        """What to remember besides what every record needs."""
        ...

    def due(self, count: np.ndarray) -> np.ndarray:
        """Of episodes that have come to observation `count` [B] and go on: where an item ends there."""
        ...

    def first_due(self, count: np.ndarray) -> np.ndarray:
        """Where the item begins that ends at `count` [K] because it is due."""
        ...

    def endings(self, count: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of episodes that end at `count` [K]: (which of them, where their item begins), again and again."""
        ...

    def cut(self, memory: Memory, seats: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Items:
        """All but the time at which they were made."""
        ...


class Recorder:
    """See the module. The record says where to cut."""

    def __init__(self, record: Cutter, sight: Sight) -> None:
        self.record, self.scene, self._sight = record, record.scene, sight
        scene, self._view = record.scene, sight.view
        columns: dict[str, Tree] = {
            "observation": leaf_tree(scene.observation_space),
            "action": ((), "int64"),
            "version": ((), "int32"),
            **{name: ((), "float32") for name in ("reward", "discount", "taken", "best")},
            **record.columns(),
        }
        if scene.mask_size:
            columns["mask"] = ((scene.mask_size,), "bool")
        if record.previous:
            columns.update(prev_action=((), "int64"), prev_reward=((), "float32"))
        self._memory = Memory(record.reach + LATER, scene.seats, columns)
        self._later: list[tuple[np.ndarray, np.ndarray, np.ndarray, float]] = []  # seats, begin, end, time: due, not yet cut
        self._waited = 0  # steps since the first of them
        self._blocks: deque[Items] = deque()  # finished, as they were cut
        self._used = 0  # rows of the oldest block that were taken
        self.ready = 0
        """Finished items that wait to be taken, cut or not."""

    def view(self, step: Step) -> StepView:
        """What the policy sees of this step. The same object every time."""
        return self._sight.of(step)

    def begin(self, step: Step) -> None:
        """Episodes begin everywhere; whatever was unfinished, or finished and not taken, is dropped."""
        self._blocks.clear()
        self._later.clear()
        self.ready = self._used = self._waited = 0
        self._memory.count[:] = 0
        self._see(step)

    def write(self, action: np.ndarray, state: Tree, extras: Tree, step: Step, version: int) -> None:
        """That `action`, chosen with `state` and with the q-values in `extras`, led to `step`."""
        memory, q, whole = self._memory, extras["q"], bool(step.valid.all())
        alive = memory.seats if whole else np.flatnonzero(step.valid)
        done = action if step.executed_action is None else step.executed_action

        def living(rows: np.ndarray) -> np.ndarray:
            return rows if whole else rows[alive]

        reward = step.reward
        if self.scene.reward_clip:
            reward = np.clip(reward, -self.scene.reward_clip, self.scene.reward_clip)
        best = self.scene.best(q)
        acts = living(done)
        memory.put(alive, action=acts, reward=living(reward), discount=living(step.discount), taken=q[alive, acts],
                   best=living(best), version=version)
        if "state" in memory:
            memory.put(alive, state=map_tree(lambda x: living(np.asarray(x)), state))
        if "q" in memory:
            memory.put(alive, q=living(q))
        due = alive[self.record.due(memory.count[alive])]
        if len(due):
            end = memory.count[due]
            self._later.append((due, self.record.first_due(end), end, time.time()))
            self.ready += len(due)
        memory.count[alive] += 1
        over = alive[living(step.last)]
        if len(over):
            self.catch_up()  # the next episode is written over this one
            self._end(over, done, best, step)
        elif self._later:
            self._waited += 1
            if self._waited == LATER:
                self.catch_up()
        if self.record.previous:
            self._sight.of(step, action)
        self._see(step)

    def take(self, into: Tree, priority: np.ndarray) -> None:
        """Move the oldest items into arrays [K, ...] and their priorities into `priority` [K]."""
        count, done = len(priority), 0
        if count > self.ready:
            raise ValueError(f"{count} items were asked for, but {self.ready} are ready")
        self.catch_up()
        while done < count:
            items, values = self._blocks[0]
            rows = min(count - done, len(values) - self._used)
            there = slice(self._used, self._used + rows)
            _copy_rows(into, slice(done, done + rows), items, there)
            priority[done : done + rows] = values[there]
            done, self._used = done + rows, self._used + rows
            if self._used == len(values):
                self._blocks.popleft()
                self._used = 0
        self.ready -= count

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
        memory.put(memory.seats, observation=step.observation)
        if self.scene.mask_size:
            memory.put(memory.seats, mask=step.action_mask)
        if self.record.previous:
            memory.put(memory.seats, prev_action=self._view.prev_action, prev_reward=self._view.prev_reward)

    def _end(self, over: np.ndarray, done: np.ndarray, best: np.ndarray, step: Step) -> None:
        """Episodes ended in these seats: put their last observation where the next would be, and cut."""
        memory = self._memory
        memory.put(over, observation=self._last_observations(over, step), best=best[over])
        if self.scene.mask_size:
            memory.put(over, mask=True)  # nobody acts there
        if self.record.previous:
            memory.put(over, prev_action=done[over], prev_reward=step.reward[over])
        for which, begin in self.record.endings(memory.count[over]):
            if len(begin):
                seats = over[which]
                self._cut(seats, begin, memory.count[seats], np.full(len(seats), time.time()))
                self.ready += len(seats)

    def _last_observations(self, over: np.ndarray, step: Step) -> Tree:
        """The true last observation where truncated; zeros where terminated: nothing depends on it, and it is not known."""
        rows = map_tree(lambda leaf: np.zeros((len(over), *leaf[0]), leaf[1]), leaf_tree(self.scene.observation_space))
        if len(step.final_rows):
            _assign(rows, np.searchsorted(over, step.final_rows), step.final_observation)
        return rows

    def _cut(self, seats: np.ndarray, begin: np.ndarray, end: np.ndarray, times: np.ndarray) -> None:
        items, error = self.record.cut(self._memory, seats, begin, end)
        self._blocks.append(({**items, "time": times}, error.astype(np.float64) + priorities.FLOOR))


@dataclass(frozen=True)
class ItemRecord:
    """What every core.Record of items has; a kind of item adds its layout, its sight and where to cut."""

    scene: Scene

    @property
    def seats(self) -> int:
        return self.scene.seats

    @property
    def mask_size(self) -> int:
        return self.scene.mask_size

    @property
    def steps(self) -> Unroll:
        return self.scene.steps

    def of_seats(self, seats: int) -> ItemRecord:
        """The same record for another number of seats; its items are laid out alike."""
        return replace(self, scene=replace(self.scene, seats=seats))

    def recorder(self, seats: int | None = None) -> Recorder:
        self.scene.check_seats(seats)
        return Recorder(self, self.sight(self.seats))  # type: ignore[arg-type, attr-defined]


def _copy_rows(into: Tree, here: slice, source: Tree, there: slice) -> None:
    def copy(target: Any, rows: Any) -> None:
        target[here] = rows[there]

    map_tree(copy, into, source)


def _assign(into: Tree, at: Any, rows: Tree) -> None:
    def assign(target: Any, values: Any) -> None:
        target[at] = values

    map_tree(assign, into, rows)
