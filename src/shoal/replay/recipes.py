"""Ready-made writers: n-step transitions, overlapping sequences with burn-in and stored state, whole episodes.

Steps follow shoal's convention: at step t the observation, the action taken there, and the reward and discount that followed
(discount 0 where the episode terminated). `end(observation)` gives the true last observation, also of a truncated episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shoal.replay.client import Client
from shoal.replay.columns import Tree, flatten, unflatten
from shoal.replay.errors import InvalidItem
from shoal.replay.writer import Writer

__all__ = ["EpisodeWriter", "SequenceWriter", "TransitionWriter", "VectorTransitionWriter"]

Priority = Callable[[dict[str, Any]], float]


class TransitionWriter:
    """n-step transitions (Ape-X, Rainbow): observation, action, n-step reward, product of discounts, next observation.

    Nothing is written until n steps are there, then one item per step; the end of an episode flushes n, n-1, ..., 1 steps,
    all ending in the last observation. An episode of T steps gives T items.
    """

    def __init__(
        self,
        client: Client,
        tables: str | tuple[str, ...],
        n: int = 1,
        gamma: float = 0.99,
        priority: Priority | None = None,
        timeout: float | None = None,
    ) -> None:
        if n < 1:
            raise InvalidItem(f"n must be at least 1, got {n}")
        self._tables = (tables,) if isinstance(tables, str) else tables
        self._n, self._gamma, self._priority = n, gamma, priority
        self.writer: Writer = client.writer(max_history=n + 1, timeout=timeout)
        self._rewards: list[tuple[Any, Any]] = []  # reward and discount of the steps under way

    def append(self, observation: Tree, action: Tree, reward: Any, discount: Any, **extras: Any) -> None:
        """One step; extras are further columns, kept as they were at the item's first step."""
        self.writer.append({"observation": observation, "action": action, **({"extras": extras} if extras else {})})
        if len(self._rewards) == self._n:
            self._create(self._n, self._n)
            del self._rewards[0]
        self._rewards.append((np.float32(reward), np.float32(discount)))

    def end(self, observation: Tree) -> None:
        """The episode is over; this is what was seen last."""
        self.writer.append({"observation": observation}, partial=True)
        for steps in range(len(self._rewards), 0, -1):
            self._create(steps, steps)
        self._rewards.clear()
        self.writer.end_episode()

    def _create(self, back: int, steps: int) -> None:
        """An item that begins `back` steps before the newest observation."""
        reward, product = np.float32(0), np.float32(1)
        for step_reward, discount in self._rewards[len(self._rewards) - steps :]:
            reward += product * step_reward
            product *= np.float32(self._gamma) * discount
        history = self.writer.history
        begin = len(history["observation"]) - back - 1
        data: dict[str, Any] = {
            "observation": history["observation"][begin],
            "action": history["action"][begin],
            "reward": reward,
            "discount": product,
            "next_observation": history["observation"][-1],
        }
        if any(path.startswith("extras/") for path in history.specs):
            data["extras"] = history["extras"][begin]
        priority = 1.0 if self._priority is None else self._priority({"reward": reward, "discount": product})
        for table in self._tables:
            self.writer.create_item(table, priority, data)

    def close(self) -> None:
        self.writer.close()


class VectorTransitionWriter:
    """`TransitionWriter` for E environments at once, without a loop over them; the same items for each environment.

    Environments reset themselves: where `ended` is true the next observation belongs to a new episode, and `last_observation`
    has the one that was seen last.
    """

    def __init__(
        self, client: Client, tables: str | tuple[str, ...], envs: int, n: int = 1, gamma: float = 0.99,
        priority: Callable[[dict[str, Any]], Any] | None = None, timeout: float | None = None,
    ) -> None:  # fmt: skip
        if n < 1 or envs < 1:
            raise InvalidItem(f"n {n} and envs {envs} must be at least 1")
        self._tables = (tables,) if isinstance(tables, str) else tables
        self._n, self._gamma, self._priority = n, np.float32(gamma), priority
        self.writer: Writer = client.writer(max_history=n + 1, timeout=timeout)
        self._rewards = np.zeros((n, envs), np.float32)  # the newest last
        self._discounts = np.ones((n, envs), np.float32)
        self._steps = np.zeros(envs, np.int64)  # of the episode, before this one

    def append(
        self, observation: Tree, action: Tree, reward: Any, discount: Any, ended: Any = None, last_observation: Tree = None,
        **extras: Any,
    ) -> None:  # fmt: skip
        """One step of all environments, [E, ...] each."""
        self.writer.append_batch({"observation": observation, "action": action, **({"extras": extras} if extras else {})})
        full = self._steps >= self._n
        if full.any():
            self._create(self._n, self._n, np.flatnonzero(full), None)
        self._rewards = np.concatenate([self._rewards[1:], np.asarray(reward, np.float32)[None]])
        self._discounts = np.concatenate([self._discounts[1:], np.asarray(discount, np.float32)[None]])
        self._steps += 1
        over = np.zeros(len(self._steps), bool) if ended is None else np.asarray(ended, bool)
        if not over.any():
            return
        if last_observation is None:
            raise InvalidItem("an episode ended: append needs last_observation")
        for steps in range(self._n, 0, -1):
            chosen = np.flatnonzero(over & (self._steps >= steps))
            if len(chosen):
                self._create(steps - 1, steps, chosen, last_observation)
        self._steps[over] = 0
        self.writer.end_episode(np.flatnonzero(over))

    def _create(self, back: int, steps: int, envs: Any, last: Tree | None) -> None:
        """Items that begin `back` steps before the newest observation and span so many rewards."""
        reward, product = np.zeros(len(envs), np.float32), np.ones(len(envs), np.float32)
        for at in range(self._n - steps, self._n):
            reward += product * self._rewards[at, envs]
            product *= self._gamma * self._discounts[at, envs]
        history = self.writer.history
        following: Any = history["observation"][-1]
        if last is not None:
            following = unflatten({path: np.asarray(leaf)[envs] for path, leaf in flatten(last).items()})
        data: dict[str, Any] = {
            "observation": history["observation"][-1 - back], "action": history["action"][-1 - back], "reward": reward,
            "discount": product, "next_observation": following,
        }  # fmt: skip
        if any(path.startswith("extras/") for path in history.specs):
            data["extras"] = history["extras"][-1 - back]
        priority = 1.0 if self._priority is None else self._priority({"reward": reward, "discount": product})
        for table in self._tables:
            self.writer.create_items(table, priority, data, where=envs)

    def close(self) -> None:
        self.writer.close()


