"""The compiled games as a MultiAgentEnv: one kernel call per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.envs.builtin.games import GameSpec
from shoal.envs.interface import NO_LENGTHS, NO_RETURNS, NO_ROWS, Step, Tree, contract_error
from shoal.envs.multi_agent import NO_ENVS, MultiAgentStep
from shoal.envs.space_codecs import ActionCodec, BadValue

__all__ = ["CompiledGames"]

NO_GAME_RETURNS = np.zeros((0, 2))


class CompiledGames:
    """A batch of one compiled game. Both agents have equal spaces, so it is its own single AgentGroup."""

    backend = "compiled"
    backend_reason = ""

    def __init__(self, spec: GameSpec, num_envs: int, *, seed: int | None = None) -> None:
        from shoal.envs.builtin import game_kernels  # imports Numba

        self.spec, self.name, self.takes_turns = spec, spec.name, spec.takes_turns
        self.agents: tuple[str, ...] = spec.agents
        self.num_envs, self.num_seats = num_envs, 2 * num_envs
        self.observation_space: gym.Space[Any] = spaces.Box(0.0, 1.0, (spec.observation_size,), np.float32)
        self.action_space: gym.Space[Any] = spaces.Discrete(spec.actions)
        self.raw_observation_space: gym.Space[Any] = self.observation_space
        self.raw_action_space: gym.Space[Any] = self.action_space
        self.groups = (self,)
        self.env_id, self.agent_id = np.repeat(np.arange(num_envs), 2), np.tile(np.arange(2), num_envs)
        self.mask_size = spec.actions
        self.max_episode_steps: int | None = spec.longest
        self._codec = ActionCodec(self.action_space)
        self._seed, self._steps = seed, 0
        self._reset_kernel, self._step_kernel = game_kernels.RESETS[spec.kernel], game_kernels.STEPS[spec.kernel]
        self._state = np.zeros((spec.state_size, num_envs), np.int64)
        self._rng = np.random.SeedSequence().generate_state(num_envs, np.uint64)
        self._out = self._allocate(game_kernels.GameOut)
        self._mask = self._out.mask if spec.masked else None
        self._all, self._never = np.ones(self.num_seats, bool), np.zeros(self.num_seats, bool)

    def _allocate(self, out: Any) -> Any:
        rows, games = self.num_seats, self.num_envs
        return out(
            obs=np.zeros((rows, self.spec.observation_size), np.float32),
            mask=np.ones((rows, self.spec.actions), bool),
            reward=np.zeros(rows, np.float32),
            discount=np.ones(rows, np.float32),
            **{name: np.zeros(rows, bool) for name in ("first", "last", "valid", "acts", "alive")},
            **{name: np.zeros(rows) for name in ("owed", "row_return")},
            row_length=np.zeros(rows, np.int64),
            row_returns=np.zeros(rows, np.float32),
            row_lengths=np.zeros(rows, np.int64),
            earned=np.zeros((games, 2)),
            decisions=np.zeros(games, np.int64),
            ended=np.zeros(games, np.int64),
            returns=np.zeros((games, 2)),
            lengths=np.zeros(games, np.int64),
            meta=np.zeros(3, np.int64),
        )

    def reset(self, seed: int | None = None) -> MultiAgentStep:
        """See MultiAgentEnv. Without a seed, each game continues with its own random numbers."""
        seed, self._seed = (self._seed if seed is None else seed), None
        if seed is not None:
            self._rng[:] = np.random.SeedSequence(int(seed)).generate_state(self.num_envs, np.uint64)
        self._steps, out = 0, self._out
        self._reset_kernel(self._state, self._rng, self.spec.params, out)
        step = Step(out.obs, out.reward, out.discount, out.first, out.last, self._never, self._all, action_mask=self._mask,
                    acts=out.acts)
        return MultiAgentStep((step,), NO_ENVS, NO_GAME_RETURNS, NO_ENVS)

    def step(self, actions: Sequence[Tree]) -> MultiAgentStep:
        self._steps += 1
        out = self._out
        try:
            action = self._codec.batch(actions[0], self.num_seats)
        except BadValue as error:
            raise contract_error(self.name, "all environments", self._steps, str(error)) from error
        self._step_kernel(action, self._state, self._rng, self.spec.params, out)
        games, rows, illegal = out.meta.tolist()
        if illegal >= 0:
            raise contract_error(self.name, f"environment {illegal // 2}, agent {illegal % 2} (seat {illegal})", self._steps,
                                 f"was given the illegal action {action[illegal]}; choose one that action_mask allows")
        step = Step(out.obs, out.reward, out.discount, out.first, out.last, self._never, out.valid, NO_ROWS, None, self._mask, None,
                    NO_RETURNS, NO_LENGTHS, None, out.acts)
        if rows:
            step.episode_return, step.episode_length = out.row_returns[:rows], out.row_lengths[:rows]
        if not games:
            return MultiAgentStep((step,), NO_ENVS, NO_GAME_RETURNS, NO_ENVS)
        return MultiAgentStep((step,), out.ended[:games], out.returns[:games], out.lengths[:games])

    def close(self) -> None: ...
