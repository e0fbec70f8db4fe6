"""Values that see the state() of PettingZoo's environments, in training only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

import shoal
from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.algorithms import a2c
from shoal.envs.handling import Handling
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from tests.algorithms.loop import Actor, join, update

STATES = Handling(state=True)
QUIET = {"console": {"mode": "none"}, "tensorboard": False, "runtime": "inline", "net": {"state_value": True, "hidden": (8,)},
         "eval": {"every_env_steps": 10_000, "last_env_steps": 10, "episodes": 1}}


class Hidden:
    """Two agents see nothing but noise; the state is the number of steps so far. Truncated after `limit` steps."""

    metadata = {}  # noqa: RUF012
    possible_agents = ["a", "b"]  # noqa: RUF012
    state_space = spaces.Box(0, 100, (1,), np.float32)

    def __init__(self, limit=3):
        self.limit, self.steps = limit, 0

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def _seen(self):
        return {agent: np.full(2, k / 10, np.float32) for k, agent in enumerate(self.possible_agents)}

    def reset(self, seed=None, options=None):
        self.steps, self.agents = 0, list(self.possible_agents)
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.steps += 1
        over, agents = self.steps >= self.limit, self.agents
        self.agents = [] if over else agents
        return (self._seen(), dict.fromkeys(agents, 1.0), dict.fromkeys(agents, False), dict.fromkeys(agents, over),
                {agent: {} for agent in agents})

    def state(self):
        return np.array([self.steps], np.float32)

    def close(self):
        pass


def test_every_row_has_the_state():
    env = envs.make(Hidden, 2, handling=STATES)
    assert env.observation_space["state"].shape == (1,) and env.observation_space["seen"].shape == (2,)
    assert env.raw_observation_space.shape == (2,)
    seen = [env.reset(seed=0).observation["state"][:, 0].tolist()]
    for _ in range(3):
        step = env.step(np.zeros(4, np.int64))
        seen.append(step.observation["state"][:, 0].tolist())
    assert seen == [[0] * 4, [1] * 4, [2] * 4, [0] * 4]  # the next episode has begun
    assert step.final_observation["state"][:, 0].tolist() == [3] * 4 and step.final_observation["seen"].shape == (4, 2)


def test_turns():
    """Of an AEC environment: at each decision."""
    class Turns:
        metadata, possible_agents, state_space = {}, ["a", "b"], spaces.Box(0, 100, (1,), np.float32)

        def observation_space(self, agent):
            return spaces.Box(0, 1, (1,), np.float32)

        def action_space(self, agent):
            return spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.moves, self.agents, self.agent_selection = 0, ["a", "b"], "a"

        def step(self, action):
            self.moves += action is not None
            if self.moves == 5:
                self.agents = self.agents[1:] if action is None else self.agents
            self.agent_selection = (self.agents or ["a"])[0] if self.moves == 5 else "ab"[self.moves % 2]

        def last(self):
            return np.zeros(1, np.float32), 0.0, self.moves == 5, False, {}

        def state(self):
            return np.array([self.moves], np.float32)

        def agent_iter(self):
            raise NotImplementedError

        def close(self):
            pass

    env = envs.make_multi_agent(Turns, 1, handling=STATES)
    found = []
    step = env.reset(seed=0)
    for _ in range(6):
        row = int(np.flatnonzero(step.groups[0].acts)[0])
        found.append((row, step.groups[0].observation["state"][row, 0]))
        step = env.step([np.zeros(2, np.int64)])
    assert found == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4), (0, 0)]


def test_values_see_the_state_and_policies_do_not():
    spec = envs.describe(Hidden, handling=STATES)
    algorithm = algorithms.make(a2c.Config(unroll=4, lr=1e-2), spec, NetConfig(hidden=(8,), state_value=True), 4)
    actor, learn = Actor(algorithm, envs.make(Hidden, 2, handling=STATES), seed=3), algorithm.learn(1)
    actor.policy.load(learn.published(Progress()))
    batch = join(algorithm.record, [actor.unroll() for _ in range(2)])
    before = learn.model.unroll(learn.batch(batch))
    other = {"seen": batch["observation"]["seen"], "state": batch["observation"]["state"] + 1}
    after = learn.model.unroll(learn.batch({**batch, "observation": other}))
    assert (after.value != before.value).all() and torch.equal(after.params, before.params)
    ahead = learn.model.next_values(learn.batch(batch), before)
    cut = np.argwhere(batch["final_index"] >= 0)
    last = learn.model.net.final_values({"state": torch.full((1, 1), 3.0)}, {})
    assert len(cut) == 8  # bootstrapped with the state at the end
    assert all(float(ahead[t, b]) == pytest.approx(float(last[0]), abs=1e-5) for t, b in cut)
    assert float(ahead[0, 0]) != pytest.approx(float(last[0]), abs=1e-3)
    params = learn.state["params"].clone()
    update(learn, batch)
    assert (learn.state["params"] != params)[learn.model.span("value_torso")].any()


def test_training(tmp_path):
    """A shared policy and one for each agent; the policy that is handed back needs no state."""
    for policies in ("shared", "independent"):
        run = shoal.train("ppo", Hidden, policies=policies, run_dir=str(tmp_path / policies), max_env_steps=300, actors=1,
                          architecture={"envs_per_actor": 2}, algorithm={"unroll": 16, "normalise_observations": True}, **QUIET)
        assert next(iter(run.policies.values())).act(np.zeros(2, np.float32)) in (0, 1)
        assert run.evaluate(2).returns.mean() == pytest.approx(3)


def test_refused():
    for env, words in (("shoal/RockPaperScissors-v0", "needs an environment with state"), ("CartPole-v1", "has none: use")):
        with pytest.raises(ConfigError, match=words):
            shoal.train("ppo", env, **QUIET)
    with pytest.raises(ConfigError, match="declares no state_space"):
        envs.make(type("Blind", (Hidden,), {"state_space": None}), 1, handling=STATES)
    with pytest.raises(ConfigError, match="leave one of them out"):
        NetConfig(central_value=True, state_value=True).validate()
