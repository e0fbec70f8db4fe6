"""TorchRL's clipped PPO with its own collector, environments stepped one after the other in one process. Timed, or trained to a
"goal"."""

from __future__ import annotations

import json
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

import numpy as np
import same_env
import torch
from goal_evaluator import GoalEvaluator, RecentReturns
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.modules import ActorValueOperator, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": {"envs": 64, "steps": 64, "epochs": 1, "minibatches": 1, "lr": 5e-4, "clip": 0.2},
    "pong": {"envs": 16, "steps": 32, "epochs": 1, "minibatches": 2, "lr": 2.5e-4, "clip": 0.1},
}
RACE: dict[str, Any] = {"envs": 8, "steps": 128, "epochs": 4, "minibatches": 4, "lr": 1e-3, "clip": 0.2}  # as SB3 with 4 epochs
LEAST_MARKS = 4  # a slow run goes on until a rate can be taken


class Pixels(nn.Module):
    """Nature CNN on any leading shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1),
                                 nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x.flatten(0, -4).float() / 255).unflatten(0, x.shape[:-3])
        return out


def model(scene: str, env: SerialEnv) -> ActorValueOperator:
    """A shared torso with two heads."""
    torso: nn.Module = Pixels()
    width = 512
    if scene == "cartpole":
        torso, width = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), 64
    actions = env.action_spec.shape[-1]
    common = TensorDictModule(torso, in_keys=["observation"], out_keys=["hidden"])
    actor = ProbabilisticActor(TensorDictModule(nn.Linear(width, actions), in_keys=["hidden"], out_keys=["logits"]),
                               in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
    return ActorValueOperator(common, actor, ValueOperator(nn.Linear(width, 1), in_keys=["hidden"]))


def greedy(actor: ProbabilisticActor, observation: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        seen = TensorDict({"observation": torch.as_tensor(observation)}, [len(observation)])
        return np.asarray(actor.get_dist(seen).logits.argmax(-1))


def main(order: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    scene, goal, seed = order["scene"], order.get("goal"), order.get("seed", 0)
    settings = dict(SETTINGS[scene] if goal is None else RACE)
    settings.update({"epochs": order.get("epochs", settings["epochs"]), **order.get("settings", {})})
    torch.set_num_threads(order.get("threads", 1))
    torch.manual_seed(seed)
    env = SerialEnv(settings["envs"], lambda: GymWrapper(same_env.make(scene)))
    env.set_seed(seed)
    net = model(scene, env)
    actor, critic = net.get_policy_operator(), net.get_value_operator()
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=settings["clip"], entropy_coeff=0.01, critic_coeff=0.5)
    optimiser = torch.optim.Adam(net.parameters(), settings["lr"], eps=1e-5)
    frames = settings["envs"] * settings["steps"]
    judge = None if goal is None else GoalEvaluator(goal, seed, lambda observation: greedy(actor, observation))
    returns = RecentReturns(settings["envs"])
    collector = Collector(env, actor, frames_per_batch=frames, total_frames=-1)
    marks, started, began_at = [(0.0, 0)], time.perf_counter(), time.time()
    for data in collector:
        for reward, done in zip(*(data["next", name][..., 0].numpy().T for name in ("reward", "done")), strict=True):
            returns.add(reward, done)
        for _ in range(settings["epochs"]):
            with torch.no_grad():
                advantage(data)
            flat = data.reshape(-1)
            for part in torch.randperm(len(flat)).chunk(settings["minibatches"]):
                terms = loss(flat[part])
                total = sum(value for name, value in terms.items() if name.startswith("loss_"))
                optimiser.zero_grad()
                total.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimiser.step()
        stopped = judge.stopped if judge else 0.0
        marks.append((time.perf_counter() - started - stopped, marks[-1][1] + frames))
        if judge is not None and judge.passes(marks[-1][0]):
            break
        if marks[-1][0] >= order["seconds"] and len(marks) >= LEAST_MARKS:
            break
    collector.shutdown()
    report = {"version": version("torchrl"), "torch": torch.__version__, "settings": settings, "marks": marks,
              "began_at": began_at, "samples_per_insert": settings["epochs"], "train_return": returns.mean}
    if judge is not None:
        report["seconds"], report["eval_return"] = judge.reached
    print(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
