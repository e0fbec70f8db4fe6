"""Scripted experts for small environments: sources of demonstrations.

    shoal data record scripted shoal/CueLure-v0 --episodes 20                           # the environment's registered expert
    shoal data record shoal.envs.experts:follow_cue shoal/CueLure-v0 --episodes 20      # the same by its name

Register the expert of an environment of your own with `EXPERTS["my/Env-v0"] = "my.module:expert"`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["EXPERTS", "balance", "explore_grasps", "follow_cue", "swing_up"]

EXPERTS = {
    "CartPole-v1": "shoal.envs.experts:balance",
    "Pendulum-v1": "shoal.envs.experts:swing_up",
    "shoal/CueLure-v0": "shoal.envs.experts:follow_cue",
    "shoal/PointGrasp-v0": "shoal.envs.experts:explore_grasps",
    "shoal/TMaze-v0": "shoal.envs.experts:follow_cue",
}
"""Environment -> module:function, called as expert(observation, ...); offline/recording.py says what else it may take."""
REACH, NEAR = 0.25, 0.35  # of PointGrasp's gripper: in one step, and where it is worth trying


def follow_cue(observation: np.ndarray, memory: dict[str, Any]) -> int:
    """T-maze and cue-lure corridor: walk to the junction, then take the door that the cue at the beginning named."""
    cue, junction, _ = observation
    if cue:
        memory["door"] = int(cue > 0)
    return int(memory["door"]) if junction else 1


def explore_grasps(observation: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """PointGrasp: a noisy explorer, as QT-Opt's data began. It moves towards the object, and tries to grasp more often near it."""
    gap = observation[2:4] - observation[:2]
    move = np.clip(gap / REACH, -1, 1) + rng.normal(0, 0.6, 2)
    closes = rng.random() < (0.35 if np.abs(gap).max() <= NEAR else 0.08)
    action: np.ndarray = np.clip([*move, rng.random() if closes else -rng.random()], -1, 1).astype(np.float32)
    return action


def balance(observation: np.ndarray) -> int:
    """CartPole: push to where the pole falls, and a little to where the cart is, so that it comes back to the middle."""
    place, speed, angle, turn = observation
    return int(0.1 * place + 0.3 * speed + 3.0 * angle + turn > 0)


def swing_up(observation: np.ndarray) -> np.ndarray:
    """Pendulum: give it the energy of standing upright; near the top hold it there."""
    cos, sin, turn = observation
    if cos > 0.9:
        torque = -10.0 * np.arctan2(sin, cos) - 2.0 * turn
    else:
        missing = 10.0 * (1.0 - cos) - turn**2 / 3.0
        torque = 2.0 * np.sign(turn or 1.0) * np.sign(missing)
    return np.array([np.clip(torque, -2.0, 2.0)], np.float32)
