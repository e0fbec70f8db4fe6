"""Slow environments in several processes: each steps its share of the rows at the same time as the others.

    this process: rows 0 .. k          process 1: rows k .. 2k          process 2: ...
        step(actions) ──────────────────────▶ its slice of the actions
        Step of all rows ◀─────────────────── its Step

Arrays are pickled through a pipe, which is nothing beside a step of many milliseconds and much beside one of microseconds. A
process ends when its pipe closes, so also when this one is killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from shoal.envs.interface import BatchedEnv, Step, Tree, split_seed
from shoal.errors import EnvironmentError_

__all__ = ["SplitEnv"]


class SplitEnv:
    """`num_envs` environments of one kind in `processes` processes, as one BatchedEnv."""

    def __init__(self, make: Callable[[int], BatchedEnv], num_envs: int, processes: int) -> None:
        shares = [len(part) for part in np.array_split(np.arange(num_envs), min(processes, num_envs))]
        self._processes: list[tuple[int, Connection]] = []  # pid and pipe
        for share in shares[1:]:
            self._processes.append(self._fork(make, share))
        self._own = own = make(shares[0])
        self._cuts = np.cumsum([share * own.seats_per_env for share in shares])[:-1]
        self.name, self.num_seats, self.seats_per_env = own.name, num_envs * own.seats_per_env, own.seats_per_env
        self.observation_space, self.action_space = own.observation_space, own.action_space
        self.raw_observation_space, self.raw_action_space = own.raw_observation_space, own.raw_action_space
        self.env_id = np.repeat(np.arange(num_envs), own.seats_per_env)
        self.agent_id = np.tile(np.arange(own.seats_per_env), num_envs)
        self.backend, self.backend_reason = own.backend, f"{own.backend_reason} In {len(shares)} processes."
        self.frame_skip, self.max_episode_steps, self.mask_size = own.frame_skip, own.max_episode_steps, own.mask_size
        self.has_executed_action, self.takes_turns = own.has_executed_action, own.takes_turns

    def _fork(self, make: Callable[[int], BatchedEnv], share: int) -> tuple[int, Connection]:
        mine, theirs = Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            return pid, mine
        code = 1
        try:
            for _, other in self._processes:
                other.close()  # or the others would not see the end of theirs
            mine.close()
            serve(make(share), theirs)
            code = 0
        except BaseException as error:  # whatever a foreign environment raises
            tell_failure(theirs, error)
        finally:
            os._exit(code)

    def reset(self, seed: int | None = None) -> Step:
        seeds = [None] * (1 + len(self._processes)) if seed is None else split_seed(seed, 1 + len(self._processes)).tolist()
        for (_, pipe), one in zip(self._processes, seeds[1:], strict=True):
            pipe.send(("reset", one))
        return self._joined(self._own.reset(seeds[0]), None)

    def step(self, action: Tree) -> Step:
        actions = np.split(np.asarray(action), self._cuts)
        for (_, pipe), part in zip(self._processes, actions[1:], strict=True):
            pipe.send(("step", part))
        return self._joined(self._own.step(actions[0]), actions)

    def _joined(self, own: Step, actions: list[np.ndarray] | None) -> Step:
        steps = [own, *(self._receive(pipe) for _, pipe in self._processes)]
        starts = [0, *self._cuts]
        names = ("reward", "discount", "first", "last", "truncated", "valid", "episode_return", "episode_length")
        whole: dict[str, Any] = {name: np.concatenate([getattr(step, name) for step in steps]) for name in names}
        final = [step.final_observation for step in steps if step.final_observation is not None]
        executed: Tree | None = None
        if actions is not None and any(step.executed_action is not None for step in steps):
            executed = join([part if step.executed_action is None else step.executed_action
                             for step, part in zip(steps, actions, strict=True)])
        if own.acts is not None:
            whole["acts"] = np.concatenate([step.acts for step in steps])
        return Step(join([step.observation for step in steps]), **whole,
                    final_rows=np.concatenate([step.final_rows + start for step, start in zip(steps, starts, strict=True)]),
                    final_observation=join(final) if final else None, action_mask=self._masks(steps, "action_mask"),
                    executed_action=executed,
                    final_action_mask=self._masks([step for step in steps if len(step.final_rows)], "final_action_mask"))

    def _masks(self, steps: list[Step], name: str) -> np.ndarray | None:
        """A process whose rows report no mask allows everything."""
        masks = [getattr(step, name) for step in steps]
        if all(mask is None for mask in masks):
            return None
        rows = [len(step.reward) if name == "action_mask" else len(step.final_rows) for step in steps]
        anything = [np.ones((count, self.mask_size), bool) for count in rows]
        return np.concatenate([free if mask is None else mask for mask, free in zip(masks, anything, strict=True)])

    def _receive(self, pipe: Connection) -> Step:
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionError):
            raise EnvironmentError_(f"{self.name}: a process of its environments has died") from None
        if isinstance(answer, str):
            raise EnvironmentError_(answer)
        step: Step = answer
        return step

    def close(self) -> None:
        """Close all environments and wait for the processes: they end with their pipes."""
        for _, pipe in self._processes:
            pipe.close()
        for pid, _ in self._processes:
            os.waitpid(pid, 0)
        self._processes = []
        self._own.close()


def serve(env: BatchedEnv, pipe: Connection) -> None:
    """Step environments as told, until the pipe closes."""
    while True:
        try:
            what, value = pipe.recv()
        except (EOFError, ConnectionError):
            env.close()
            return
        pipe.send(env.reset(value) if what == "reset" else env.step(value))


def tell_failure(pipe: Connection, error: BaseException) -> None:
    text = str(error) if isinstance(error, EnvironmentError_) else f"{type(error).__name__}: {error}"
    try:
        pipe.send(text)
    except OSError:
        return  # nobody listens any more


def join(parts: list[Tree]) -> Tree:
    first = parts[0]
    if isinstance(first, dict):
        return {name: join([part[name] for part in parts if isinstance(part, dict)]) for name in first}
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
