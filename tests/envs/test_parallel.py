"""Several agents as seats: a ParallelEnv whose agents leave at different times."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from shoal import envs
from shoal.errors import ConfigError, EnvironmentError_

LEAVES = {"ann": (2, "terminated"), "bob": (3, "truncated"), "cid": (5, "terminated")}


class Party:
    """Observation (episode, t, agent); reward t; agents leave as LEAVES says. May keep showing the dead."""

    possible_agents = tuple(LEAVES)

    def __init__(self, ghosts=True):
        self.observation_spaces = dict.fromkeys(LEAVES, spaces.Box(-9, 99, (3,), np.float64))
        self.action_spaces = dict.fromkeys(LEAVES, spaces.Discrete(4, start=1))
        self.episode, self.ghosts, self.asked = -1, ghosts, []

    def _look(self, agents):
        return {a: np.array([self.episode, self.t, list(LEAVES).index(a)], float) for a in agents}

    def reset(self, seed=None, options=None):
        self.episode, self.t, self.agents = self.episode + 1, 0, list(LEAVES)
        return self._look(self.agents), {a: {} for a in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents), (actions, self.agents)
        assert all(a in (1, 2, 3, 4) for a in actions.values())
        self.t += 1
        before = list(self.agents)
        over = {k: {a: LEAVES[a] == (self.t, k) for a in before} for k in ("terminated", "truncated")}
        self.agents = [a for a in before if not (over["terminated"][a] or over["truncated"][a])]
        shown = LEAVES if self.ghosts else before
        rewards = {a: float(self.t) for a in before}
        return self._look(shown), rewards, over["terminated"], over["truncated"], {a: {} for a in before}

    def close(self):
        self.closed = True


@pytest.mark.parametrize("ghosts", [True, False])
def test_seats(ghosts):
    env = envs.make(lambda: Party(ghosts), 2)
    assert env.num_seats == 6 and env.seats_per_env == 3 and env.observation_space.dtype == np.float32
    assert env.env_id.tolist() == [0, 0, 0, 1, 1, 1] and env.agent_id.tolist() == [0, 1, 2, 0, 1, 2]
    assert env.action_space == spaces.Discrete(4)
    step = env.reset(seed=0)
    assert step.valid.all() and step.first.all()
    np.testing.assert_array_equal(step.observation[:, 2], [0, 1, 2, 0, 1, 2])
    for episode in range(3):
        for t in range(1, 6):
            step = env.step(np.arange(6) % 4)
            one = slice(0, 3)
            alive = np.array([t <= 2, t <= 3, True])
            np.testing.assert_array_equal(step.valid[one], alive)
            np.testing.assert_array_equal(step.reward[one], np.where(alive, t, 0))
            np.testing.assert_array_equal(step.last[one], [t == 2, t == 3, t == 5])
            np.testing.assert_array_equal(step.truncated[one], [False, t == 3, False])
            np.testing.assert_array_equal(step.discount[one], [float(t != 2), 1, float(t != 5)])
            np.testing.assert_array_equal(step.first[one], [t == 5] * 3)
            if t == 3:
                assert step.final_rows.tolist() == [1, 4]
                np.testing.assert_array_equal(step.final_observation, [[episode, 3, 1]] * 2)
            if t == 5:
                np.testing.assert_array_equal(step.observation[:3, :2], [[episode + 1, 0]] * 3)
            ends = {2: (3.0, 2), 3: (6.0, 3), 5: (15.0, 5)}.get(t)
            got = list(zip(step.episode_return, step.episode_length, strict=True))
            assert got == ([ends, ends] if ends else [])
    env.close()


def test_late_agent():
    class Late(Party):
        def reset(self, seed=None, options=None):
            super().reset()
            self.agents = ["ann"]
            return self._look(["ann"]), {}

        def step(self, actions):
            self.t += 1
            over = self.t == 3
            before, self.agents = self.agents, [] if over else ["ann", "bob"]
            everyone = ["ann", "bob"]
            ends = dict.fromkeys(before, over)
            return self._look(everyone), dict.fromkeys(before, 1.0), ends, dict.fromkeys(before, False), {}

    env = envs.make(Late, 1)
    env.reset(seed=0)
    step = env.step(np.zeros(3, int))
    assert step.valid.tolist() == [True, False, False] and step.first.tolist() == [False, True, False]
    step = env.step(np.zeros(3, int))
    assert step.valid.tolist() == [True, True, False] and not step.first.any()
    step = env.step(np.zeros(3, int))
    assert step.last.tolist() == [True, True, False] and step.first.all()
    assert step.episode_length.tolist() == [3, 2]


def test_describe_and_errors():
    spec = envs.describe(Party)
    assert spec.seats_per_env == 3 and spec.backend == "loop" and "3 agents" in spec.backend_reason

    class Nan(Party):
        def step(self, actions):
            answer = super().step(actions)
            answer[0]["bob"][1] = np.nan
            return answer

    env = envs.make(Nan, 2)
    env.reset(seed=0)
    with pytest.raises(
        EnvironmentError_, match=r"environment 0, agent 1 \(seat 1\), at step 1: observation\[1\] is nan"
    ):
        env.step(np.zeros(6, int))

    class Mixed(Party):
        def __init__(self):
            super().__init__()
            self.action_spaces["bob"] = spaces.Discrete(2)

    with pytest.raises(ConfigError, match="'ann' and 'bob' have different spaces"):
        envs.make(Mixed, 1)

    class Raises(Party):
        def step(self, actions):
            raise RuntimeError("no drinks")

    env = envs.make(Raises, 1)
    env.reset(seed=0)
    with pytest.raises(EnvironmentError_, match="RuntimeError: no drinks"):
        env.step(np.zeros(3, int))
