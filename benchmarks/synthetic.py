"""Work for learners and inference servers without an environment: random frames, as large as Atari's.

The programs that measure how fast a learner or a server could be share it: learner_limit, q_learner_limit, gpu_switches, gpu_pong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from shoal import algorithms
from shoal.acting import StepView
from shoal.algorithms import vtrace
from shoal.device.batched_inference import BatchedInference
from shoal.device.placement import Hardware
from shoal.envs import EnvSpec
from shoal.nets import NetConfig

__all__ = ["ACTIONS", "FRAMES", "Requests", "algorithm_of", "fill", "spec_of", "waiting_for"]

ACTIONS = 6
FRAMES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)


def waiting_for(hardware: Hardware) -> Callable[[], object]:
    """Returns when the device has done everything that was begun; at once on a CPU."""
    return torch.cuda.synchronize if hardware.on_gpu else lambda: None


def spec_of(frames: gym.spaces.Box = FRAMES) -> EnvSpec:
    """The description of an environment that does not exist."""
    return EnvSpec("frames", frames, gym.spaces.Discrete(ACTIONS), 27_000, 4, 1, False, "none", "", ACTIONS)


def algorithm_of(torso: str, unroll: int, seats: int, frames: gym.spaces.Box = FRAMES) -> Any:
    """V-trace over frames."""
    return algorithms.make(vtrace.Config(unroll=unroll), spec_of(frames), NetConfig(torso=torso), seats)


def fill(data: Any, rng: np.random.Generator, seen: set[int]) -> None:
    """Random frames, actions and rewards; once for each piece of memory."""
    data["weights_version"].fill(1 << 30)
    if (key := data["observation"].ctypes.data) in seen:
        return
    seen.add(key)
    data["observation"][...] = rng.integers(256, size=data["observation"].shape, dtype=np.uint8)
    data["action"][...] = rng.integers(ACTIONS, size=data["action"].shape)
    data["reward"][...] = rng.normal(size=data["reward"].shape)
    data["discount"].fill(1)
    data["valid"].fill(True)
    data["extras"]["log_prob"].fill(-np.log(ACTIONS))
    data["final_index"].fill(-1)


class Requests:
    """An inference server's forward passes, with the copies to the GPU and back: the same rows again and again."""

    def __init__(self, algorithm: Any, hardware: Hardware, rows: int) -> None:
        self.policy, self.unit = algorithm.policy(), rows
        if hardware.on_gpu:
            self.policy.to(hardware)
        self.inference = BatchedInference(self.policy, hardware, torch.Generator(hardware.device).manual_seed(0))
        frames = np.random.default_rng(0).integers(256, size=(rows, *algorithm.record.observation_space.shape), dtype=np.uint8)
        self._view, self._still = StepView(frames, np.zeros(rows, bool)), np.zeros(rows, np.float32)

    def once(self) -> int:
        """One pass; returns its rows."""
        self.inference.act([self._view], [{}], self._still)
        return self.unit
