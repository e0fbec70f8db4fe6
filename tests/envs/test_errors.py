"""A broken environment is named, with its index, step and value."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from shoal import envs
from shoal.errors import ConfigError, EnvironmentError_


class Broken(gym.Env):
    """Environment 1 does something wrong at step 3."""

    made = 0

    def __init__(self, fault):
        self.observation_space, self.action_space = spaces.Box(-9, 9, (2,)), spaces.Discrete(2)
        self.fault, self.t = fault, 0
        self.me, Broken.made = Broken.made, Broken.made + 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fault == "bare reset":
            return np.zeros(2, np.float32)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        answer = {"o": np.ones(2, np.float32), "r": 1.0, "d": False, "u": False, "i": {}}
        if self.me == 1 and self.t == 3:
            if self.fault == "raise":
                raise ZeroDivisionError("engine on fire")
            if self.fault == "four":
                return answer["o"], 1.0, False, {}
            answer.update(FAULTS[self.fault][0])
        return tuple(answer.values())


FAULTS = {
    "nan": ({"o": np.array([0, np.nan], np.float32)}, r"environment 1, at step 3: observation\[1\] is nan"),
    "inf": ({"o": np.array([np.inf, 0], np.float32)}, r"environment 1, at step 3: observation\[0\] is inf"),
    "nan at the end": ({"o": np.full(2, np.nan, np.float32), "u": True}, r"environment 1, at step 3: last .* is nan"),
    "reward": ({"r": float("-inf")}, "environment 1, at step 3: reward is -inf"),
    "reward type": ({"r": "much"}, "environment 1, at step 3: reward is 'much'"),
    "shape": ({"o": np.ones(3, np.float32)}, r"environment 1, at step 3: observation has shape \(3,\)"),
    "scalar": ({"o": np.float32(1)}, r"environment 1, at step 3: observation has shape \(\)"),
    "dtype": ({"o": np.array([1j, 0])}, "environment 1, at step 3: observation has dtype complex128"),
    "text": ({"o": np.array(["a", "b"])}, "environment 1, at step 3: observation has dtype <U1"),
    "object": ({"o": np.array([None, 1.0])}, "environment 1, at step 3: observation has dtype object"),
    "overflow": ({"o": np.array([1e300, 0])}, r"environment 1, at step 3: observation\[0\] is inf"),
    "flag": ({"d": 1}, "environment 1, at step 3: terminated is 1 .int., not a bool"),
    "raise": ({}, "environment 1, at step 3: raised ZeroDivisionError: engine on fire"),
    "four": ({}, "environment 1, at step 3: step.. must return"),
}


def trial(fault, **kwargs):
    Broken.made = 0
    env = envs.make(lambda: Broken(fault), 2, **kwargs)
    env.reset(seed=0)
    for _ in range(4):
        step = env.step(np.zeros(2, int))
    return step


@pytest.mark.parametrize("fault", FAULTS)
def test_loop_names_fault(fault):
    with pytest.raises(EnvironmentError_, match=FAULTS[fault][1]) as caught:
        trial(fault)
    assert "<lambda>" in str(caught.value)


def test_reset_without_info():
    with pytest.raises(EnvironmentError_, match=r"environment 0, at reset: reset.. must return"):
        trial("bare reset")


def test_check_off():
    assert trial("nan", check=False).valid.all()


def test_huge_values():
    huge = np.full(2, 3e38, np.float32)
    FAULTS["huge"] = ({"o": huge}, "")
    assert trial("huge").valid.all()
    del FAULTS["huge"]


class Dials(gym.Env):
    """Observations whose dtype need not be that of their space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, given):
        self.observation_space, self.given = space, given

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.given, 0.0, False, False, {}


FLOATS, BYTES = spaces.Box(-9, 9, (2,), np.float32), spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize(("space", "given"), [
    (FLOATS, np.array([1 / 3, 2.0])), (FLOATS, np.array([1, 2])), (FLOATS, [True, False]), (FLOATS, np.ones(2, np.float16)),
    (BYTES, np.array([0, 255])), (BYTES, np.array([True, False])), (spaces.Discrete(3), np.uint8(2)),
    (spaces.MultiBinary(2), np.array([0, 1]))])
@pytest.mark.parametrize("backend", ["loop", "vector"])
def test_casts(space, given, backend):
    """Rounded to a shorter float, or with the same value."""
    env = one_of(space, given, backend)
    env.reset(seed=0)
    seen = env.step(np.zeros(1, int)).observation
    assert seen.dtype == env.observation_space.dtype
    np.testing.assert_allclose(seen[0], np.asarray(given, float), rtol=1e-6)


