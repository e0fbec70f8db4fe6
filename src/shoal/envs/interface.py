"""The one interface that every environment is adapted to: a batch of seats that step together (BatchedEnv), one Step at a time.

    env = envs.make("CartPole-v1", num_envs=8)
    step = env.reset(seed=1)
    while True:
        action = policy(step.observation, step.first)     # `first` clears recurrent state
        step = env.step(action)                           # reward, last, discount belong to `action`

Gymnasium's three autoreset modes (SAME_STEP, NEXT_STEP, DISABLED), ALE, envpool, PettingZoo-style environments and shoal's
compiled ones all end up here. The rules, per row of a Step:

- a row with `valid` is one real transition: from the previous Step's observation, by the action given, to this Step;
- `last` closes an episode. `first` opens the next one, normally in the same Step (`observation` is then already the first one of
  the new episode). Where that is impossible (a vector environment that only knows NEXT_STEP, an agent that died before the
  others) `first` comes in a later Step, and the rows after `last` up to and including that one have valid=False: store nothing
  for them; the environment ignores the actions given there;
- only termination sets discount to 0. Terminated and truncated at once counts as terminated. A truncated row appears in
  `final_rows` with its true last observation in `final_observation`, and the actions that were legal there in
  `final_action_mask`: bootstrap from these, never from `observation` and `action_mask`.

Seats that take turns, and agents with different spaces: multi_agent.py, which adds `acts` to these rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np

from shoal.errors import EnvironmentError_

__all__ = [
    "NO_LENGTHS",
    "NO_RETURNS",
    "NO_ROWS",
    "BatchedEnv",
    "EnvSpec",
    "EpisodeTotals",
    "Step",
    "Tree",
    "contract_error",
    "env_name",
    "split_seed",
]

Tree = np.ndarray | dict[str, "Tree"]  # Tuple spaces become dictionaries with the keys "0", "1", ...

NO_ROWS = np.zeros(0, np.int64)
NO_RETURNS = np.zeros(0, np.float32)
NO_LENGTHS = np.zeros(0, np.int64)


@dataclass(slots=True)
class Step:
    """One step of B seats. The environment's next call may overwrite these arrays: copy what you keep."""

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
    executed_action: Tree | None = None  # [B, ...] what the environment did, where it may differ from the action: record this one
    episode_return: np.ndarray = field(default_factory=lambda: NO_RETURNS)  # [N] float32, unclipped, of rows last & valid
    episode_length: np.ndarray = field(default_factory=lambda: NO_LENGTHS)  # [N] int64, in agent decisions
    final_action_mask: np.ndarray | None = None  # [K, A] bool: legal actions for `final_observation`; None without masks or K == 0
    acts: np.ndarray | None = None  # [B] bool: seats that are asked for an action now; None: all that are alive
    info: dict[str, np.ndarray] | None = None  # by key [B] float64: numbers of `info` (Handling.info), NaN where a row gives none
    info_keys: Set[str] = frozenset()  # all that `info` has had so far, where numbers of it are asked for
    info_unfit: Mapping[str, str] | None = None  # by key, where numbers are asked for: the type of what came in place of one
    restarts: tuple[str, ...] = ()  # environments that raised and were made anew: which, and why


@runtime_checkable
class BatchedEnv(Protocol):
    """B seats that step together. A seat is one agent of one environment."""

    name: str
    num_seats: int
    seats_per_env: int
    observation_space: gym.Space[Any]  # of ONE seat, in canonical form: see shoal.envs.space_codecs
    action_space: gym.Space[Any]
    raw_observation_space: gym.Space[Any]  # of ONE seat, as the environment itself declares it
    raw_action_space: gym.Space[Any]
    env_id: np.ndarray  # [B] int64
    agent_id: np.ndarray  # [B] int64
    backend: str
    backend_reason: str  # one sentence: which back-end, and why
    frame_skip: int
    max_episode_steps: int | None  # in agent decisions; None if unknown
    mask_size: int  # length of a mask row; 0 where actions cannot be masked
    has_executed_action: bool  # known for compiled environments; others may still report it in info
    takes_turns: bool  # not every living seat acts at every step: see `Step.acts`

    def reset(self, seed: int | None = None) -> Step:
        """Begin an episode everywhere: reward 0, discount 1, first True, last False, valid True."""
        ...

    def step(self, action: Tree) -> Step:
        """One agent decision per seat. Actions of seats that are not alive are ignored."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EnvSpec:
    """What you must know about an environment to build a network and a recorder for it. Fields as in BatchedEnv."""

    name: str
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    max_episode_steps: int | None
    frame_skip: int
    seats_per_env: int
    has_action_mask: bool
    backend: str
    backend_reason: str
    mask_size: int
    has_executed_action: bool = False
    takes_turns: bool = False
    frame_stack: int = 1  # frames in an observation [frame_stack, ...]: within an episode each is the last one, moved by one frame


class EpisodeTotals:
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


def env_name(env: Any) -> str:
    """What to call an environment in messages: its id, or the name of the class or callable that makes it."""
    return env if isinstance(env, str) else getattr(env, "__name__", None) or type(env).__name__


def split_seed(seed: int, count: int) -> np.ndarray:
    """`count` independent 31-bit seeds. Neighbouring seeds share none, unlike gymnasium's seed, seed + 1, ..."""
    return (np.random.SeedSequence(int(seed)).generate_state(count, np.uint32) >> 1).astype(np.int64)


def contract_error(name: str, where: str, step: int, what: str) -> EnvironmentError_:
    """The error for an environment that breaks its contract. `where` says which environment or seat; step 0 is the reset."""
    when = "at reset" if step == 0 else f"at step {step}"
    return EnvironmentError_(f"{name}, {where}, {when}: {what}")
