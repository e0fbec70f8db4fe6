"""Back-end "vector": a gymnasium.vector.VectorEnv of any autoreset mode.

SAME_STEP   observation is already the next episode's first; the true last one is in info["final_obs"], its info in "final_info"
DISABLED    nothing is reset: we keep the last observations, then reset exactly the rows that ended
NEXT_STEP   the row's next step() ignores its action and returns the reset observation (the "dead row"). It is impossible to step
            only some rows, so that row is passed on with valid=False and first=True: never a transition, nothing lost
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.adapter import EnvAdapter
from shoal.envs.interface import Step, Tree, split_seed
from shoal.envs.space_codecs import BadValue
from shoal.errors import ConfigError, ShoalError

__all__ = ["VectorEnvAdapter", "autoreset_mode"]


def autoreset_mode(env: VectorEnv, name: str) -> AutoresetMode:
    """A vector environment's mode.

    By getattr, because foreign environments declare it in either place or in none. The attribute wins: ale_py writes its metadata
    into a dict that all instances share.
    """
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


class VectorEnvAdapter(EnvAdapter):
    """One VectorEnv as a BatchedEnv."""

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
            arrays = self.observation_codec.batch(answer[0], self.num_envs)
            self._read_masks(answer[0], answer[1])
        except BadValue as error:
            raise self._error(None, error) from error
        except Exception as error:
            raise self._error(None, f"reset() raised {type(error).__name__}: {error}") from error
        if self.check:
            self._verify(arrays, self._reward)
        observation = self.observation_codec.tree(arrays)
        return Step(
            observation, self._reward, self._discount, self._all, self._false, self._false, self._all, action_mask=self._mask
        )

    def step(self, action: Tree) -> Step:
        self._steps += 1
        try:
            raw, raw_reward, terminated, truncated, info = self._env.step(self.action_codec.batch(action, self.num_envs))
            arrays = self.observation_codec.batch(raw, self.num_envs)
            self._read_flags(raw_reward, terminated, truncated)
            self._read_extra(info)
            self._begin_executed(action)
            if self._info is not None:
                self._read_watched(info)
            if info or self._mask is not None or self.observation_codec.masked:
                self._read_masks(raw, info)
                self._read_executed(info)
        except BadValue as error:
            raise self._error(None, error) from error
        except ShoalError:
            raise
        except Exception as error:
            raise self._error(None, f"step() raised {type(error).__name__}: {error}") from error
        reward, valid, first = self._reward, self._all, self._false
        if self._any_dead:
            valid, first = np.logical_not(self._dead, out=self._valid), self._dead.copy()
            # A dead row should have no reward and no flags. Enforce it: not every environment keeps to this.
            np.multiply(reward, valid, out=reward)
            np.maximum(self._discount, first, out=self._discount)
            np.logical_and(self._last, valid, out=self._last)
            np.logical_and(self._truncated, valid, out=self._truncated)
            self._any_dead = False
        self._totals.add(reward, valid)
        step = Step(self.observation_codec.tree(arrays), reward, self._discount, first, self._last, self._truncated, valid)
        if np.count_nonzero(self._last):
            self._end(step, arrays, info)
        if self.check:
            self._verify(arrays, reward)
        step.action_mask, step.executed_action = self._mask, self._executed
        step.info, step.info_keys, step.info_unfit = self._info, self._info_keys, self._info_unfit
        if self._reward_clip is not None:
            np.clip(reward, -self._reward_clip, self._reward_clip, out=reward)
        return step

    def _read_flags(self, reward: Any, terminated: Any, truncated: Any) -> None:
        """Reward and flags into our own arrays; termination wins over truncation."""
        want = (self.num_envs,)
        if not np.shape(reward) == np.shape(terminated) == np.shape(truncated) == want:
            shapes = np.shape(reward), np.shape(terminated), np.shape(truncated)
            raise BadValue(f"reward, terminated and truncated have shapes {shapes} instead of {want}")
        self._reward[:] = reward
        np.logical_not(terminated, out=self._discount)
        np.greater(truncated, terminated, out=self._truncated)
        np.logical_or(terminated, truncated, out=self._last)

    def _read_watched(self, info: dict[str, Any]) -> None:
        """The watched numbers of all rows; those of an episode's last step may be in info["final_info"]."""
        for part in (info, info.get("final_info")):
            if isinstance(part, dict):
                self._info_keys.update(name for name in part if not name.startswith("_"))
        for key, values in (self._info or {}).items():
            values.fill(np.nan)
            for part in (info, info.get("final_info")):
                if isinstance(part, dict) and key in part:
                    given = np.asarray(part.get(f"_{key}", self._all), bool)
                    column = part[key]
                    if np.shape(given) != self._all.shape or not isinstance(column, np.ndarray | list | tuple) or \
                            len(column) != self.num_envs:
                        self._info_unfit.setdefault(key, f"{type(column).__name__} without a value for each environment")
                        continue
                    for row in np.flatnonzero(given):
                        values[row] = self._info_number(key, column[row])

    def _read_extra(self, info: dict[str, Any]) -> None:
        """For subclasses that know more about their environment than gymnasium does. Called once flags and rewards are in place."""

    def _end(self, step: Step, arrays: list[np.ndarray], info: dict[str, Any]) -> None:
        """Some rows ended: their last observations, their reset, their returns."""
        last = self._last
        ended = np.flatnonzero(last)
        step.episode_return, step.episode_length = self._totals.close(ended)
        rows = ended[self._truncated[ended]]
        if len(rows):
            if self.mode is AutoresetMode.SAME_STEP:
                final, masks = self._final_from(info, rows)
            else:
                final, masks = [array[rows] for array in arrays], None if self._mask is None else self._mask[rows]
            if self.check:
                self._verify_final(final, rows)
            step.final_rows, step.final_observation = rows, self.observation_codec.tree(final)
            step.final_action_mask = None if masks is None else self.action_codec.open_dead_rows(masks)
        if self.mode is AutoresetMode.NEXT_STEP:
            self._dead[:] = last
            self._any_dead = True
            if self._mask is not None:  # nothing may be legal after the end, but the policy still samples there once
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
            fresh = self.observation_codec.batch(raw, self.num_envs)
            self._read_masks(raw, info, mask)
        except BadValue as error:
            raise self._error(None, error) from error
        except Exception as error:
            raise self._error(None, f"reset(reset_mask) raised {type(error).__name__}: {error}") from error
        for k, new in enumerate(fresh):
            if new is not arrays[k]:
                arrays[k] = np.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, arrays[k])
        step.observation = self.observation_codec.tree(arrays)

    def _final_from(self, info: dict[str, Any], rows: np.ndarray) -> tuple[list[np.ndarray], np.ndarray | None]:
        """SAME_STEP: the true last observations, given per row (gymnasium) or stacked (ALE), and their masks."""
        value = info.get("final_obs", info.get("final_observation"))
        if value is None:
            raise self._error(int(rows[0]), "was truncated without info['final_obs'], which autoreset mode SAME_STEP promises")
        try:
            if not (isinstance(value, np.ndarray) and value.dtype == object):
                final = [array[rows] for array in self.observation_codec.batch(value, self.num_envs)]
                masks = self._batch_masks(value, info.get("final_info"))
                return final, None if masks is None else masks[rows]
            final = self.observation_codec.buffers(len(rows))
            for k, row in enumerate(rows):
                self.observation_codec.write(final, k, value[row])
            if self.observation_codec.masked:
                return final, np.stack([self.action_codec.mask(value[row]["action_mask"]) for row in rows])
            masks = self._batch_masks(None, info.get("final_info"))
            return final, None if masks is None else masks[rows]
        except BadValue as error:
            raise self._error(int(rows[0]), f"final_obs: {error}") from error

    def _batch_masks(self, raw: Any, info: Any) -> np.ndarray | None:
        """[B, A] from a batched observation or info; rows that report no mask allow everything. None: no row reports one."""
        if self.observation_codec.masked:
            return self.action_codec.mask(raw["action_mask"], (self.num_envs,))
        if not isinstance(info, dict) or "action_mask" not in info:
            return None if self._mask is None else np.ones_like(self._mask)
        value = info["action_mask"]
        if isinstance(value, np.ndarray) and value.dtype == object:
            return np.stack([np.ones(self.mask_size, bool) if one is None else self.action_codec.mask(one) for one in value])
        masks = self.action_codec.mask(value, (self.num_envs,))
        given = info.get("_action_mask")
        if given is None:
            return masks
        opened: np.ndarray = masks | ~np.asarray(given)[:, None]  # gymnasium fills the rows without a mask with zeros
        return opened

    def _read_masks(self, raw: Any, info: dict[str, Any], only: np.ndarray | None = None) -> None:
        """Masks of all rows from observation or info; `only`: of these rows."""
        fresh = self._batch_masks(raw, info)
        if fresh is not None and only is not None and self._mask is not None:
            fresh = np.where(only[:, None], fresh, self._mask)
        self._mask = fresh

    def _read_executed(self, info: dict[str, Any]) -> None:
        """info["executed_action"]; SAME_STEP keeps that of an episode's last step in info["final_info"]."""
        for part in (info, info.get("final_info")):
            if isinstance(part, dict) and "executed_action" in part:
                self._put_executed(part.get("_executed_action", self._all), part["executed_action"], (self.num_envs,))

    def close(self) -> None:
        self._env.close()
