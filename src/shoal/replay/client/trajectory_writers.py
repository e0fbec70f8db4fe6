"""Ready-made writers: n-step transitions, overlapping sequences with burn-in and stored state, whole episodes.

Steps follow shoal's convention: at step t the observation, the action taken there, and the reward and discount that followed
(discount 0 where the episode terminated). `end(observation)` gives the true last observation, also of a truncated episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.client.client import Client
from shoal.replay.client.writer import Writer
from shoal.replay.closing import Closing
from shoal.replay.errors import InvalidItem
from shoal.replay.table.columns import Tree, flatten, unflatten

__all__ = [
    "EpisodeWriter", "SequenceWriter", "TransitionWriter", "VectorEpisodeWriter", "VectorSequenceWriter", "VectorTransitionWriter",
]  # fmt: skip

Priority = Callable[[dict[str, Any]], float]


class ReadyWriter(Closing):
    """What every ready-made writer has: the `Writer` under it, and its end."""

    writer: Writer

    @property
    def lost(self) -> int:
        """Confirmed items that a server lost in a crash, being newer than its last checkpoint."""
        return self.writer.lost

    def flush(self, timeout: float | None = -1.0) -> None:
        """Wait until every item made so far is confirmed. The steps of an unfinished item stay with the writer."""
        self.writer.flush(timeout)

    def close(self, timeout: float | None = -1.0) -> None:
        """Send what is left and let go of the server's chunks."""
        self.writer.close(timeout)


class TransitionWriter(ReadyWriter):
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
        self.writer = client.writer(max_history=n + 1, timeout=timeout)
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


class VectorTransitionWriter(ReadyWriter):
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
        self.writer = client.writer(max_history=n + 1, timeout=timeout)
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
        """Items that begin `back` steps before the newest observation and span `steps` rewards."""
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


class SequenceWriter(ReadyWriter):
    """Overlapping sequences (R2D2): `length` steps every `period`, with up to `burn_in` steps before them.

    Columns begin `burn_in` steps earlier where the episode allows it; the item's "burn_in" says how many there are, and
    "state" is the stored recurrent state at its first step. At the end of an episode: "write" a shorter sequence,
    "pad" it with zero steps (column "valid" tells them apart), "truncate" (drop it), or "continue" into the next
    episode. priority is given the step of the episode at which the sequence begins.
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
        begin = None if priority is None else lambda begins: priority(int(begins[0]))
        self._many = VectorSequenceWriter(client, table, 1, length, period, burn_in, end, begin, timeout)
        self.writer = self._many.writer

    def append(self, step: Mapping[str, Any], state: Tree | None = None) -> None:
        """One step with the recurrent state before it."""
        self._many.append(_of_one(step), None if state is None else _of_one(state))

    def end_episode(self) -> None:
        """Write what is left as `end` says, then begin a new episode (unless sequences continue across episodes)."""
        self._many.end_episodes([True])


class VectorSequenceWriter(ReadyWriter):
    """`SequenceWriter` for E environments at once, without a loop over them; the same items for each environment.

    priority is given the steps [n] of their episodes at which n sequences begin, and returns a number or [n] of them.
    """

    def __init__(
        self, client: Client, table: str, envs: int, length: int, period: int, burn_in: int = 0, end: str = "pad",
        priority: Callable[[npt.NDArray[np.int64]], Any] | None = None, timeout: float | None = None,
    ) -> None:  # fmt: skip
        if envs < 1 or length < 1 or period < 1 or burn_in < 0:
            raise InvalidItem(
                f"envs {envs}, length {length} and period {period} must be at least 1, burn_in {burn_in} at least 0"
            )
        if end not in ("write", "pad", "truncate", "continue"):
            raise InvalidItem(f"end must be 'write', 'pad', 'truncate' or 'continue', got {end!r}")
        self._table, self._length, self._period, self._burn_in = table, length, period, burn_in
        self._end, self._priority = end, priority
        self.writer = client.writer(max_history=burn_in + length + period, timeout=timeout)
        self._valid = np.ones(envs, bool)
        self._steps = np.zeros(envs, np.int64)  # of the episode
        self._next = np.zeros(envs, np.int64)  # where the next sequence begins

    def append(self, step: Mapping[str, Any], state: Tree | None = None, ended: Any = None) -> None:
        """One step of all environments, [E, ...] each, with the recurrent states before it; ended says whose last it was."""
        columns: dict[str, Any] = {"steps": {**step, "valid": self._valid}}
        if state is not None:
            columns["state"] = state
        self.writer.append_batch(columns)
        self._steps += 1
        self._create(self._steps == self._next + self._length)
        if ended is not None:
            self.end_episodes(ended)

    def end_episodes(self, ended: Any) -> None:
        """The newest step was the last of these environments' episodes, [E]: write what is left of each as `end` says."""
        over = np.asarray(ended, bool)
        if self._end == "continue" or not over.any():
            return
        covered = (self._next > 0) & (self._next + self._length - self._period >= self._steps)
        if self._end != "truncate":
            self._create(over & (self._steps > self._next) & ~covered)
        self._steps[over] = self._next[over] = 0
        self.writer.end_episode(np.flatnonzero(over))

    def _create(self, chosen: npt.NDArray[np.bool_]) -> None:
        """The sequences of these environments that begin at their _next and end with the newest step."""
        if not chosen.any():
            return
        history = self.writer.history
        before, begun = np.minimum(self._burn_in, self._next), self._steps - self._next
        stateful = any(path == "state" or path.startswith("state/") for path in history.specs)
        for early, whole in sorted(set(zip(before[chosen].tolist(), begun[chosen].tolist(), strict=True))):
            envs = np.flatnonzero(chosen & (before == early) & (begun == whole))
            span, missing = early + whole, self._length - whole if self._end == "pad" else 0
            steps = flatten(history["steps"][-span:])
            data = unflatten({path: cells._replace(zeros=missing) for path, cells in steps.items()})
            data["burn_in"] = np.full(len(envs), early, np.int32)
            if stateful:
                data["state"] = history["state"][-span]
            priority = 1.0 if self._priority is None else self._priority(self._next[envs])
            self.writer.create_items(self._table, priority, data, where=envs)
        self._next[chosen] += self._period


