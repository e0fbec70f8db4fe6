"""PPO as a single file in CleanRL's manner: gymnasium's SyncVectorEnv, plain PyTorch, one process. Timed, or trained to a "goal".

CleanRL itself is a collection of scripts to copy, not a package; this one is ours, with the settings of its ppo.py and
ppo_atari.py (epochs, minibatches, step size, clipping), more environments and one thread. An order may ask for other `epochs`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import same_env
import torch
from goal_evaluator import GoalEvaluator, RecentReturns
from torch import nn

SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": {"envs": 64, "steps": 128, "epochs": 4, "minibatches": 4, "lr": 2.5e-4, "clip": 0.2},
    "pong": {"envs": 16, "steps": 32, "epochs": 4, "minibatches": 4, "lr": 2.5e-4, "clip": 0.1},
}
RACE: dict[str, Any] = {"envs": 8, "steps": 128, "epochs": 4, "minibatches": 4, "lr": 1e-3, "clip": 0.2}  # as SB3 with 4 epochs
GAMMA, LAMBDA = 0.99, 0.95
LEAST_MARKS = 4  # a slow run goes on until a rate can be taken


def layer(module: nn.Linear | nn.Conv2d, gain: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(module.weight, gain)
    if module.bias is not None:
        nn.init.zeros_(module.bias)
    return module


class ActorCriticNet(nn.Module):
    def __init__(self, shape: tuple[int, ...], actions: int) -> None:
        super().__init__()
        self.pixels = len(shape) == 3
        self.torso: nn.Module
        if self.pixels:
            sizes = ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
            convolutions = [one for size in sizes for one in (layer(nn.Conv2d(*size)), nn.ReLU())]
            self.torso = nn.Sequential(*convolutions, nn.Flatten(), layer(nn.Linear(3136, 512)), nn.ReLU())
            self.actor, self.critic = layer(nn.Linear(512, actions), 0.01), layer(nn.Linear(512, 1), 1.0)
        else:
            self.torso = nn.Identity()
            self.actor, self.critic = (nn.Sequential(layer(nn.Linear(shape[0], 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh(),
                                                     layer(nn.Linear(64, out), gain)) for out, gain in ((actions, 0.01), (1, 1.0)))

    def forward(self, x: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        hidden = self.torso(x.float() / 255 if self.pixels else x)
        return torch.distributions.Categorical(logits=self.actor(hidden)), self.critic(hidden)[:, 0]


def rollout(envs: gym.vector.VectorEnv, agent: ActorCriticNet, now: np.ndarray, done: np.ndarray, steps: int,
            returns: RecentReturns) -> tuple[Any, ...]:
    """One batch [steps, envs]; `done` says which rows have just begun anew."""
    rows = []
    with torch.no_grad():
        for _ in range(steps):
            seen = torch.as_tensor(now)
            policy, value = agent(seen)
            action = policy.sample()
            now, reward, terminated, truncated, _ = envs.step(action.numpy())
            rows.append((seen, action, policy.log_prob(action), value, torch.as_tensor(reward, dtype=torch.float32),
                         torch.as_tensor(done, dtype=torch.float32)))
            done = terminated | truncated
            returns.add(reward, done)
        following = agent(torch.as_tensor(now))[1]
    return [torch.stack(column) for column in zip(*rows, strict=True)], following, now, done


def advantages(reward: torch.Tensor, value: torch.Tensor, began: torch.Tensor, following: torch.Tensor,
               done: np.ndarray) -> torch.Tensor:
    out, last = torch.zeros_like(reward), torch.zeros_like(following)
    alive = 1.0 - torch.as_tensor(done, dtype=torch.float32)
    for t in reversed(range(len(reward))):
        delta = reward[t] + GAMMA * following * alive - value[t]
        out[t] = last = delta + GAMMA * LAMBDA * alive * last
        following, alive = value[t], 1.0 - began[t]
    return out


def learn(agent: ActorCriticNet, optimiser: torch.optim.Optimizer, batch: list[torch.Tensor], settings: dict[str, Any]) -> None:
    seen, action, log_prob, target, advantage = (x.flatten(0, 1) for x in batch)
    for _ in range(settings["epochs"]):
        for part in torch.randperm(len(action)).chunk(settings["minibatches"]):
            policy, value = agent(seen[part])
            ratio = (policy.log_prob(action[part]) - log_prob[part]).exp()
            normal = (advantage[part] - advantage[part].mean()) / (advantage[part].std() + 1e-8)
            clipped = ratio.clamp(1 - settings["clip"], 1 + settings["clip"])
            loss = -torch.min(ratio * normal, clipped * normal).mean() + 0.25 * (value - target[part]).square().mean()
            loss = loss - 0.01 * policy.entropy().mean()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimiser.step()


def greedy(agent: ActorCriticNet, observation: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(agent(torch.as_tensor(observation))[0].logits.argmax(-1))


def main(order: dict[str, Any]) -> None:
    scene, goal, seed = order["scene"], order.get("goal"), order.get("seed", 0)
    settings = dict(SETTINGS[scene] if goal is None else RACE)
    settings.update({"epochs": order.get("epochs", settings["epochs"]), **order.get("settings", {})})
    torch.set_num_threads(order.get("threads", 1))
    torch.manual_seed(seed)
    envs = gym.vector.SyncVectorEnv([lambda: same_env.make(scene)] * settings["envs"],
                                    autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    observations, actions = envs.single_observation_space, envs.single_action_space
    assert observations.shape is not None and isinstance(actions, gym.spaces.Discrete)
    agent = ActorCriticNet(observations.shape, int(actions.n))
    optimiser = torch.optim.Adam(agent.parameters(), settings["lr"], eps=1e-5)
    judge = None if goal is None else GoalEvaluator(goal, seed, lambda observation: greedy(agent, observation))
    now, _ = envs.reset(seed=seed)
    done, returns = np.zeros(settings["envs"], bool), RecentReturns(settings["envs"])
    marks, started, began_at = [(0.0, 0)], time.perf_counter(), time.time()
    while marks[-1][0] < order["seconds"] or len(marks) < LEAST_MARKS:
        (seen, action, log_prob, value, reward, began), following, now, done = rollout(envs, agent, now, done, settings["steps"],
                                                                                       returns)
        advantage = advantages(reward, value, began, following, done)
        learn(agent, optimiser, [seen, action, log_prob, advantage + value, advantage], settings)
        stopped = judge.stopped if judge else 0.0
        marks.append((time.perf_counter() - started - stopped, marks[-1][1] + reward.numel()))
        if judge is not None and judge.passes(marks[-1][0]):
            break
    report = {"version": f"in CleanRL's manner, gymnasium {gym.__version__}", "torch": torch.__version__, "settings": settings,
              "marks": marks, "began_at": began_at, "samples_per_insert": settings["epochs"], "train_return": returns.mean}
    if judge is not None:
        report["seconds"], report["eval_return"] = judge.reached
    print(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
