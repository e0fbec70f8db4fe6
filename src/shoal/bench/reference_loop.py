"""What a good engineer would write without us: a synchronous PPO loop, one process, one epoch, none of shoal's code.

    python -m shoal.bench.reference_loop cartpole --seconds 10        gymnasium's own vector version, MLP 64 x 64
    python -m shoal.bench.reference_loop pong --seconds 20            ale_py's vector environment, Nature CNN channels-last
    python -m shoal.bench.reference_loop cartpole --search            tries the grid that DEFAULTS were chosen from

It is timed beside shoal in every benchmark. Both vector environments reset in the step after the end of an episode, so
the row after an end is dead (masked out of the loss) and holds the true last observation, from which truncated episodes
are bootstrapped. With one epoch over whole columns the gradient's own forward pass gives the values for GAE as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections import deque

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional

__all__ = ["main", "rate", "train"]

DEFAULTS = {
    "cartpole": {"envs": 2048, "horizon": 16, "minibatches": 4, "lr": 5e-3, "reward_scale": 0.05},
    "pong": {"envs": 64, "horizon": 16, "minibatches": 4, "lr": 5e-4, "reward_scale": 1.0},
}
GRIDS = {  # environments, horizon, minibatches
    "cartpole": ((512, 1024, 2048), (16, 32), (1, 4)),
    "pong": ((32, 64), (16, 32), (1, 4)),
}


def make_env(name: str, envs: int, threads: int) -> gym.vector.VectorEnv:
    if name == "cartpole":
        return gym.make_vec("CartPole-v1", envs, vectorization_mode="vector_entry_point")
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", envs, num_threads=threads, repeat_action_probability=0.25)


class Net(nn.Module):
    def __init__(self, env: gym.vector.VectorEnv) -> None:
        super().__init__()
        shape, actions = env.single_observation_space.shape, int(env.single_action_space.n)
        self.pixels = len(shape) == 3
        if self.pixels:
            self.torso = nn.Sequential(
                nn.Conv2d(shape[0], 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
            ).to(memory_format=torch.channels_last)
        else:
            self.torso = nn.Sequential(nn.Linear(shape[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.heads = nn.Linear(512 if self.pixels else 64, actions + 1)  # policy and value in one product
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


def train(name: str, seconds: float, threads: int = 0, seed: int = 0, until_return: float = float("inf"),
          **options: float) -> dict:
    settings = {**DEFAULTS[name], **{key: value for key, value in options.items() if value}}
    B, T, parts = int(settings["envs"]), int(settings["horizon"]), int(settings["minibatches"])
    torch.manual_seed(seed)
    if threads:
        torch.set_num_threads(threads)
    env = make_env(name, B, threads or torch.get_num_threads())
    net = Net(env)
    optimiser = torch.optim.Adam(net.parameters(), settings["lr"], eps=1e-5, fused=True)
    first, _ = env.reset(seed=seed)
    observation = torch.zeros(T + 1, *first.shape, dtype=torch.from_numpy(first).dtype)
    action, log_prob, reward = torch.zeros(T, B, dtype=torch.int64), torch.zeros(T, B), torch.zeros(T, B)
    terminated, ended, dead = (torch.zeros(T, B, dtype=torch.bool) for _ in range(3))
    views = [x.numpy() for x in (observation, reward, terminated, ended, dead)]
    observation_np, reward_np, terminated_np, ended_np, dead_np = views
    observation_np[0], was_end, running, returns = first, np.zeros(B, bool), np.zeros(B), deque(maxlen=100)
    steps, marks, started = 0, [], time.perf_counter()
    while time.perf_counter() - started < seconds and not (marks and (marks[-1][2] or 0.0) >= until_return):
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
        update(net, optimiser, (observation, action, log_prob, reward, terminated, ended, live), parts)
        observation[0] = observation[T]
        steps += int(live.sum())
        marks.append((time.perf_counter() - started, steps, float(np.mean(returns)) if returns else None))
    env.close()
    return {"settings": settings, "threads": torch.get_num_threads(), "marks": [m[:2] for m in marks],
            "returns": [m[2] for m in marks]}


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


def rate(result: dict) -> float:
    """Env steps/s over the second half of a run."""
    marks, half = result["marks"], len(result["marks"]) // 2
    return (marks[-1][1] - marks[half][1]) / (marks[-1][0] - marks[half][0]) if half < len(marks) - 1 else float("nan")


def search(name: str, seconds: float) -> None:
    """Time a grid of settings, best last."""
    envs, horizons, minibatches = GRIDS[name]
    cores = len(os.sched_getaffinity(0))
    found = []
    for threads, *cell in itertools.product(sorted({1, cores}), envs, horizons, minibatches):
        options = dict(zip(("envs", "horizon", "minibatches"), cell, strict=True))
        found.append((rate(train(name, seconds, threads, **options)), options, threads))
        print(f"  {found[-1][0]:12,.0f} env steps/s with {options}, {threads} threads", flush=True)
    best = max(found, key=lambda cell: cell[0])
    print(f"best: {best[0]:,.0f} env steps/s with {best[1]}, {best[2]} threads; the composed limit was not measured here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=DEFAULTS)
    parser.add_argument("--seconds", type=float, default=0.0, help="10; 3 for each cell of a search")
    parser.add_argument("--json", action="store_true", help="print all marks instead of one line")
    parser.add_argument("--search", action="store_true", help="try a grid of settings")
    for option, kind in (("threads", int), ("envs", int), ("horizon", int), ("minibatches", int), ("lr", float),
                         ("reward_scale", float), ("seed", int)):
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, default=0)
    given = vars(parser.parse_args())
    as_json, searching = given.pop("json"), given.pop("search")
    if searching:
        search(given["name"], given["seconds"] or 3.0)
        return
    given["seconds"] = given["seconds"] or 10.0
    result = train(**given)
    if as_json:
        print(json.dumps(result))
    else:
        print(f"{given['name']}: {rate(result):,.0f} env steps/s, mean return {result['returns'][-1]}, "
              f"{result['settings']}, {result['threads']} threads; the composed limit was not measured here, `make bench` does")


if __name__ == "__main__":
    main()
