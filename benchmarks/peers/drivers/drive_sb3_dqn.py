"""Stable-Baselines3's DQN, timed once its updates have begun, at the ratio, batch and network of shoal's preset dqn; with "goal",
trained until its mean over 100 greedy episodes is that, by the rule of benchmarks.race, with the clock stopped meanwhile."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import same_env
import stable_baselines3
import torch
from goal_evaluator import GoalEvaluator, RecentReturns
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": {"n_envs": 4, "train_freq": 1, "gradient_steps": 1, "batch_size": 64, "learning_rate": 1e-3, "buffer_size": 50_000,
                 "learning_starts": 1_000, "target_update_interval": 200, "net_arch": [64, 64]},
    "pong": {"n_envs": 4, "train_freq": 1, "gradient_steps": 1, "batch_size": 32, "learning_rate": 1e-4, "buffer_size": 10_000,
             "learning_starts": 1_000, "target_update_interval": 1_000},
}
RACES: dict[str, dict[str, Any]] = {
    # RL Zoo's hyperparams/dqn.yml for CartPole-v1, at its commit 22e3ff2 of 2026-04-23.
    "rl-zoo": {"n_envs": 1, "train_freq": 256, "gradient_steps": 128, "batch_size": 64, "learning_rate": 2.3e-3,
               "buffer_size": 100_000, "learning_starts": 1_000, "target_update_interval": 10, "net_arch": [256, 256],
               "exploration_fraction": 0.16, "exploration_final_eps": 0.04, "total_timesteps": 50_000},
}
EVERY = 200  # env steps between two marks


class StepMarks(BaseCallback):  # type: ignore[misc]  # SB3 is not installed where types are checked
    """Marks (seconds, env steps) once updates have begun; ends the training when the time is over or the return is reached."""

    def __init__(self, seconds: float, start: int, goal: float | None, seed: int) -> None:
        super().__init__()
        self.seconds, self.start, self.next = seconds, start, 0
        self.marks: list[tuple[float, int]] = []
        self.judge = None if goal is None else GoalEvaluator(goal, seed, self._act)

    def _act(self, observation: object) -> object:
        return self.model.predict(observation, deterministic=True)[0]

    def _on_training_start(self) -> None:
        self.returns = RecentReturns(self.training_env.num_envs)
        self.started, self.began_at = time.perf_counter(), time.time()

    def clock(self) -> float:
        return time.perf_counter() - self.started - (self.judge.stopped if self.judge else 0.0)

    def _on_step(self) -> bool:
        self.returns.add(self.locals["rewards"], self.locals["dones"])
        if self.num_timesteps <= self.start or self.num_timesteps < self.next:
            return True
        self.next = self.num_timesteps + EVERY
        self.marks.append((self.clock(), self.num_timesteps))
        over = self.marks[-1][0] - self.marks[0][0] >= self.seconds
        return not (over or (self.judge is not None and self.judge.passes(self.clock())))


def main(order: dict[str, Any]) -> None:
    scene, goal = order["scene"], order.get("goal")
    torch.set_num_threads(order.get("threads", 1))
    settings = dict(RACES[order["race"]] if goal is not None else SETTINGS[scene])
    settings.update(order.get("settings", {}))
    shown = dict(settings)
    envs = DummyVecEnv([lambda: same_env.make(scene)] * settings.pop("n_envs"))
    steps, nets = settings.pop("total_timesteps", 10**9), settings.pop("net_arch", None)
    model = DQN("MlpPolicy" if scene == "cartpole" else "CnnPolicy", envs, device="cpu", seed=order.get("seed", 0),
                policy_kwargs={} if nets is None else {"net_arch": nets}, **settings)
    recorder = StepMarks(order["seconds"], settings["learning_starts"], goal, order.get("seed", 0))
    model.learn(total_timesteps=steps, callback=recorder)
    drawn = shown["batch_size"] * shown["gradient_steps"] / (shown["train_freq"] * shown["n_envs"])
    report = {"version": stable_baselines3.__version__, "torch": torch.__version__, "settings": shown,
              "threads": torch.get_num_threads(), "marks": recorder.marks, "began_at": recorder.began_at,
              "samples_per_insert": drawn, "train_return": recorder.returns.mean}
    if recorder.judge is not None:
        report["seconds"], report["eval_return"] = recorder.judge.reached
    print(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
