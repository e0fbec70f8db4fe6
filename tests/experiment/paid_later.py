"""An AEC game in which an agent is paid for its decision only after the other one has moved."""

from __future__ import annotations

import numpy as np
import pettingzoo
from gymnasium import spaces

MOVES = 6


class PaidLater(pettingzoo.AECEnv):
    """Each agent sees a bit and is paid 1 for repeating it, one move of the other later. Best return: 3 for both."""

    metadata = {"name": "paid_later"}  # noqa: RUF012  as PettingZoo declares it

    def __init__(self, other=False):
        """With `other` it is paid for the other bit."""
        self.possible_agents, self.rng, self.other = ["a", "b"], np.random.default_rng(), other

    def observation_space(self, agent):
        return spaces.Box(0, 1, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def observe(self, agent):
        return np.eye(2, dtype=np.float32)[self.bit[agent]]

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.move, self.due, self._skip_agent_selection = ["a", "b"], 0, None, None
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos, self.agent_selection = {agent: {} for agent in self.agents}, "a"
        self.bit = {agent: int(self.rng.integers(2)) for agent in self.agents}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        if self.due is not None:
            self.rewards[self.due[0]] += self.due[1]
        self.due, self.move = (agent, float(action == self.bit[agent] ^ self.other)), self.move + 1
        if self.move == MOVES:
            self.rewards[agent] += self.due[1]
            self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self.bit[agent] = int(self.rng.integers(2))
        self.agent_selection = "b" if agent == "a" else "a"
        self._deads_step_first()

    def close(self): ...
