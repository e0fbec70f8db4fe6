"""A TensorEnv as a BatchedEnv of arrays: for evaluators, `shoal eval`, and every architecture except `device`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal.envs.adapter import EnvAdapter
from shoal.envs.device.tensor_env import TensorEnv
from shoal.envs.interface import Step
from shoal.slots import leaves, map_tree

__all__ = ["TensorEnvAdapter"]


class TensorEnvAdapter(EnvAdapter):
    """One TensorEnv as a BatchedEnv. It copies every step to the host: for evaluation, not for speed."""

    backend = "tensors"

    def __init__(
        self, name: str, env: TensorEnv, device: torch.device, *, check: bool = True, seed: int | None = None
    ) -> None:
        super().__init__(name, env.observation_space, env.action_space, env.num_envs, check=check, seed=seed)
        self.env, self.max_episode_steps = env, env.max_episode_steps
        self._generator: torch.Generator | None = None
        self._device = device

    def reset(self, seed: int | None = None) -> Step:
        seed = self._begin(seed)
        if self._generator is None or seed is not None:
            self._generator = torch.Generator(self._device).manual_seed(
                int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else int(seed))
        observation = map_tree(_array, self.env.reset(self._generator))
        self._verify([array for _, array in leaves(observation)], self._reward)
        self._first.fill(True)
        return Step(observation, self._reward, self._discount, self._first, self._last, self._truncated, self._all)

    def step(self, action: Any) -> Step:
        self._steps += 1
        self._clear_flags()
        assert self._generator is not None
        sent = torch.from_numpy(np.ascontiguousarray(self.action_codec.batch(action, self.num_envs))).to(self._device)
        made = self.env.step(sent, self._generator)
        observation, reward, terminated, truncated = (map_tree(_array, part) for part in made[:4])
        self._reward[:] = reward
        self._verify([array for _, array in leaves(observation)], self._reward)
        self._discount[terminated] = 0
        self._truncated[:] = truncated
        self._last[:] = terminated | truncated
        self._first[:] = self._last
        self._totals.add(self._reward)
        step = Step(observation, self._reward, self._discount, self._first, self._last, self._truncated, self._all)
        if self._last.any():
            step.episode_return, step.episode_length = self._totals.close(np.flatnonzero(self._last))
        rows = np.flatnonzero(truncated)
        if len(rows):
            step.final_rows, step.final_observation = rows, map_tree(lambda x: _array(x)[rows], made.final_observation)
        return step

    def close(self) -> None: ...


def _array(x: torch.Tensor) -> np.ndarray:
    return x.cpu().numpy()
