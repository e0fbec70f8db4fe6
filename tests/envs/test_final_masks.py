"""At a truncation the mask of the true last observation is offered, not that of the next episode."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from shoal import envs
from shoal.envs.opponent_env import OpponentEnv, random_opponent
from tests.envs.test_parallel import Party

LENGTH, ACTIONS = 3, 5


def mask_at(t):
    """Legal: actions above t. At t = LENGTH that is action 4 only."""
    return np.arange(ACTIONS) > t


class Masked(gym.Env):
    """Truncated after LENGTH steps; reports mask_at(t), in info (an array that it reuses) or in the observation."""

    action_space = spaces.Discrete(ACTIONS)

    def __init__(self, inside=False, final=None, every=1):
        self.inside, self.final, self.every, self.mask = inside, final, every, np.zeros(ACTIONS, np.int8)
        box = spaces.Box(-1, 9, (1,))
        self.observation_space = spaces.Dict({"observation": box, "action_mask": spaces.MultiBinary(ACTIONS)}) if inside else box

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._answer()

    def step(self, action):
        self.t += 1
        observation, info = self._answer()
        return observation, 0.0, False, self.t == LENGTH, info

    def _answer(self):
        self.mask[:] = mask_at(self.t) if self.final is None or self.t < LENGTH else self.final
        seen = np.array([self.t], np.float32)
        if self.inside:
            return {"observation": seen, "action_mask": self.mask.copy()}, {}
        return seen, {"action_mask": self.mask} if self.t % self.every == 0 else {}


def adapters(mode, **options):
    def maker():
        return Masked(**options)

    yield envs.make(maker, 2)
    yield envs.make(lambda: SyncVectorEnv([maker] * 2, autoreset_mode=mode), 2)


def truncations(env, steps=12):
    env.reset(seed=0)
    found = []
    for _ in range(steps):
        step = env.step(np.full(env.num_seats, ACTIONS - 1))
        if len(step.final_rows):
            found.append((step.final_rows.tolist(), step.final_action_mask.copy(), step.action_mask.copy()))
        else:
            assert step.final_action_mask is None
    return found


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("inside", [False, True])
def test_true_final_mask(mode, inside):
    for env in adapters(mode, inside=inside):
        found = truncations(env)
        assert len(found) >= 3
        for rows, final, following in found:
            assert rows == [0, 1]
            np.testing.assert_array_equal(final, [mask_at(LENGTH)] * 2)
            assert following.sum() > final.sum()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_no_legal_action_at_the_end(mode):
    """An environment may report that nothing is legal once it is over: then everything counts as legal."""
    for env in adapters(mode, final=np.zeros(ACTIONS)):
        assert all(final.all() for _, final, _ in truncations(env))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_no_mask_at_the_end(mode):
    """Masks at even steps only: the last step of an episode, 3, reports none, so everything is legal."""
    for env in adapters(mode, every=2):
        assert all(final.all() for _, final, _ in truncations(env))


def test_without_masks():
    env = envs.make("shoal/LureChain-v0", 2, max_episode_steps=2)
    env.reset(seed=0)
    for _ in range(4):
        assert env.step(np.ones(2, int)).final_action_mask is None


class MaskedParty(Party):
    """Legal: actions from t on, the last one always."""

    def step(self, actions):
        *rest, infos = super().step(actions)
        return *rest, {agent: {"action_mask": np.arange(4) >= min(self.t, 3)} for agent in infos}


@pytest.mark.parametrize("opponent", [False, True])
def test_agents(opponent):
    """The second agent of each game is truncated after three steps; against an opponent, the second game has it alone."""
    env = envs.make(MaskedParty, 2)
    env = OpponentEnv(env, random_opponent) if opponent else env
    env.reset(seed=0)
    for t in range(1, 6):
        step = env.step(np.full(env.num_seats, 3))
        if t == 3:
            assert step.final_rows.tolist() == ([1] if opponent else [1, 4])
            np.testing.assert_array_equal(step.final_action_mask, [[False, False, False, True]] * len(step.final_rows))
