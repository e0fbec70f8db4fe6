"""RLlib's PPO, IMPALA, APPO and DQN on its new API stack, timed; DQN once its updates have begun, at the ratio, batch and network
of drive_sb3_dqn.py."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # as in shoal's own clusters

import gymnasium as gym
import ray
import same_env
import torch
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

NETS = {
    "cartpole": {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": True},
    "pong": {"conv_filters": [[32, 8, 4], [64, 4, 2], [64, 3, 1]], "conv_activation": "relu", "head_fcnet_hiddens": [512],
             "vf_share_layers": True},
}
CONFIGS = {"ppo": PPOConfig, "impala": IMPALAConfig, "appo": APPOConfig, "dqn": DQNConfig}
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "cartpole"): {"runners": 2, "envs": 64, "batch": 8192, "minibatch": 4096, "fragment": "auto", "threads": 1},
    ("impala", "cartpole"): {"runners": 2, "envs": 64, "batch": 2048, "fragment": 32, "threads": 1, "broadcast": 1, "in_flight": 1,
                             "learners": 0, "vector": True},
    ("appo", "cartpole"): {"runners": 2, "envs": 64, "batch": 2048, "fragment": 32, "threads": 1, "broadcast": 1, "in_flight": 1,
                           "learners": 0, "vector": True, "passes": 1},
    ("ppo", "pong"): {"runners": 2, "envs": 16, "batch": 512, "minibatch": 256, "fragment": "auto", "threads": 2},
    ("impala", "pong"): {"runners": 2, "envs": 16, "batch": 512, "fragment": 32, "threads": 1, "broadcast": 1, "in_flight": 1,
                         "learners": 0, "vector": False},
    ("appo", "pong"): {"runners": 2, "envs": 16, "batch": 512, "fragment": 32, "threads": 1, "broadcast": 1, "in_flight": 1,
                       "learners": 0, "vector": False, "passes": 1},
    ("dqn", "cartpole"): {"runners": 0, "envs": 4, "batch": 64, "fragment": 1, "threads": 1, "intensity": 16, "begin": 1_000,
                          "buffer": 50_000, "target": 200, "lr": 1e-3},
    ("dqn", "pong"): {"runners": 0, "envs": 4, "batch": 32, "fragment": 1, "threads": 1, "intensity": 8, "begin": 1_000,
                      "buffer": 10_000, "target": 1_000, "lr": 1e-4},
}
"""`threads` are the learner's, in this process; one in a process of its own (`learners`: 1) has a single thread. `vector` is
gymnasium's own vectorised CartPole in the place of single environments. `passes` is how often APPO learns from a batch, at
most: RLlib's default of 2 would only cost speed. `intensity` is how many items DQN learns from for each env step.
benchmarks/peer_settings.py tries others."""

PATIENCE = 90.0  # seconds beyond the run's own: the first steps may be late, a batch may take long
LEAST_MARKS = 4


def environment(scene: str, config: dict[str, Any]) -> object:
    """One environment, or (RLlib says how many) a vectorised one."""
    if "num_envs" in config:
        return gym.make_vec("CartPole-v1", num_envs=config["num_envs"], vectorization_mode="vector_entry_point")
    return same_env.make(scene, "HWC float32")


def config_of(order: dict[str, Any], settings: dict[str, Any]) -> Any:
    own = order["algorithm"]
    config = CONFIGS[own]().environment("same").framework("torch")
    config = config.env_runners(num_env_runners=settings["runners"], num_envs_per_env_runner=settings["envs"],
                                rollout_fragment_length=settings["fragment"])
    config = config.learners(num_learners=settings.get("learners", 0))
    config = config.rl_module(model_config=DefaultModelConfig(**NETS[order["scene"]]))
    training = {"train_batch_size_per_learner": settings["batch"], "lr": settings.get("lr", 5e-4), "grad_clip": 0.5}
    if own == "ppo":
        training |= {"num_epochs": order.get("epochs", 1), "minibatch_size": settings["minibatch"]}
    elif own == "dqn":
        training |= {"grad_clip": 10.0, "training_intensity": settings["intensity"], "n_step": 1, "double_q": False,
                     "dueling": False, "target_network_update_freq": settings["target"], "epsilon": [(0, 1.0), (10_000, 0.05)],
                     "num_steps_sampled_before_learning_starts": settings["begin"],
                     "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": settings["buffer"]}}
    else:
        training["broadcast_interval"] = settings["broadcast"]
        config = config.env_runners(max_requests_in_flight_per_env_runner=settings["in_flight"])
    if own == "appo":
        training["circular_buffer_iterations_per_batch"] = settings["passes"]
    if settings.get("vector"):
        config = config.env_runners(gym_env_vectorize_mode="vector_entry_point")
    config = config.training(**training)
    return config.reporting(min_time_s_per_iteration=0).debugging(log_level="ERROR", seed=order.get("seed", 0))


def goes_on(marks: list[tuple[float, int]], seconds: float, elapsed: float) -> bool:
    """Go on until the time is over and a rate can be taken, but not for ever."""
    done = len(marks) >= LEAST_MARKS and marks[-1][0] >= seconds
    return not done and elapsed < seconds + PATIENCE


def main(order: dict[str, Any]) -> None:
    scene = order["scene"]
    settings = {**SETTINGS[order["algorithm"], scene], **order.get("settings", {})}
    torch.set_num_threads(settings["threads"])
    ray.init("local", num_cpus=max(4, settings["runners"] + 2), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    register_env("same", lambda config: environment(scene, config))
    algorithm = config_of(order, settings).build_algo()
    marks: list[tuple[float, int]] = []
    built, first, began_at = time.perf_counter(), None, None
    while goes_on(marks, order["seconds"], time.perf_counter() - built):
        result = algorithm.train()
        steps = int(result["env_runners"].get("num_env_steps_sampled_lifetime", 0))
        now = time.perf_counter()
        if first is None and steps > settings.get("begin", 0):
            first, began_at = now, time.time()
        if first is not None and (not marks or steps > marks[-1][1]):
            marks.append((now - first, steps))
    learned = result["learners"].get("__all_modules__", {}).get("num_env_steps_trained_lifetime")  # of those in the last mark
    played = result["env_runners"].get("episode_return_mean")
    algorithm.stop()
    ray.shutdown()
    print(json.dumps({"version": ray.__version__, "torch": torch.__version__, "settings": settings, "marks": marks,
                      "learned": None if learned is None else int(learned), "began_at": began_at,
                      "train_return": None if played is None else float(played)}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
