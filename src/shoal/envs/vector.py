"""The stream over a gymnasium.vector.VectorEnv, whatever its autoreset mode.

SAME_STEP   observation is already the next episode's first; the true last one is in info["final_obs"]
DISABLED    nothing is reset: we keep the last observations, then reset exactly the rows that ended
NEXT_STEP   the row's next step() ignores its action and returns the reset observation (the "dead row"). One cannot step
            some rows only, so that row is passed on with valid=False and first=True: never a transition, nothing lost
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.base import Stream
from shoal.envs.spaces import BadValue
from shoal.envs.stream import Step, Tree, split_seed
from shoal.errors import ConfigError, ShoalError

__all__ = ["VectorStream", "autoreset_mode"]


def autoreset_mode(env: VectorEnv, name: str) -> AutoresetMode:
    """A vector environment's mode. Its attribute wins: ale_py writes its metadata into a dict all instances share."""
    mode = getattr(env, "autoreset_mode", None)
    if mode is None:
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    try:
        return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
    except ValueError:
        known = ", ".join(one.name for one in AutoresetMode)
        raise ConfigError(
            f"{name}: unknown autoreset mode {mode!r}; set metadata['autoreset_mode'] of the vector environment "
            f"to one of gymnasium.vector.AutoresetMode ({known})"
        ) from None


