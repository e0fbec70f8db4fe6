"""The reference loop: what a good engineer would write without shoal. Synchronous PPO, one process, one epoch, plain PyTorch.

CartPole is gymnasium's own vector version with an MLP of 64 x 64, Pong is ale_py's vector environment with the Nature CNN,
channels-last. It uses none of shoal's code, and runs in shoal's own environment. Without `threads` in its order it first tries one
thread and one per core, and goes on with the faster.

Both vector environments reset in the step after the end of an episode, so the row after an end is dead (masked out of the loss) and
holds the true last observation, from which truncated episodes are bootstrapped. With one epoch over whole columns the gradient's
own forward pass gives the values for GAE as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional

SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": {"envs": 2048, "horizon": 16, "minibatches": 4, "lr": 5e-3, "reward_scale": 0.05},
    "pong": {"envs": 64, "horizon": 16, "minibatches": 4, "lr": 5e-4, "reward_scale": 1.0},
}
"""The best of a grid: 512 to 2048 (Pong: 32, 64) environments, horizons of 16 and 32, 1 and 4 minibatches."""
LEAST_MARKS = 4  # a slow run goes on until a rate can be taken
TRIAL_SECONDS = 2.0  # for each number of threads


def make_env(scene: str, envs: int, threads: int) -> gym.vector.VectorEnv:
    if scene == "cartpole":
        return gym.make_vec("CartPole-v1", envs, vectorization_mode="vector_entry_point")
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", envs, num_threads=threads, repeat_action_probability=0.25)


class Net(nn.Module):
    def __init__(self, env: gym.vector.VectorEnv) -> None:
        super().__init__()
        shape, space = env.single_observation_space.shape, env.single_action_space
        assert shape is not None and isinstance(space, gym.spaces.Discrete)
        self.pixels = len(shape) == 3
        if self.pixels:
            self.torso = nn.Sequential(nn.Conv2d(shape[0], 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                                       nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU())
            nn.utils.convert_conv2d_weight_memory_format(self.torso, torch.channels_last)
        else:
            self.torso = nn.Sequential(nn.Linear(shape[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.heads = nn.Linear(512 if self.pixels else 64, int(space.n) + 1)  # policy and value in one product
        with torch.no_grad():
            self.heads.weight.mul_(0.1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.pixels:
            x = x.to(torch.float32, memory_format=torch.channels_last).mul_(1 / 255)
        out = self.heads(self.torso(x))
        return functional.log_softmax(out[:, :-1], -1), out[:, -1]


def gae(reward: torch.Tensor, value: torch.Tensor, ended: torch.Tensor, terminated: torch.Tensor,
        gamma: float = 0.99, lam: float = 0.95) -> torch.Tensor:
    """Advantages [T, B] from values [T + 1, B]."""
    delta = reward + gamma * value[1:] * (~terminated) - value[:-1]
    carry, advantage, out = gamma * lam * (~ended), torch.zeros_like(delta[0]), torch.empty_like(delta)
    for t in reversed(range(len(delta))):
        advantage = torch.addcmul(delta[t], carry[t], advantage)
        out[t] = advantage
    return out


def train(scene: str, seconds: float, settings: dict[str, Any], threads: int, seed: int = 0,
          until_return: float = float("inf")) -> dict[str, Any]:
    """Train for `seconds`, or until the mean of the last 100 returns is `until_return`."""
    B, T = settings["envs"], settings["horizon"]
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    env = make_env(scene, B, threads)
    net = Net(env)
    optimiser = torch.optim.Adam(net.parameters(), settings["lr"], eps=1e-5, fused=True)
    first, _ = env.reset(seed=seed)
    observation = torch.zeros(T + 1, *first.shape, dtype=torch.from_numpy(first).dtype)
    action, log_prob, reward = torch.zeros(T, B, dtype=torch.int64), torch.zeros(T, B), torch.zeros(T, B)
    terminated, ended, dead = (torch.zeros(T, B, dtype=torch.bool) for _ in range(3))
    views = [x.numpy() for x in (observation, reward, terminated, ended, dead)]
    observation_np, reward_np, terminated_np, ended_np, dead_np = views
    observation_np[0], was_end, running, returns = first, np.zeros(B, bool), np.zeros(B), deque[float](maxlen=100)
    marks, mean, started, began_at = [(0.0, 0)], None, time.perf_counter(), time.time()
    while (marks[-1][0] < seconds or len(marks) < LEAST_MARKS) and (mean or 0.0) < until_return:
        with torch.inference_mode():
            for t in range(T):
                log_p, _ = net(observation[t])
                chosen = (log_p.exp() / torch.empty_like(log_p).exponential_()).argmax(-1)
                action[t], log_prob[t] = chosen, log_p.gather(1, chosen[:, None])[:, 0]
                observation_np[t + 1], reward_np[t], terminated_np[t], truncated, _ = env.step(chosen.numpy())
                dead_np[t] = was_end
                ended_np[t] = was_end = terminated_np[t] | truncated
                running += reward_np[t]
                if was_end.any():
                    returns.extend(running[was_end])
                    running[was_end] = 0
        live = (~dead).float()
        reward.mul_(settings["reward_scale"])  # values near 1, or their loss drowns the policy's
        update(net, optimiser, (observation, action, log_prob, reward, terminated, ended, live), settings["minibatches"])
        observation[0] = observation[T]
        marks.append((time.perf_counter() - started, marks[-1][1] + int(live.sum())))
        mean = float(np.mean(returns)) if returns else None
    env.close()
    return {"marks": marks, "began_at": began_at, "train_return": mean}


def update(net: Net, optimiser: torch.optim.Optimizer, data: tuple[torch.Tensor, ...], parts: int) -> None:
    """One epoch over `parts` minibatches of whole columns."""
    for observation, action, log_prob, reward, terminated, ended, live in zip(
            *(x.chunk(parts, 1) for x in data), strict=True):
        T, B = action.shape
        log_p, value = net(observation.flatten(0, 1))
        value = value.view(T + 1, B)
        with torch.no_grad():
            advantage = gae(reward, value, ended, terminated)
            target = advantage + value[:-1]
            normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        log_p = log_p.view(T + 1, B, -1)[:-1]
        ratio = (log_p.gather(2, action[..., None])[..., 0] - log_prob).exp()
        policy = -torch.min(ratio * normal, ratio.clamp(0.8, 1.2) * normal)
        entropy = -(log_p.exp() * log_p).sum(-1)
        loss = ((policy + 0.5 * (value[:-1] - target).square() - 0.01 * entropy) * live).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimiser.step()


def faster_threads(scene: str, settings: dict[str, Any]) -> int:
    """One thread or one per core, whichever is faster here and now."""
    speeds = {}
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        (early, before), *_, (late, after) = train(scene, TRIAL_SECONDS, settings, threads)["marks"][1:]
        speeds[threads] = (after - before) / (late - early)
    return max(speeds, key=speeds.__getitem__)


def main(order: dict[str, Any]) -> None:
    settings = {**SETTINGS[order["scene"]], **order.get("settings", {})}
    threads = order.get("threads") or faster_threads(order["scene"], settings)
    report = train(order["scene"], order["seconds"], settings, threads, order.get("seed", 0))
    print(json.dumps({"version": f"gymnasium {gym.__version__}", "torch": torch.__version__, "settings": settings,
                      "threads": threads, "samples_per_insert": 1, **report}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
