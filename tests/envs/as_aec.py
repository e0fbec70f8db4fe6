"""A MultiAgentEnv of one environment as PettingZoo's AECEnv, so that PettingZoo's own tests can be run on it."""

from __future__ import annotations

import numpy as np
import pettingzoo
from gymnasium import spaces


class AsAEC(pettingzoo.AECEnv):
    """`make()` gives the MultiAgentEnv. Agents that act at once are asked one after the other."""

    def __init__(self, make, name):
        self._env, self.metadata, self.render_mode = make(), {"name": name, "render_modes": [], "is_parallelizable": False}, None
        self.possible_agents = list(self._env.agents)
        self._seats = {agent: (k, i) for k, group in enumerate(self._env.groups) for i, agent in enumerate(group.agents)}
        self._spaces = {}
        for agent, (k, _) in self._seats.items():
            group = self._env.groups[k]
            seen, masked = group.observation_space, self._env.reset(seed=0).groups[k].action_mask is not None
            if masked:
                seen = spaces.Dict({"observation": seen, "action_mask": spaces.MultiBinary(group.mask_size)})
            self._spaces[agent] = seen, spaces.Discrete(int(group.action_space.n))

    def observation_space(self, agent):
        return self._spaces[agent][0]

    def action_space(self, agent):
        return self._spaces[agent][1]

    def observe(self, agent):
        return self._seen[agent]

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        for name, value in (("rewards", 0.0), ("_cumulative_rewards", 0.0), ("terminations", False), ("truncations", False)):
            setattr(self, name, dict.fromkeys(self.agents, value))
        self.infos = {agent: {} for agent in self.agents}
        self._skip_agent_selection, self._seen = None, {}
        self._look(self._env.reset(seed=seed))
        self.agent_selection = self._asked[0]

    def _look(self, now, over=False):
        for agent, (k, row) in self._seats.items():
            step = now.groups[k]
            if agent in self._seen and (over or not step.acts[row]):
                continue  # a game that is over is seen as it last was
            seen = np.array(step.observation[row])
            if step.action_mask is not None:
                seen = {"observation": seen, "action_mask": step.action_mask[row].astype(np.int8)}
            self._seen[agent] = seen
        self._asked = [agent for agent, (k, row) in self._seats.items() if now.groups[k].acts[row]]
        self._chosen = {}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self._chosen[agent] = action
        waiting = [a for a in self._asked if a not in self._chosen]
        if waiting:
            self.agent_selection = waiting[0]
            return
        actions = [np.zeros((group.num_seats, *group.action_space.shape), np.int64) for group in self._env.groups]
        for who, (k, row) in self._seats.items():
            if who in self._chosen:
                actions[k][row] = self._chosen[who]
        now = self._env.step(actions)
        for who, (k, row) in self._seats.items():
            step = now.groups[k]
            self.rewards[who] = float(step.reward[row])
            if len(now.ended):
                self.truncations[who] = bool(step.truncated[row])
                self.terminations[who] = not self.truncations[who]
        self._look(now, over=bool(len(now.ended)))
        self._accumulate_rewards()
        self.agent_selection = agent if len(now.ended) else self._asked[0]
        self._deads_step_first()

    def close(self):
        self._env.close()
