"""Evolution strategies of issue 20."""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evidence.learning import reaches
from evidence.lines import Line, train
from shoal import algorithms, envs
from shoal.algorithms import es
from shoal.learning import Progress
from shoal.nets import NetConfig
from tests.architectures.graphs import train as train_graph

__all__ = ["LINES"]

SEEDS = (1, 2, 3, 4, 5)  # 0, 101 and 102 were looked at while values were tuned
LINEAR = ("es", "CartPole-v1", "--runtime", "inline", "--actors", "1", "--algorithm.population", "20", "--algorithm.sigma", "0.1",
          "--algorithm.lr", "0.1", "--algorithm.weight-decay", "0", "--algorithm.no-normalise-observations",
          "--architecture.envs-per-actor", "20", "--eval.episodes", "20", "--eval.every-env-steps", "1")
"""The reduced configuration of specs/policy.md 11d: four weights and a bias for each action, ten mirrored pairs."""


def linear(seed: int) -> dict[str, Any]:
    result = train(*LINEAR, "--until-return", "500", "--max-learner-steps", "40", "--net.hidden", seed=seed)
    return {"met": result["stopped_by"] == "return", **result}


def shipped() -> Line:
    line = reaches("es-cartpole", 20, "es on CartPole-v1", "es", "CartPole-v1", "--max-seconds", "150", goal=475, budget=10**9)
    return replace(line, statement="es on CartPole-v1 >= 475 within 150 s", seeds=SEEDS)


def travels(seed: int) -> dict[str, Any]:
    """What two workers read of each other in an iteration, by the number of parameters."""
    moved = {}
    for width in (0, 30, 300):
        first, second = (_wire_bytes(seed, width, iterations) for iterations in (2, 4))
        moved[f"{second[0]:,} parameters"] = (second[1] - first[1]) / 2
    return {"met": len(set(moved.values())) == 1, "bytes_per_iteration": moved}


def _wire_bytes(seed: int, width: int, iterations: int) -> tuple[int, float]:
    hidden = (width, width) if width else ()
    config = es.Config(population=8, episode_limit=5, limit_growth=1.01, noise_size=1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        run = train_graph(Path(folder), config, "evolution", "CartPole-v1", "inline", updates=iterations, actors=2, seed=seed,
                          net=NetConfig(hidden=hidden), envs_per_actor=4)
    return len(run.published["params"]), run.wires["scores"]["bytes_moved"]


def batched(seed: int) -> dict[str, Any]:
    """Decisions per second of the forward passes and environments of one worker, and of a loop over the same members."""
    torch.set_num_threads(1)
    algorithm = algorithms.make(es.Config(population=64), envs.describe("CartPole-v1"), NetConfig(hidden=(32,)), 64)
    members, policy = algorithm.members(seed, 64), algorithm.policy()
    published = algorithm.learn(seed).published(Progress())
    members.load(published)
    members.perturb(0, np.arange(64))
    rng = torch.Generator()
    rates: dict[str, list[int]] = {}
    rows = [members.copies.params[row].numpy() for row in range(64)]

    def together(seconds: float) -> float:
        env = envs.make("CartPole-v1", 64)
        now, viewer, done, began = env.reset(seed), algorithm.record.viewer(64), 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            now = env.step(members.act(viewer.of(now), rng))
            done += int(np.count_nonzero(now.valid))
        env.close()
        return done / (time.perf_counter() - began)

    def one_by_one(seconds: float) -> float:
        env = envs.make("CartPole-v1", 1)
        viewer, done, began = algorithm.record.viewer(1), 0, time.perf_counter()
        for row in itertools.cycle(rows):
            policy.load({**published, "params": row})
            now = env.reset(seed)
            while not now.last[0] and time.perf_counter() < began + seconds:
                now = env.step(policy.act(viewer.of(now), {}, None, rng)[0])
                done += int(np.count_nonzero(now.valid))
            if time.perf_counter() >= began + seconds:
                break
        env.close()
        return done / (time.perf_counter() - began)

    for _ in range(3):  # in turns: another process on the same cores slows both
        for name, play in (("together", together), ("one by one", one_by_one)):
            rates.setdefault(name, []).append(round(play(3.0)))
    ratio = float(np.median(rates["together"]) / np.median(rates["one by one"]))
    return {"met": ratio >= 5, "ratio": round(ratio, 1), "env_steps_per_second": rates}


LINES = [
    shipped(),
    Line("mechanism-es-linear", 20, "es, a linear policy and a population of 20, reaches 500 on CartPole-v1 within 40 iterations",
         linear, seeds=SEEDS, least=3),
    Line("mechanism-es-bytes", 20, "what workers of es tell each other has as many bytes for any number of parameters",
         travels, seeds=(1,)),
    Line("speed-es-batched", 20, "64 members on CartPole-v1 in one batched pass: >= 5x the env steps/s of a loop over them",
         batched, seeds=(1, 2, 3)),
]
