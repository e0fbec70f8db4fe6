"""Stable-Baselines3's SAC, timed: one environment, one update per step, once its first updates are made."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import gymnasium
import stable_baselines3
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback

START = 300  # random steps; no update before


class StepMarks(BaseCallback):  # type: ignore[misc]  # SB3 is not installed where types are checked
    """Marks (seconds, env steps) from the first updates on; ends the training when the time is over."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.marks: list[tuple[float, int]] = []

    def _on_training_start(self) -> None:
        self.started, self.began_at = time.perf_counter(), time.time()

    def _on_step(self) -> bool:
        if self.num_timesteps > START + 20:
            self.marks.append((time.perf_counter() - self.started, self.num_timesteps))
        return not self.marks or self.marks[-1][0] - self.marks[0][0] < self.seconds


def main(order: dict[str, Any]) -> None:
    torch.set_num_threads(order["threads"])
    env = gymnasium.make(order["env"])
    model = SAC("MlpPolicy", env, learning_rate=order["lr"], buffer_size=1_000_000, learning_starts=START,
                batch_size=order["batch"], train_freq=1, gradient_steps=1, policy_kwargs={"net_arch": order["hidden"]},
                device="cpu", seed=order["seed"])
    clock = StepMarks(order["seconds"])
    model.learn(total_timesteps=10**9, callback=clock)
    print(json.dumps({"version": stable_baselines3.__version__, "torch": torch.__version__, "threads": torch.get_num_threads(),
                      "marks": [clock.marks[0], clock.marks[-1]], "began_at": clock.began_at}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