class EpisodeWriter(ReadyWriter):
    """Whole episodes as items, of any length up to max_steps."""

    def __init__(self, client: Client, table: str, max_steps: int, timeout: float | None = None) -> None:
        self._many = VectorEpisodeWriter(client, table, 1, max_steps, timeout)
        self.writer = self._many.writer

    def append(self, step: Mapping[str, Any]) -> None:
        self._many.append(_of_one(step))

    def end_episode(self, priority: float = 1.0) -> None:
        self._many.end_episodes([True], priority)


class VectorEpisodeWriter(ReadyWriter):
    """`EpisodeWriter` for E environments at once: an item whenever an episode ends, with a loop over lengths, not environments."""

    def __init__(self, client: Client, table: str, envs: int, max_steps: int, timeout: float | None = None) -> None:
        if envs < 1 or max_steps < 1:
            raise InvalidItem(f"envs {envs} and max_steps {max_steps} must be at least 1")
        self._table, self._max_steps = table, max_steps
        self.writer = client.writer(max_history=max_steps, timeout=timeout)
        self._steps = np.zeros(envs, np.int64)  # of the episode

    def append(self, step: Mapping[str, Any], ended: Any = None, priority: Any = 1.0) -> None:
        """One step of all environments, [E, ...] each; ended says whose last it was, priority is a number or [E] of them."""
        if (self._steps == self._max_steps).any():
            late = int(np.argmax(self._steps == self._max_steps))
            raise InvalidItem(f"the episode of environment {late} has more than max_steps = {self._max_steps} steps")
        self.writer.append_batch(step)
        self._steps += 1
        if ended is not None:
            self.end_episodes(ended, priority)

    def end_episodes(self, ended: Any, priority: Any = 1.0) -> None:
        """The newest step was the last of these environments' episodes, [E]."""
        over, history = np.asarray(ended, bool), self.writer.history
        priorities = np.broadcast_to(np.asarray(priority, np.float64), len(self._steps))
        for length in np.unique(self._steps[over & (self._steps > 0)]).tolist():
            envs = np.flatnonzero(over & (self._steps == length))
            data = unflatten({path: history[path][-length:] for path in history.specs})
            self.writer.create_items(self._table, priorities[envs], data, where=envs)
        if over.any():
            self._steps[over] = 0
            self.writer.end_episode(np.flatnonzero(over))


def _of_one(tree: Tree) -> Tree:
    """The step of a single environment as that of E = 1."""
    return unflatten({path: np.asarray(leaf)[None] for path, leaf in flatten(tree).items()})
