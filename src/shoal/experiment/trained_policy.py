"""`run.policy`: acting with a trained policy, in one environment or in several at once."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from shoal.acting import SEEN, STATE, HasModule, Progress, StepView
from shoal.core import Tree
from shoal.envs.space_codecs import ActionCodec, BadValue, ObservationCodec
from shoal.errors import ConfigError
from shoal.experiment.run_card import card
from shoal.learning import Algorithm
from shoal.slots import leaves
from shoal.telemetry.console import counted

__all__ = ["TrainedPolicy"]


class TrainedPolicy:
    """A trained policy with its memory, for one environment or for a batch of them.

        policy.reset()                                              # at the start of an episode
        action = policy.act(observation)                            # as the environment's own step() takes it
        actions = policy.act(observations, deterministic=False)     # a batch, as a gymnasium VectorEnv gives and takes it
    """

    def __init__(self, algorithm: Algorithm, published: Tree, observation_space: gym.Space[Any],
                 action_space: gym.Space[Any]) -> None:
        self._policy, self._algorithm = algorithm.policy(), algorithm
        self._policy.load(published)
        self._progress = Progress.of(published["progress"])
        self._spaces = observation_space, action_space
        self._observations, self._actions = ObservationCodec(observation_space), ActionCodec(action_space)
        self._wants_previous = "prev_action" in algorithm.record.layout.fields
        stored = algorithm.record.layout.fields.get("observation")
        own = set(observation_space.spaces) if isinstance(observation_space, gym.spaces.Dict) else set()
        self._without_state = isinstance(stored, dict) and set(stored) == {SEEN, STATE} != own  # only values see a state
        self._rng = torch.Generator().manual_seed(0)
        self.reset()

    def __repr__(self) -> str:
        return (f"<TrainedPolicy of {self._algorithm.name}: {self._spaces[0]} -> {self._spaces[1]}, trained for "
                f"{self._progress.env_steps:,} env steps>")

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        rows = [("sees", str(self._spaces[0])), ("does", str(self._spaces[1])),
                ("trained for", f"{self._progress.env_steps:,} env steps, {self._progress.learner_steps:,} learner steps")]
        if isinstance(self._policy, HasModule):
            rows.append(("network", f"{sum(p.numel() for p in self._policy.module.parameters()):,} parameters"))
        return card(f"a policy of {self._algorithm.name}", rows, "policy.act(observation)")

    @property
    def module(self) -> torch.nn.Module:
        """The network: `module(observations)["action"]`, `module.state_dict()`; see PolicyModule for all that it answers."""
        if not isinstance(self._policy, HasModule):
            raise ConfigError(f"the policy of {type(self._algorithm).__name__} is not a torch module; use act()")
        return self._policy.module

    def reset(self) -> None:
        """Forget the episodes so far."""
        self._rows, self._state, self._previous = 0, self._policy.initial_state(1), None  # type: int, Tree, Any

    def act(self, observation: Any, *, deterministic: bool = True, mask: Any = None, reward: Any = 0.0, first: Any = None) -> Any:
        """The likeliest action, or a sampled one, as the policy explores at the end of its training.

        A batch has one more dimension than the observation space. `mask`: which actions are legal; `reward`: the last one, for nets
        that see it; `first`: which rows of a batch begin an episode (all of them after `reset`).
        """
        rows = self._rows_of(observation)
        batched, rows = rows is not None, 1 if rows is None else rows
        if self._observations.masked and mask is None:
            mask = observation["action_mask"]
        seen, legal = self._seen(observation, rows, batched), self._legal(mask, rows, batched)
        self._begin(rows)
        view = StepView(seen, self._beginnings(first, rows), legal)
        if self._wants_previous:
            blank = np.zeros((rows, *self._actions.shape), np.float32 if self._actions.kind == "box" else np.int64)
            view.prev_action = blank if self._previous is None else self._previous
            view.prev_reward = np.where(view.first, np.float32(0.0), _for_each(reward, rows, np.float32, "reward"))
        explore = None if deterministic else self._algorithm.explore(0, 1, rows, self._progress)
        action, self._state, _ = self._policy.act(view, self._state, explore, self._rng)
        self._previous = action
        return self._actions.batch(action, rows) if batched else self._actions.rows(action, 1)[0]

    def _rows_of(self, observation: Any) -> int | None:
        """How many rows a batch has; None for a single observation."""
        sizes: dict[str, int | None] = {}
        for leaf in self._observations.leaves:
            try:
                shape = np.shape(leaf.read(observation))
            except (BadValue, ValueError) as error:
                raise ConfigError(f"the observation does not fit {self._spaces[0]}: {error}") from None
            sizes[leaf.label] = shape[0] if len(shape) == len(leaf.shape) + 1 else None
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{name} has {'no batch' if size is None else f'{size} rows'}" for name, size in sizes.items())
            raise ConfigError(f"the parts of the observation do not fit each other: {told}; give one observation, or batches of "
                              "one size")
        rows = next(iter(sizes.values()))
        if rows == 0:
            raise ConfigError("the batch of observations is empty, so there is nothing to act on; give at least one row")
        return rows

    def _begin(self, rows: int) -> None:
        if rows == self._rows:
            return
        if self._rows and list(leaves(self._state)):
            raise ConfigError(f"this policy remembers {self._rows} episodes and is asked to act in {rows}; call policy.reset() "
                              "before the number of environments changes")
        self._rows, self._state, self._previous = rows, self._policy.initial_state(rows), None
        self._new = True

    def _beginnings(self, first: Any, rows: int) -> np.ndarray:
        began = np.full(rows, self._new) if first is None else _for_each(first, rows, np.bool_, "first") | self._new
        self._new = False
        return began

    def _seen(self, observation: Any, rows: int, batched: bool) -> Tree:
        try:
            buffers = self._observations.batch(observation, rows) if batched else self._observations.buffers(1)
            if not batched:
                self._observations.write(buffers, 0, observation)
        except BadValue as error:
            raise ConfigError(f"the observation does not fit {self._spaces[0]}: {error}") from None
        for array in buffers:
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                row = int(np.flatnonzero(~np.isfinite(array).reshape(rows, -1).all(1))[0])
                bad = array[row][~np.isfinite(array[row])].flat[0]
                raise ConfigError(f"the observation{f' of row {row}' if batched else ''} contains {bad}, and a network has no "
                                  "answer to it; find out where the environment gets it from (`shoal doctor --env ID`)")
        seen = self._observations.tree(buffers)
        return {SEEN: seen} if self._without_state else seen

    def _legal(self, mask: Any, rows: int, batched: bool) -> np.ndarray | None:
        if mask is None:
            return None
        try:
            return self._actions.mask(mask, (rows,) if batched else ()).reshape(rows, -1)
        except (BadValue, ValueError) as error:
            raise ConfigError(f"the mask does not fit: {error}") from None


def _for_each(value: Any, rows: int, kind: type[np.generic], name: str) -> np.ndarray:
    """One value for all rows, or one for each."""
    try:
        return np.broadcast_to(np.asarray(value, kind), (rows,))
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={repr(value)[:60]} does not fit an observation of {counted(rows, 'row')}; give one value, or "
                          "one for each row") from None