class VectorStream(Stream):
    """The stream over one VectorEnv."""

    backend = "vector"

    def __init__(
        self,
        name: str,
        env: VectorEnv,
        *,
        check: bool = True,
        seed: int | None = None,
        reward_clip: float | None = None,
    ) -> None:
        spaces = env.single_observation_space, env.single_action_space
        super().__init__(name, *spaces, env.num_envs, check=check, seed=seed)
        self._env, self._reward_clip = env, reward_clip
        self.mode = autoreset_mode(env, name)
        self._dead = np.zeros(self.num_seats, bool)  # NEXT_STEP: rows whose next step is only a reset
        self._any_dead = False
        self._valid = np.ones(self.num_seats, bool)
        self._false = np.zeros(self.num_seats, bool)

    def reset(self, seed: int | None = None) -> Step:
        seed = self._begin(seed)
        self._any_dead = False
        self._dead.fill(False)
        try:
            first_seed = None if seed is None else int(split_seed(seed, 1)[0]) % (2**31 - self.num_envs)
            answer = self._env.reset(seed=first_seed)
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise BadValue(f"reset() must return (observation, info), got {type(answer).__name__}")
            arrays = self.layout.batch(answer[0], self.num_envs)
            self._masks(answer[0], answer[1], None)
        except BadValue as error:
            raise self._wrong(None, error) from error
        except Exception as error:
            raise self._wrong(None, f"reset() raised {type(error).__name__}: {error}") from error
        if self.check:
            self._verify(arrays, self._reward)
        return Step(
            self.layout.tree(arrays),
            self._reward,
            self._discount,
            self._all,
            self._false,
            self._false,
            self._all,
            action_mask=self._mask,
        )

    def step(self, action: Tree) -> Step:
        self._steps += 1
        try:
            raw, raw_reward, terminated, truncated, info = self._env.step(self.codec.batch(action, self.num_envs))
            arrays = self.layout.batch(raw, self.num_envs)
            self._flags(raw_reward, terminated, truncated)
            self._informed(info)
            self._chosen(action)
            if info or self.layout.masked:
                self._masks(raw, info, None)
                self._executions(info)
        except BadValue as error:
            raise self._wrong(None, error) from error
        except ShoalError:
            raise
        except Exception as error:
            raise self._wrong(None, f"step() raised {type(error).__name__}: {error}") from error
        reward, valid, first = self._reward, self._all, self._false
        if self._any_dead:
            valid, first = np.logical_not(self._dead, out=self._valid), self._dead.copy()
            # By contract a dead row has no reward and no flags; make sure.
            np.multiply(reward, valid, out=reward)
            np.maximum(self._discount, first, out=self._discount)
            np.logical_and(self._last, valid, out=self._last)
            np.logical_and(self._truncated, valid, out=self._truncated)
            self._any_dead = False
        self._ledger.add(reward, valid)
        step = Step(self.layout.tree(arrays), reward, self._discount, first, self._last, self._truncated, valid)
        if np.count_nonzero(self._last):
            self._end(step, arrays, info)
        if self.check:
            self._verify(arrays, reward)
        step.action_mask, step.executed_action = self._mask, self._executed
        if self._reward_clip is not None:
            np.clip(reward, -self._reward_clip, self._reward_clip, out=reward)
        return step

    def _flags(self, reward: Any, terminated: Any, truncated: Any) -> None:
        """Reward and flags into our own arrays; termination wins over truncation."""
        want = (self.num_envs,)
        if not np.shape(reward) == np.shape(terminated) == np.shape(truncated) == want:
            shapes = np.shape(reward), np.shape(terminated), np.shape(truncated)
            raise BadValue(f"reward, terminated and truncated have shapes {shapes} instead of {want}")
        self._reward[:] = reward
        np.logical_not(terminated, out=self._discount)
        np.greater(truncated, terminated, out=self._truncated)
        np.logical_or(terminated, truncated, out=self._last)

    def _informed(self, info: dict[str, Any]) -> None:
        """For a stream that knows more of its environment than gymnasium says; flags and rewards are in place."""

    def _end(self, step: Step, arrays: list[np.ndarray], info: dict[str, Any]) -> None:
        """Some rows ended: their last observations, their reset, their returns."""
        last = self._last
        ended = np.flatnonzero(last)
        step.episode_return, step.episode_length = self._ledger.close(ended)
        rows = ended[self._truncated[ended]]
        if len(rows):
            same_step = self.mode is AutoresetMode.SAME_STEP
            final = self._final_from(info, rows) if same_step else [array[rows] for array in arrays]
            if self.check:
                self._verify_final(final, rows)
            step.final_rows, step.final_observation = rows, self.layout.tree(final)
        if self.mode is AutoresetMode.NEXT_STEP:
            self._dead[:] = last
            self._any_dead = True
            if self._mask is not None:  # nothing is legal after the end, but somebody will sample there once
                self._mask = self._mask | last[:, None]
            return
        step.first = last.copy()
        if self.mode is AutoresetMode.DISABLED:
            self._reset_rows(step, arrays)

    def _reset_rows(self, step: Step, arrays: list[np.ndarray]) -> None:
        """DISABLED: reset the rows that ended and put their first observations in place."""
        mask = self._last.copy()
        try:
            raw, info = self._env.reset(options={"reset_mask": mask})
            fresh = self.layout.batch(raw, self.num_envs)
            self._masks(raw, info, mask)
        except BadValue as error:
            raise self._wrong(None, error) from error
        except Exception as error:
            raise self._wrong(None, f"reset(reset_mask) raised {type(error).__name__}: {error}") from error
        for k, new in enumerate(fresh):
            if new is not arrays[k]:
                arrays[k] = np.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, arrays[k])
        step.observation = self.layout.tree(arrays)

    def _final_from(self, info: dict[str, Any], rows: np.ndarray) -> list[np.ndarray]:
        """SAME_STEP: the true last observations, given per row (gymnasium) or stacked (ALE)."""
        value = info.get("final_obs", info.get("final_observation"))
        if value is None:
            raise self._wrong(int(rows[0]), "was truncated without info['final_obs'], which SAME_STEP promises")
        try:
            if not (isinstance(value, np.ndarray) and value.dtype == object):
                return [array[rows] for array in self.layout.batch(value, self.num_envs)]
            final = self.layout.buffers(len(rows))
            for k, row in enumerate(rows):
                self.layout.write(final, k, value[row])
            return final
        except BadValue as error:
            raise self._wrong(int(rows[0]), f"final_obs: {error}") from error

    def _masks(self, raw: Any, info: dict[str, Any], only: np.ndarray | None) -> None:
        """Masks from observation or info; `only`: the rows this call is about (None: all)."""
        if self.layout.masked:
            fresh = self.codec.mask(raw["action_mask"], (self.num_envs,))
        elif info and "action_mask" in info:
            value = info["action_mask"]
            if isinstance(value, np.ndarray) and value.dtype == object:
                given = [np.ones(self.codec.mask_size, bool) if one is None else self.codec.mask(one) for one in value]
                fresh = np.stack(given)
            else:
                fresh = self.codec.mask(value, (self.num_envs,))
                given = info.get("_action_mask")
                if given is not None:  # gymnasium fills the rows without a mask with zeros
                    fresh = fresh | ~np.asarray(given)[:, None]
        else:
            if self._mask is not None and only is None:
                self._mask = np.ones_like(self._mask)
            elif self._mask is not None:
                self._mask[only] = True
            return
        self._mask = fresh if only is None or self._mask is None else np.where(only[:, None], fresh, self._mask)

    def _executions(self, info: dict[str, Any]) -> None:
        """info["executed_action"]; SAME_STEP keeps that of an episode's last step in info["final_info"]."""
        for part in (info, info.get("final_info")):
            if isinstance(part, dict) and "executed_action" in part:
                rows = part.get("_executed_action", self._all)
                self._put_executed(rows, self.codec.executed(part["executed_action"], (self.num_envs,))[rows])

    def close(self) -> None:
        self._env.close()
