"""The compiled kernels as environments: a BatchedEnv (CompiledEnv), a gymnasium VectorEnv and a single gymnasium Env."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from shoal.envs.builtin import env_kernels
from shoal.envs.builtin.catalog import BuiltinSpec, builtin_spec
from shoal.envs.interface import NO_LENGTHS, NO_RETURNS, NO_ROWS, Step, Tree, contract_error
from shoal.envs.space_codecs import ActionCodec, BadValue
from shoal.errors import ConfigError

__all__ = ["CompiledEnv", "CompiledSingleEnv", "CompiledVectorEnv"]


class CompiledEnv:
    """The batch of one compiled environment: one kernel call per step."""

    backend = "compiled"
    backend_reason = ""
    frame_skip = 1
    seats_per_env = 1
    takes_turns = False

    def __init__(
        self,
        spec: BuiltinSpec,
        num_envs: int,
        *,
        max_episode_steps: int | None = None,
        seed: int | None = None,
        keep_terminal: bool = False,
    ) -> None:
        limit = spec.max_episode_steps if max_episode_steps is None else max_episode_steps
        if limit is not None and limit < 1:
            raise ConfigError(f"max_episode_steps={limit}: use at least 1")
        self.name, self.num_envs, self.num_seats = spec.name, num_envs, num_envs
        self.observation_space: gym.Space[Any] = spec.observation_space
        self.action_space = spec.action_space
        self.raw_observation_space: gym.Space[Any] = spec.observation_space
        self.raw_action_space = spec.action_space
        self.action_codec = ActionCodec(spec.action_space)
        self.mask_size = self.action_codec.mask_size
        self.max_episode_steps = limit
        self.has_executed_action = spec.executes
        self.env_id, self.agent_id = np.arange(num_envs), np.zeros(num_envs, np.int64)
        self._discrete = self.action_codec.kind == "discrete"
        self._seed, self._steps = seed, 0
        self._reset_kernel, self._step_kernel = env_kernels.RESETS[spec.reset], env_kernels.STEPS[spec.step]
        self._params = np.asarray(spec.params, np.float64)
        self._state: np.ndarray = np.zeros((spec.state_size, num_envs), spec.state_dtype)
        self._rng = np.random.SeedSequence().generate_state(num_envs, np.uint64)
        self._allocate(spec, limit or 0, keep_terminal)

    def _allocate(self, spec: BuiltinSpec, limit: int, keep_terminal: bool) -> None:
        rows, shape, dtype = self.num_envs, spec.observation_space.shape, spec.observation_space.dtype
        size = int(np.prod(shape))
        self._out = out = env_kernels.Out(
            obs=np.zeros((rows, size), dtype),
            reward=np.zeros(rows, np.float32),
            discount=np.ones(rows, np.float32),
            over=np.zeros(rows, bool),
            last=np.zeros(rows, bool),
            truncated=np.zeros(rows, bool),
            executed=np.zeros(rows if spec.executes else 0, np.int64),
            final=np.zeros((rows, size), dtype),
            final_rows=np.zeros(rows, np.int64),
            returns=np.zeros(rows, np.float64),
            lengths=np.zeros(rows, np.int64),
            ended_rows=np.zeros(rows, np.int64),
            ended_return=np.zeros(rows, np.float32),
            ended_length=np.zeros(rows, np.int64),
            meta=np.array([0, 0, keep_terminal, limit], np.int64),
        )
        self.observation = out.obs.reshape(rows, *shape)
        """[B, ...] of the newest Step, an array of this environment's own."""
        self.final_observation = out.final.reshape(rows, *shape)
        """[B, ...]: the first rows are the newest Step's final_observation."""
        self.executed_action = out.executed if spec.executes else None
        self._all, self._none = np.ones(rows, bool), np.zeros(rows, bool)

    def reset(self, seed: int | None = None) -> Step:
        """See BatchedEnv. Without a seed, each row continues with its own random numbers."""
        seed, self._seed = (self._seed if seed is None else seed), None
        if seed is not None:
            self._rng[:] = np.random.SeedSequence(int(seed)).generate_state(self.num_envs, np.uint64)
        out = self._out
        self._reset_kernel(self._state, self._rng, self._params, out)
        self._steps = 0
        for array in (out.reward, out.returns, out.lengths, out.executed):
            array.fill(0)
        out.discount.fill(1)
        return Step(self.observation, out.reward, out.discount, self._all, self._none, self._none, self._all)

    def step(self, action: Tree) -> Step:
        self._steps += 1
        if not (
            self._discrete
            and type(action) is np.ndarray
            and action.dtype == np.int64
            and action.shape == (self.num_envs,)
        ):
            try:
                action = np.ascontiguousarray(self.action_codec.batch(action, self.num_envs))
            except BadValue as error:
                raise contract_error(self.name, "all environments", self._steps, str(error)) from error
        out, meta = self._out, self._out.meta
        self._step_kernel(action, self._state, self._rng, self._params, out)
        step = Step(
            self.observation,
            out.reward,
            out.discount,
            out.last,
            out.last,
            out.truncated,
            self._all,
            NO_ROWS,
            None,
            None,
            self.executed_action,
            NO_RETURNS,
            NO_LENGTHS,
        )
        ended, finals, *_ = meta.tolist()
        if ended:
            step.episode_return, step.episode_length = out.ended_return[:ended], out.ended_length[:ended]
            if finals:
                step.final_rows, step.final_observation = out.final_rows[:finals], self.final_observation[:finals]
        return step

    def close(self) -> None: ...


class CompiledVectorEnv(VectorEnv[Any, Any, Any]):
    """The same environment behind gymnasium's vector interface (for gymnasium.make_vec)."""

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  as gymnasium declares it

    def __init__(
        self,
        num_envs: int = 1,
        *,
        builtin: str,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._env = CompiledEnv(
            builtin_spec(builtin, kwargs), num_envs, max_episode_steps=max_episode_steps, keep_terminal=True
        )
        self.num_envs, self.render_mode = num_envs, render_mode
        self.single_observation_space, self.single_action_space = self._env.observation_space, self._env.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._env.reset(seed)
        return self._env.observation.copy(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        step = self._env.step(actions)
        info: dict[str, Any] = {}
        if self._env.executed_action is not None:
            info["executed_action"] = self._env.executed_action.copy()
        if len(step.final_rows):
            final = np.full(self.num_envs, None, object)
            for k, row in enumerate(step.final_rows):
                final[row] = self._env.final_observation[k].copy()
            info["final_obs"], info["_final_obs"] = final, step.last.copy()
        terminated = step.discount == 0
        return self._env.observation.copy(), step.reward.copy(), terminated, step.truncated.copy(), info


class CompiledSingleEnv(gym.Env[np.ndarray, Any]):
    """The same environment, one row of it, behind gymnasium's single interface (for gymnasium.make)."""

    metadata = {"render_modes": []}  # noqa: RUF012  as gymnasium declares it

    def __init__(
        self, builtin: str, max_episode_steps: int | None = None, render_mode: str | None = None, **kwargs: Any
    ) -> None:
        self._env = CompiledEnv(builtin_spec(builtin, kwargs), 1, max_episode_steps=max_episode_steps, keep_terminal=True)
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._env.reset(int(self.np_random.integers(2**62)))
        return self._env.observation[0].copy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        step = self._env.step(np.asarray(action)[None])
        observation = self._env.final_observation[0] if step.last[0] else self._env.observation[0]
        executed = self._env.executed_action
        info = {} if executed is None else {"executed_action": int(executed[0])}
        return observation.copy(), float(step.reward[0]), bool(step.discount[0] == 0), bool(step.truncated[0]), info