@pytest.mark.parametrize(("space", "given", "words"), [
    (FLOATS, np.array([1j, 0]), "dtype complex128, its space says float32"),
    (FLOATS, np.array([1, 2], object), "dtype object, its space says float32"),
    (FLOATS, np.array(["1", "2"]), "dtype <U1, its space says float32"),
    (BYTES, np.array([0.5, 1.0]), "dtype float64, its space says uint8"),
    (BYTES, np.array([0, 256]), "dtype int64, its space says uint8, which cannot hold 256"),
    (BYTES, np.array([-1, 0], np.int8), "dtype int8, its space says uint8, which cannot hold -1"),
    (spaces.Discrete(3), 1.0, "dtype float64, its space says int64")])
def test_lossy_casts_refused(space, given, words):
    env = one_of(space, given, "loop")
    env.reset(seed=0)
    with pytest.raises(EnvironmentError_, match=f"environment 0, at step 1: observation has {words}"):
        env.step(np.zeros(1, int))


def one_of(space, given, backend):
    """One environment, stepped by the loop or as a vector environment that passes on what it is given."""
    if backend == "loop":
        return envs.make(lambda: Dials(space, given), 1)

    class Bare(SyncVectorEnv):
        def step(self, actions):
            answer = super().step(actions)
            return (np.asarray(given)[None], *answer[1:])

    return envs.make(lambda: Bare([lambda: Dials(space, space.sample())], autoreset_mode=AutoresetMode.SAME_STEP), 1)


@pytest.mark.parametrize("fault", ["nan", "reward", "raise"])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_names_fault(fault, mode):
    Broken.made = 0
    env = envs.make(lambda: SyncVectorEnv([lambda: Broken(fault)] * 2, autoreset_mode=mode), 2)
    env.reset(seed=0)
    with pytest.raises(EnvironmentError_, match=r"at step 3: .*(\[1\] is nan|reward is -inf|engine on fire)"):
        for _ in range(4):
            env.step(np.zeros(2, int))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: envs.make("CartPole-v9", 1), "unknown environment 'CartPole-v9'"),
        (lambda: envs.make("Cartpole-v1", 1), "CartPole-v1"),
        (lambda: envs.make("Catch-v0", 1), "shoal/Catch-v0"),
        (lambda: envs.make("shoal/Catch-v0", 1, colour=1), "unexpected keyword argument 'colour'"),
        (lambda: envs.make("shoal/TMaze-v0", 1, length=0), "length=0"),
        (lambda: envs.make("CartPole-v1", 0), "num_envs=0"),
        (lambda: envs.make("CartPole-v1", 1, backend="gpu"), "backend='gpu': use one of"),
        (lambda: envs.make("Pendulum-v1", 1, backend="vector"), "no vectorised version"),
        (lambda: envs.make("Pendulum-v1", 1, backend="compiled"), "no compiled version"),
        (lambda: envs.make("Pendulum-v1", 1, backend="ale"), "begin with ALE/"),
        (lambda: envs.make("Pendulum-v1", 1, wind=3), "unexpected keyword argument 'wind'"),
        (lambda: envs.make("CartPole-v1", 1, backend="envpool"), r"pip install 'shoal\[envpool\]'"),
        (lambda: envs.make(3, 1), "must be an id"),
        (lambda: envs.make(dict, 1), "returned a dict"),
        (lambda: envs.make(lambda: SyncVectorEnv([lambda: gym.make("Pendulum-v1")]), 2), "always has 1 environments"),
        (lambda: envs.describe(lambda: gym.make_vec("CartPole-v1", 4)), "always has 4 .*let it take num_envs"),
        (lambda: envs.describe(lambda: gym.make_vec("CartPole-v1", 1)), "always has 1 .*let it take num_envs"),
        (lambda: envs.make(lambda num_envs: gym.make_vec("CartPole-v1", 3), 2), "3 environments when asked for num_envs=2"),
        (lambda: envs.make("pettingzoo:no_such.game", 1), r"pip install 'shoal\[pettingzoo\]'"),
        (lambda: envs.make("pettingzoo:json", 1), r"neither parallel_env\(\) nor env\(\)"),
        (lambda: envs.make("shoal/Kuhn-v0", 1, cards=4), "unexpected keyword argument 'cards'"),
        (lambda: envs.make("shoal/ConnectFour-v0", 1, rows=2, columns=3), "length=4: a line"),
        (lambda: envs.make("shoal/Kuhn-v0", 1, backend="loop"), "'compiled' only"),
    ],
)
def test_wrong_requests(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
