"""The one stream of steps that every environment becomes: what actors read and recorders store.

    env = envs.make("CartPole-v1", num_envs=8)
    step = env.reset(seed=1)
    while True:
        action = policy(step.observation, step.first)     # `first` clears recurrent state
        step = env.step(action)                           # reward, last, discount belong to `action`

Gymnasium's three autoreset modes (SAME_STEP, NEXT_STEP, DISABLED), ALE, envpool, PettingZoo-style environments and
shoal's compiled ones all end up here. The rules of the stream, per row:

- a row with `valid` is one real transition: from the previous Step's observation, by the action given, to this Step;
- `last` closes an episode. `first` opens the next one, normally in the same Step (`observation` is then already the
  first one of the new episode). Where that is impossible (a vector environment that only knows NEXT_STEP, an agent that
  died before the others) `first` comes in a later Step, and the rows after `last` up to and including that one have
  valid=False: store nothing for them, the actions given there are ignored;
- only termination sets discount to 0. Terminated and truncated at once counts as terminated. A truncated row appears in
  `final_rows` with its true last observation in `final_observation`: bootstrap from that, never from `observation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import gymnasium as gym
import numpy as np

from shoal.errors import EnvironmentError_

__all__ = [
    "NO_LENGTHS",
    "NO_RETURNS",
    "NO_ROWS",
    "BatchedEnv",
    "EnvSpec",
    "Ledger",
    "Step",
    "Tree",
    "breach",
    "split_seed",
]

Tree = np.ndarray | dict[str, "Tree"]  # Tuple spaces become dictionaries with the keys "0", "1", ...

NO_ROWS = np.zeros(0, np.int64)
NO_RETURNS = np.zeros(0, np.float32)
NO_LENGTHS = np.zeros(0, np.int64)


@dataclass(slots=True)
class Step:
    """One step of B seats. Its arrays may be overwritten by the environment's next call: copy what you keep."""

    observation: Tree  # [B, ...] to act on next; after an episode's end the first observation of the next episode
    reward: np.ndarray  # [B] float32
    discount: np.ndarray  # [B] float32, 0 where terminated, else 1
    first: np.ndarray  # [B] bool: `observation` begins an episode
    last: np.ndarray  # [B] bool: the transition just made ended its episode
    truncated: np.ndarray  # [B] bool: it ended without terminating
    valid: np.ndarray  # [B] bool: the row is a real transition
    final_rows: np.ndarray = field(default_factory=lambda: NO_ROWS)  # [K] int64: the rows truncated in this step
    final_observation: Tree | None = None  # [K, ...] their true last observation; None if K == 0
    action_mask: np.ndarray | None = None  # [B, A] bool: legal actions for `observation` (MultiDiscrete: sum(nvec))
    executed_action: Tree | None = (
        None  # [B, ...] what the environment really did, where it may differ: record this one
    )
    episode_return: np.ndarray = field(
        default_factory=lambda: NO_RETURNS
    )  # [N] float32, unclipped, of rows last & valid
    episode_length: np.ndarray = field(default_factory=lambda: NO_LENGTHS)  # [N] int64, in agent decisions


@runtime_checkable
class BatchedEnv(Protocol):
    """B seats that step together. A seat is one agent of one environment."""

    num_seats: int
    observation_space: gym.Space  # of ONE seat, in canonical form: see shoal.envs.spaces
    action_space: gym.Space
    env_id: np.ndarray  # [B] int64
    agent_id: np.ndarray  # [B] int64
    policy_id: np.ndarray  # [B] int64
    backend: str
    frame_skip: int
    name: str

    def reset(self, seed: int | None = None) -> Step:
        """Begin an episode everywhere: reward 0, discount 1, first True, last False, valid True."""

    def step(self, action: Tree) -> Step:
        """One agent decision per seat. Actions of seats that are not alive are ignored."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class EnvSpec:
    """What one must know of an environment to build a network and a recorder for it."""

    name: str
    observation_space: gym.Space
    action_space: gym.Space
    max_episode_steps: int | None  # in agent decisions; None if unknown
    frame_skip: int
    seats_per_env: int
    has_action_mask: bool
    backend: str
    line: str  # one sentence: which back-end, and why
    mask_size: int  # length of a mask row; 0 where actions cannot be masked
    has_executed_action: bool = False  # known for compiled environments; others may still report it in info


class Ledger:
    """Returns and lengths of the episodes under way, summed from raw rewards."""

    def __init__(self, num_seats: int) -> None:
        self._return = np.zeros(num_seats, np.float64)
        self._length = np.zeros(num_seats, np.int64)

    def clear(self) -> None:
        self._return.fill(0)
        self._length.fill(0)

    def add(self, reward: np.ndarray, valid: np.ndarray | int = 1) -> None:
        """Rows that are not valid have reward 0."""
        self._return += reward
        self._length += valid

    def close(self, rows: np.ndarray | list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The (returns, lengths) of the episodes that just ended in these rows."""
        returns, lengths = self._return[rows].astype(np.float32), self._length[rows]
        self._return[rows] = 0
        self._length[rows] = 0
        return returns, lengths


def split_seed(seed: int, count: int) -> np.ndarray:
    """`count` independent 31-bit seeds. Neighbouring seeds share none, unlike gymnasium's seed, seed + 1, ..."""
    return (np.random.SeedSequence(int(seed)).generate_state(count, np.uint32) >> 1).astype(np.int64)


def breach(name: str, where: str, step: int, what: str) -> EnvironmentError_:
    """The error for a broken contract. `where` says which environment or seat; step 0 is the reset."""
    when = "at reset" if step == 0 else f"at step {step}"
    return EnvironmentError_(f"{name}, {where}, {when}: {what}")
