"""Matches against opponents that do not learn."""

from __future__ import annotations

import numpy as np
import pytest

from shoal import envs
from shoal.envs.builtin.game_trees import tree_of
from shoal.envs.exploitability import exploitability, perfect_moves
from shoal.envs.opponent_env import OpponentEnv, built_in_opponent, random_opponent
from shoal.envs.random_policy import RandomPolicy
from shoal.envs.rollout import Rollout
from shoal.errors import ConfigError
from tests.envs.env_toys import uniform


def returns(env, act, episodes, seed=0):
    found = [[], []]
    for played in Rollout(env, env.reset(seed), act, episodes):
        for row, value in zip(played.finished, played.returns, strict=True):
            found[row % 2].append(value)
    return found


def home_random(env, seed=5):
    choose = RandomPolicy(env.action_space, np.random.default_rng(seed))
    return lambda step, previous: choose(step)


def test_random_against_random():
    env = OpponentEnv(envs.make("shoal/TicTacToe-v0", 200), random_opponent)
    assert env.num_seats == 200 and env.agent_id.tolist() == [0, 1] * 100
    first, second = returns(env, home_random(env), 4000)
    value = exploitability(tree_of("shoal/TicTacToe-v0"), uniform).values[0]
    assert len(first) == len(second) == 2000
    assert abs(np.mean(first) - value) < 0.08 and abs(np.mean(second) + value) < 0.08


def test_perfect():
    """A perfect player never loses, on either side, and draws against itself."""
    make = built_in_opponent("perfect", "shoal/TicTacToe-v0", {})
    env = OpponentEnv(envs.make("shoal/TicTacToe-v0", 50), make)
    for side in returns(env, home_random(env), 600):
        assert max(side) <= 0 and min(side) == -1
    moves, rng = perfect_moves(tree_of("shoal/TicTacToe-v0")), np.random.default_rng(0)

    def perfect(step, previous):
        rows = zip(step.observation, step.acts, strict=True)
        return np.array([rng.choice(moves[row.tobytes()]) if acts else 0 for row, acts in rows])

    assert not np.concatenate(returns(env, perfect, 200)).any()
    env = OpponentEnv(envs.make("shoal/TicTacToe-v0", 50), random_opponent)
    assert np.concatenate(returns(env, perfect, 200)).min() == 0


def test_same_seed_same_matches():
    env = OpponentEnv(envs.make("shoal/Kuhn-v0", 20), random_opponent)
    assert returns(env, home_random(env), 200, seed=3) == returns(env, home_random(env), 200, seed=3)
    assert returns(env, home_random(env), 200, seed=3) != returns(env, home_random(env), 200, seed=4)


def test_parallel_environment():
    """Agents that act at once and are truncated: pettingzoo's, where home sees its own last observation."""
    pytest.importorskip("mpe2")
    env = OpponentEnv(envs.make("pettingzoo:mpe2.simple_spread_v3", 3, max_cycles=5), random_opponent)
    step = env.reset(seed=0)
    for t in range(1, 11):
        step = env.step(np.zeros(3, int))
        assert step.valid.all() and step.acts.all()
        if t % 5 == 0:
            assert step.truncated.all() and step.final_rows.tolist() == [0, 1, 2] and len(step.episode_return) == 3
            assert step.final_observation.shape == step.observation.shape
    env.close()


def test_refused():
    with pytest.raises(ConfigError, match="has one agent"):
        OpponentEnv(envs.make("CartPole-v1", 2), random_opponent)
    with pytest.raises(ConfigError, match="no perfect player of shoal/Kuhn-v0"):
        built_in_opponent("perfect", "shoal/Kuhn-v0", {})
    with pytest.raises(ConfigError, match="use one of random, perfect"):
        built_in_opponent("weak", "shoal/Kuhn-v0", {})
