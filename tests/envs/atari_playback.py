"""Plays a fixed sequence of actions through one back-end and tells what came: run by test_atari.py, also in envpool's own venv.

    python -m tests.envs.atari_playback '{"backend": "ale", "game": "ALE/Pong-v5", "seed": 3, "steps": 200, "options": {}}'
"""

from __future__ import annotations

import json
import sys
import zlib

import numpy as np

from shoal import envs


def play(order: dict) -> list[list]:
    """[crc of the observation, reward, discount, last, truncated, episode return] of every valid decision, after the first
    observation's crc. The observation of a terminated step is the next game's first in one back-end and a step late in the
    other, so a game's first observation stands alone: ["first", crc]."""
    env = envs.make(order["game"], 1, backend=order["backend"], **order["options"])
    step = env.reset(seed=order["seed"])
    actions = np.random.default_rng(order["seed"]).integers(env.action_space.n, size=order["steps"])
    told: list[list] = [["first", zlib.crc32(np.ascontiguousarray(step.observation[0]).tobytes())]]
    turn = 0
    while turn < len(actions):
        step = env.step(actions[turn : turn + 1])
        crc = zlib.crc32(np.ascontiguousarray(step.observation[0]).tobytes())
        if step.valid[0]:
            turn += 1
            row = [float(step.reward[0]), float(step.discount[0]), bool(step.last[0]), bool(step.truncated[0]),
                   *(float(one) for one in step.episode_return)]
            told.append(row if step.last[0] else [crc, *row])
        if step.first[0]:
            told.append(["first", crc])
    env.close()
    return told


if __name__ == "__main__":
    print(json.dumps([play(order) for order in json.loads(sys.argv[1])]))
