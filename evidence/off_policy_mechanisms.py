"""What makes TD3 and SAC work (issue 18, specs/value.md 7d): each mechanism with and without it, on Pendulum-v1.

    critics    td3 with one critic instead of two: by how much its values are above what its policy then gets
    entropy    sac with alpha = 0: the policy's entropy collapses
    ppo        does not do in 15,000 env steps what sac and td3 do

Critics and entropy are learned in a plain loop (an actor with several environments, a table, a learner), one process for each run;
only what is compared differs. Rewards of this environment lie between -16 and 0, and gamma is 0.99.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import numpy as np
import torch

from evidence.lines import Line, apart, side_by_side, train
from shoal import algorithms, envs, replay
from shoal.acting import Progress
from shoal.algorithms import sac, td3
from shoal.learning import phases_due
from shoal.nets import NetConfig
from tests.algorithms.replay_loop import Actor, batch_of

__all__ = ["LINES"]

MODULE, ENV, SEEDS = "evidence.off_policy_mechanisms", "Pendulum-v1", (1, 2, 3, 4, 5)
NET = NetConfig(hidden=(64, 64), activation="relu")
FAST = {"actor_lr": 1e-3, "critic_lr": 1e-3, "random_steps": 1_000}
CRITIC_UPDATES, ENTROPY_UPDATES, BATCH, SEATS = 6_000, 2_500, 128, 4
EPISODES, LENGTH, JUDGED = 20, 600, 200   # what follows a judged step is long enough: 0.99^400 is 0.02


class OneCritic(td3.TD3):
    """TD3 with nothing to take the smaller value of."""

    critics = 1


def trial(name: str, seed: int, updates: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    spec = envs.describe(ENV)
    if name in ("one critic", "two critics"):
        make = OneCritic if name == "one critic" else td3.TD3
        algorithm: Any = make(td3.Config(**FAST), spec, NET, SEATS)
    else:
        alpha = "auto" if name == "learned alpha" else 0.0
        algorithm = algorithms.make(sac.Config(**FAST, alpha=alpha, alpha_lr=1e-3), spec, NET, SEATS)
    learn, entropy = learned(algorithm, seed, updates)
    policy = algorithm.policy()
    policy.load(learn.published(Progress()))
    return {**judged(algorithm, learn, policy, seed), **({} if entropy is None else {"entropy": entropy})}


def learned(algorithm: Any, seed: int, updates: int) -> tuple[Any, float | None]:
    """Learn: one update for each env step. Also the policy's mean entropy over the last hundred updates, where there is one."""
    actor, learn = Actor(algorithm, envs.make(ENV, SEATS), seed), algorithm.learn(seed)
    client = replay.Server([replay.Table("items", replay.Uniform(), max_size=100_000)], seed=seed).client()
    dice, done, entropies = np.random.default_rng(seed), 0, []
    while done < updates:
        actor.play(1, done)
        if actor.recorder.ready:
            items, priority = actor.items()
            client.insert_batch(items, {"items": priority})
        if actor.env_steps < FAST["random_steps"]:
            continue
        for _ in range(SEATS):
            drawn = client.sample("items", BATCH)
            batch, progress = batch_of(drawn.data, drawn.info.probabilities, drawn.info.table_size), Progress(learner_steps=done)
            (minibatch,) = learn.minibatches(batch, learn.sums(batch), progress, dice)
            for phase in phases_due(learn, progress):
                gradient, metrics = learn.gradients(minibatch, phase)
                learn.apply(gradient, phase)
                if "entropy" in metrics:
                    entropies.append(metrics["entropy"])
            done += 1
        actor.policy.load(learn.published(Progress()))
    return learn, round(statistics.mean(entropies[-100:]), 3) if entropies else None


@torch.no_grad()
def judged(algorithm: Any, learn: Any, policy: Any, seed: int) -> dict[str, float]:
    """The greedy policy's return over 200 steps, and by how much its first critic promises more than comes of it."""
    env, viewer, action = envs.make(ENV, EPISODES, max_episode_steps=LENGTH), algorithm.record.viewer(EPISODES), None
    now, state, rewards, promised = env.reset(5000 + seed), policy.initial_state(EPISODES), [], []
    for _ in range(LENGTH):
        seen = torch.from_numpy(np.array(now.observation))
        action, state, _ = policy.act(viewer.of(now, action), state, None, torch.Generator())
        promised.append(learn.model.net.critic(seen, torch.from_numpy(action))[0].numpy())
        now = env.step(action)
        rewards.append(now.reward.copy())
    env.close()
    outcome, following = np.zeros((LENGTH, EPISODES)), np.zeros(EPISODES)
    for t in reversed(range(LENGTH)):
        following = outcome[t] = rewards[t] + algorithm.config.gamma * following
    return {"bias": round(float((np.array(promised) - outcome)[:JUDGED].mean()), 3),
            "return": round(float(np.sum(rewards[:JUDGED], 0).mean()), 1)}


# ---------------------------------------------------------------------------------------------- the lines
def compared(*names: str, updates: int) -> dict[str, list[dict[str, Any]]]:
    cases = [(name, seed) for name in names for seed in SEEDS]
    runs = side_by_side(lambda case: {"seed": case[1], **apart(MODULE, name=case[0], seed=case[1], updates=updates)}, cases)
    return {name: [run for (whose, _), run in zip(cases, runs, strict=True) if whose == name] for name in names}


def medians(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    return {name: {key: statistics.median(run[key] for run in some) for key in some[0] if key != "seed"}
            for name, some in runs.items()}


def critics(_: int) -> dict[str, Any]:
    runs = compared("one critic", "two critics", updates=CRITIC_UPDATES)
    found = medians(runs)
    one, two = found["one critic"]["bias"], found["two critics"]["bias"]
    return {"met": one > 0 and one >= 2 * two, "medians": found, "each": runs}


def entropy(_: int) -> dict[str, Any]:
    runs = compared("alpha 0", "learned alpha", updates=ENTROPY_UPDATES)
    found = medians(runs)
    lost = sum(run["entropy"] <= -2.0 for run in runs["alpha 0"])
    kept = sum(run["entropy"] >= -1.5 for run in runs["learned alpha"])
    return {"met": lost >= 4 and kept >= 4, "medians": found, "each": runs}


def ppo(seed: int) -> dict[str, Any]:
    result = train("ppo", ENV, "--until-return", "-200", "--max-env-steps", "15000", seed=seed)
    return {"met": result["stopped_by"] == "env_steps" and result["eval_return"] < -200, **result}


LINES = [
    Line("mechanism-critics", 18, f"td3 on Pendulum-v1, medians of 5 seeds after {CRITIC_UPDATES:,} updates: with one critic "
         "values are too high, and by at least twice as much as with two", critics, seeds=(0,)),
    Line("mechanism-entropy", 18, f"sac on Pendulum-v1 after {ENTROPY_UPDATES:,} updates, at least 4 of 5 seeds each: with "
         "alpha = 0 the entropy falls to -2 nats or less; with a learned alpha it stays at -1.5 or more (the target "
         "is -1)", entropy, seeds=(0,)),
    Line("mechanism-ppo-pendulum", 18, "ppo on Pendulum-v1 does not reach -200 within 15,000 env steps", ppo, seeds=SEEDS),
]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(trial(**json.loads(sys.argv[1]))) + "\n")