class SequenceWriter:
    """Overlapping sequences (R2D2): `length` steps every `period`, with up to `burn_in` steps before them.

    Columns begin `burn_in` steps earlier where the episode allows it; the item's "burn_in" says how many there are, and
    "state" is the stored recurrent state at its first step. At the end of an episode: "write" a shorter sequence,
    "pad" it with zero steps (column "valid" tells them apart), "truncate" (drop it), or "continue" into the next
    episode.
    """

    def __init__(
        self,
        client: Client,
        table: str,
        length: int,
        period: int,
        burn_in: int = 0,
        end: str = "pad",
        priority: Callable[[int], float] | None = None,
        timeout: float | None = None,
    ) -> None:
        if length < 1 or period < 1 or burn_in < 0:
            raise InvalidItem(f"length {length} and period {period} must be at least 1, burn_in {burn_in} at least 0")
        if end not in ("write", "pad", "truncate", "continue"):
            raise InvalidItem(f"end must be 'write', 'pad', 'truncate' or 'continue', got {end!r}")
        self._table, self._length, self._period, self._burn_in = table, length, period, burn_in
        self._end, self._priority = end, priority
        self.writer = client.writer(max_history=burn_in + length + period, timeout=timeout)
        self._steps = 0  # of the episode
        self._next = 0  # where the next sequence begins
        self._zeros: dict[str, Any] = {}

    def append(self, step: Mapping[str, Any], state: Tree | None = None) -> None:
        """One step with the recurrent state before it."""
        columns = {"steps": {**step, "valid": np.bool_(True)}}
        if state is not None:
            columns["state"] = state
        if not self._zeros:
            self._zeros = {path: np.zeros_like(np.asarray(leaf)) for path, leaf in flatten(columns).items()}
        self.writer.append(columns)
        self._steps += 1
        if self._steps == self._next + self._length:
            self._create(self._length)

    def end_episode(self) -> None:
        """Deal with what is left, then begin anew (unless sequences continue across episodes)."""
        if self._end == "continue":
            return
        begun = self._steps - self._next
        covered = self._next > 0 and self._next + self._length - self._period >= self._steps
        if begun > 0 and not covered:
            if self._end == "pad":
                for _ in range(self._length - begun):
                    self.writer.append(unflatten(self._zeros))
                self._steps += self._length - begun
                self._create(self._length)
            elif self._end == "write":
                self._create(begun)
        self._steps = self._next = 0
        self.writer.end_episode()

    def _create(self, length: int) -> None:
        """The sequence that begins at _next and ends with the newest step."""
        before = min(self._burn_in, self._next)
        history = self.writer.history
        span = before + length
        data = {**history["steps"][-span:], "burn_in": np.int32(before)}
        if any(path == "state" or path.startswith("state/") for path in history.specs):
            data["state"] = history["state"][len(history) - span]
        priority = 1.0 if self._priority is None else self._priority(self._next)
        self.writer.create_item(self._table, priority, data)
        self._next += self._period

    def close(self) -> None:
        self.writer.close()


class EpisodeWriter:
    """Whole episodes as items, of any length up to max_steps."""

    def __init__(self, client: Client, table: str, max_steps: int, timeout: float | None = None) -> None:
        self._table, self._max_steps = table, max_steps
        self.writer = client.writer(max_history=max_steps, timeout=timeout)

    def append(self, step: Mapping[str, Any]) -> None:
        if len(self.writer.history) == self._max_steps:
            raise InvalidItem(f"the episode has more than max_steps = {self._max_steps} steps")
        self.writer.append(step)

    def end_episode(self, priority: float = 1.0) -> None:
        history = self.writer.history
        if len(history):
            data = {path: history[path][:] for path in history.specs}
            self.writer.create_item(self._table, priority, unflatten(data))
        self.writer.end_episode()

    def close(self) -> None:
        self.writer.close()
