"""The doctor finds what is wrong, says so in words, and never raises."""

from __future__ import annotations

import re
import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from shoal import envs
from tests.envs.env_toys import Counting


class Patient(Counting):
    """A healthy environment to be made ill."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(-1, 1e6, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.episode = -1
        return super().reset(seed=seed)

    def _look(self):
        return np.array([self.t, self.np_random.random()], np.float32)


def found(env, level):
    return {one.check: one for one in envs.diagnose(env, steps=60) if one.level == level}


@pytest.mark.parametrize("env", [Patient, "Pendulum-v1", "shoal/Catch-v0", "shoal/PointGrasp-v0"])
def test_healthy(env):
    findings = envs.diagnose(env, steps=250)
    assert {one.level for one in findings} == {"ok"}, findings
    checks = {one.check for one in findings}
    assert checks >= {"spaces", "reset", "step", "episodes", "seeding", "bounds", "close", "back-end", "speed"}
    assert all(one.text.endswith(".") for one in findings)


def ill(**methods):
    return type("Ill", (Patient,), methods)


def step_giving(**changes):
    def step(self, action):
        answer = dict(zip(("o", "r", "d", "u", "i"), Patient.step(self, action), strict=True))
        answer.update(changes)
        return tuple(answer.values())

    return step


def raises(*_, **__):
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("env", "check", "words"),
    [
        ("Nope-v0", "construction", "unknown environment"),
        (raises, "construction", "RuntimeError: broken"),
        (lambda: 3, "batch", "returned a int"),
        (ill(reset=lambda self, **_: np.zeros(2)), "reset", "not \\(observation, info\\)"),
        (ill(reset=raises), "reset", "RuntimeError: broken"),
        (ill(step=raises), "step", "RuntimeError: broken"),
        (ill(step=lambda self, a: (0, 0, False, {})), "step", "returned 4 values"),
        (ill(step=step_giving(o=np.zeros(3, np.float32))), "observation", "shape \\(3,\\)"),
        (ill(step=step_giving(o=np.full(2, np.nan, np.float32))), "observation", "nan"),
        (ill(step=step_giving(r=float("inf"))), "reward", "reward is inf"),
        (ill(step=step_giving(r=np.zeros(2))), "reward", "not a number"),
        (ill(step=step_giving(d=0)), "terminated", "not a bool"),
        (ill(step=step_giving(i=None)), "info", "not a dict"),
        (ill(close=raises), "close", "RuntimeError: broken"),
        (ill(step=step_giving(i={"action_mask": np.zeros(9)})), "mask", "shape \\(9,\\)"),
        (ill(lock=threading.Lock()), "pickling", "cannot be sent"),
    ],
)
def test_errors_found(env, check, words):
    errors = found(env, "error")
    assert check in errors, errors
    assert re.search(words, errors[check].text), errors[check]
    assert errors[check].advice


def test_warnings():
    assert "seeding" in found(ill(_look=lambda self: np.array([0, np.random.random()], np.float32)), "warning")
    assert "episodes" in found(ill(step=step_giving(d=False, u=False)), "warning")
    assert "observation" in found(ill(_look=lambda self: np.float32([-5, 0])), "warning")
    assert "autoreset" in found(lambda: SyncVectorEnv([Patient] * 2), "warning")
    assert "num_envs" in found(lambda: SyncVectorEnv([Patient] * 2), "error")

    class Unbounded(Patient):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Box(-np.inf, np.inf, (1,))

    assert "spaces" in found(Unbounded, "warning")


def test_masks_agents_atari():
    assert "mask" in found(ill(step=step_giving(i={"action_mask": np.array([1, 0, 1], np.int8)})), "ok")
    from tests.envs.test_parallel import Party

    assert "speed" in found(Party, "ok")
    if "ALE/Pong-v5" in gym.registry:
        assert "speed" in found("ALE/Pong-v5", "ok")
