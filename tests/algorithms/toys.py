"""Small environments with every kind of space, and nets whose values one can read off the observation."""

import gymnasium as gym
import numpy as np
import torch

from shoal import envs
from shoal.nets import ActorCriticOutput


class Toy(gym.Env):
    """Noise to look at, random rewards, both kinds of endings."""

    def __init__(self, actions="discrete", observations="box", masked=False):
        self.action_space = {
            "discrete": gym.spaces.Discrete(4),
            "multi": gym.spaces.MultiDiscrete([3, 2, 4]),
            "box": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
        }[actions]
        box = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        image = gym.spaces.Box(0, 255, (1, 6, 6), np.uint8)
        large = gym.spaces.Box(0, 255, (1, 12, 12), np.uint8)
        both = gym.spaces.Dict({"image": image, "vector": box})
        self.observation_space = {"box": box, "image": large, "dict": both}[observations]
        self.masked = masked
        self.mask_size = 4 if actions == "discrete" else 9

    def observe(self):
        if self.observation_space.shape == (1, 12, 12):
            return self.np_random.integers(0, 255, (1, 12, 12), np.uint8)
        vector = self.np_random.normal(3.0, 5.0, 3).astype(np.float32)
        if isinstance(self.observation_space, gym.spaces.Box):
            return vector
        return {"image": self.np_random.integers(0, 255, (1, 6, 6), np.uint8), "vector": vector}

    def info(self):
        if not self.masked:
            return {}
        mask = self.np_random.random(self.mask_size) < 0.6
        mask[[0] if self.mask_size == 4 else [0, 3, 5]] = True
        return {"action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.observe(), self.info()

    def step(self, action):
        self.age += 1
        return (
            self.observe(),
            self.np_random.normal(1.0, 2.0),
            self.np_random.random() < 0.1,
            self.age >= 6,
            self.info(),
        )


def toy_spec(**kwargs):
    return envs.describe(lambda: Toy(**kwargs))


def toy_env(seats, **kwargs):
    return envs.make(lambda: Toy(**kwargs), seats)


class ReadOff:
    """A net whose value is the first number of the observation and whose policy is uniform over two actions."""

    recurrent = False

    def __init__(self, head):
        self.head = head

    def unroll(self, observation, first, state, *_, **__):
        return ActorCriticOutput(torch.zeros(*observation.shape[:2], 2, requires_grad=True), observation[..., 0], state)

    def final_values(self, observation, *_):
        return observation[:, 0]
