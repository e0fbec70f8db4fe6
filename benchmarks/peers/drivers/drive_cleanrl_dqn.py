"""DQN as a single file in CleanRL's manner: gymnasium's SyncVectorEnv, NumPy arrays as replay buffer, plain PyTorch, one process.

CleanRL itself is a collection of scripts to copy, not a package; this one is ours. Ratio, batch and network are those of
drive_sb3_dqn.py, and so of shoal's preset dqn. It is timed once its updates have begun.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import same_env
import torch
from goal_evaluator import RecentReturns
from torch import nn
from torch.nn import functional

SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": {"envs": 4, "batch": 64, "lr": 1e-3, "buffer": 50_000, "begin": 1_000, "target_updates": 50,
                 "epsilon_steps": 10_000, "epsilon": 0.05},
    "pong": {"envs": 4, "batch": 32, "lr": 1e-4, "buffer": 10_000, "begin": 1_000, "target_updates": 250,
             "epsilon_steps": 100_000, "epsilon": 0.01},
}
GAMMA = 0.99
EVERY = 200  # env steps between two marks


class QNet(nn.Module):
    def __init__(self, shape: tuple[int, ...], actions: int) -> None:
        super().__init__()
        self.pixels = len(shape) == 3
        if self.pixels:
            self.net = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1),
                                     nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions))
        else:
            self.net = nn.Sequential(nn.Linear(shape[0], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, actions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q: torch.Tensor = self.net(x.float() / 255 if self.pixels else x)
        return q


class Buffer:
    """The newest transitions; the oldest ones are overwritten."""

    def __init__(self, size: int, space: gym.Space[Any]) -> None:
        assert space.shape is not None
        self.rows = [np.zeros((size, *shape), dtype) for shape, dtype in (
            (space.shape, space.dtype), ((), np.int64), ((), np.float32), (space.shape, space.dtype), ((), np.float32))]
        self.size, self.added = size, 0

    def add(self, *columns: np.ndarray) -> None:
        where = (self.added + np.arange(len(columns[0]))) % self.size
        for rows, column in zip(self.rows, columns, strict=True):
            rows[where] = column
        self.added += len(where)

    def draw(self, count: int, rng: np.random.Generator) -> list[torch.Tensor]:
        where = rng.integers(0, min(self.added, self.size), count)
        return [torch.from_numpy(rows[where]) for rows in self.rows]


def learn(net: QNet, target: QNet, optimiser: torch.optim.Optimizer, batch: list[torch.Tensor]) -> None:
    seen, action, reward, following, ended = batch
    with torch.no_grad():
        wanted = reward + GAMMA * (1 - ended) * target(following).amax(1)
    found = net(seen).gather(1, action[:, None])[:, 0]
    loss = functional.smooth_l1_loss(found, wanted)
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    optimiser.step()


def followers(now: np.ndarray, info: dict[str, Any]) -> np.ndarray:
    """What the actions led to: where an episode is over, `now` belongs to the next one."""
    found = now.copy()
    for row in np.flatnonzero(info.get("_final_obs", ())):
        found[row] = info["final_obs"][row]
    return found


def main(order: dict[str, Any]) -> None:
    scene, seed = order["scene"], order.get("seed", 0)
    settings = {**SETTINGS[scene], **order.get("settings", {})}
    torch.set_num_threads(order.get("threads", 1))
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    envs = gym.vector.SyncVectorEnv([lambda: same_env.make(scene)] * settings["envs"],
                                    autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    space, actions = envs.single_observation_space, envs.single_action_space
    assert space.shape is not None and isinstance(actions, gym.spaces.Discrete)
    net = QNet(space.shape, int(actions.n))
    target, optimiser = copy.deepcopy(net), torch.optim.Adam(net.parameters(), settings["lr"])
    buffer, returns = Buffer(settings["buffer"], space), RecentReturns(settings["envs"])
    now, _ = envs.reset(seed=seed)
    marks: list[tuple[float, int]] = []
    steps, updates, started, began_at = 0, 0, time.perf_counter(), time.time()
    while not marks or marks[-1][0] - marks[0][0] < order["seconds"]:
        epsilon = max(settings["epsilon"], 1 - steps / settings["epsilon_steps"])
        with torch.no_grad():
            action = net(torch.from_numpy(now)).argmax(1).numpy()
        action = np.where(rng.random(len(action)) < epsilon, rng.integers(0, actions.n, len(action)), action)
        before, (now, reward, terminated, truncated, info) = now, envs.step(action)
        buffer.add(before, action, reward, followers(now, info), terminated)
        returns.add(reward, terminated | truncated)
        steps += len(action)
        if steps <= settings["begin"]:
            continue
        learn(net, target, optimiser, buffer.draw(settings["batch"], rng))
        updates += 1
        if updates % settings["target_updates"] == 0:
            target.load_state_dict(net.state_dict())
        if not marks or steps >= marks[-1][1] + EVERY:
            marks.append((time.perf_counter() - started, steps))
    print(json.dumps({"version": f"in CleanRL's manner, gymnasium {gym.__version__}", "torch": torch.__version__,
                      "settings": settings, "marks": marks, "began_at": began_at,
                      "samples_per_insert": settings["batch"] / settings["envs"], "train_return": returns.mean}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
