"""Updates/s of the value-based learners, from batches in host memory.

    python -m shoal.bench.q_limit [--seconds 3] [--device cpu] [--small]

dqn has the Nature CNN and 512 transitions in a batch, r2d2 the Nature CNN with an LSTM of 512 and 64 windows of 40 + 80 steps. On a
GPU each is measured with graphs and without, in bfloat16 and in float32; then on all cores of the CPU. The loop is a
ReplayLearner's: the next update is begun before priorities, metrics and verdict of the last one are looked at, and weights go to
the host after every update. Prints one JSON object for each. --small is for a test.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from shoal import algorithms
from shoal.algorithms import dqn, r2d2
from shoal.algorithms.hardware import GpuConfig, Hardware
from shoal.algorithms.pinning import Mark, to_host
from shoal.bench.learner_limit import FRAMES
from shoal.core import Progress, Tree
from shoal.envs import EnvSpec
from shoal.nets import NetConfig
from shoal.slots import map_tree

__all__ = ["main"]

ACTIONS = 6
SPEC = EnvSpec("frames", FRAMES, gym.spaces.Discrete(ACTIONS), 27_000, 4, 1, False, "none", "", ACTIONS)
WARM_UPDATES = 8  # on a GPU: by then graphs are captured


def cases(small: bool) -> Iterator[tuple[str, Any, int]]:
    """Name, algorithm, items in a batch."""
    value = dqn.Config(n_step=3, dueling=True, dueling_hidden=512, loss="squared", optimiser="rmsprop_centred", lr=6.25e-5,
                       optimiser_epsilon=1.5e-7, target_period_updates=2500)
    yield "dqn", algorithms.make(value, SPEC, NetConfig(torso="nature"), 4), 16 if small else 512
    burn_in, length = (4, 8) if small else (40, 80)
    window = r2d2.Config(burn_in=burn_in, length=length, stride=4, lr=1e-4, dueling_hidden=512)
    memory = NetConfig(torso="nature", recurrent="lstm", lstm_size=512, prev_action_reward=True)
    yield "r2d2", algorithms.make(window, SPEC, memory, 4), 4 if small else 64


def batch_of(algorithm: Any, size: int, seed: int) -> Tree:
    """Noise in the form of a batch from a table."""
    rng, items = np.random.default_rng(seed), algorithm.record.layout.joined(size).empty()

    def fill(x: np.ndarray) -> None:
        if x.dtype == np.uint8:
            x[...] = np.frombuffer(rng.bytes(x.nbytes), np.uint8).reshape(x.shape)
        elif x.dtype == bool:
            x[...] = False

    map_tree(fill, items)
    items["action"][...] = rng.integers(ACTIONS, size=items["action"].shape)
    items["reward"][...] = rng.normal(size=items["reward"].shape)
    items["discount"][...] = 0.99
    if "valid" in items:
        items["valid"][...] = True
    return {**items, "probability": rng.random(size) / 1e5 + 1e-6, "table_size": np.full(size, 100_000)}


class Loop:
    """A learner that always has a batch."""

    def __init__(self, algorithm: Any, hardware: Hardware, batches: list[Tree]) -> None:
        self.hardware, self.batches = hardware, batches
        self.learn = algorithm.learn(0)
        self.made = 0
        self._rng = np.random.default_rng(0)
        self._before: Any = None
        if hardware.on_gpu:
            self.learn.to(hardware)
            if hardware.gpu.graphs:
                self.learn.capture()

    def update(self) -> None:
        learn, batch = self.learn, self.batches[self.made % len(self.batches)]
        for minibatch in learn.minibatches(batch, learn.sums(batch), Progress(), self._rng):
            gradient, metrics = learn.gradients(minibatch, "all")
            verdict = learn.apply(gradient, "all")
        self.made += 1
        if not self.hardware.on_gpu:
            return
        metrics.send()
        now = to_host(learn.priorities), metrics, to_host(verdict), learn.snapshot(Progress()), Mark(self.hardware.device)
        if self._before is not None:
            self._look(*self._before)
        self._before = now
        learn.release()

    def _look(self, priorities: Any, metrics: Any, verdict: Any, snapshot: Any, mark: Mark) -> None:
        mark.wait()
        priorities.numpy(), dict(metrics.items()), bool(verdict), snapshot()

    def rate(self, seconds: float) -> float:
        """Updates/s, from the moment when it is warm."""
        for _ in range(WARM_UPDATES if self.hardware.on_gpu else 1):
            self.update()
        self._settle()
        first, began = self.made, time.perf_counter()
        while self.made == first or time.perf_counter() - began < seconds:
            self.update()
        self._settle()
        return (self.made - first) / (time.perf_counter() - began)

    def _settle(self) -> None:
        if self.hardware.on_gpu:
            torch.cuda.synchronize()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(words)
    places = [Hardware()]
    if options.device == "cuda":
        switches = ({}, {"graphs": False}, {"bf16": False})
        places = [*(Hardware("cuda", GpuConfig(**switch)) for switch in switches), *places]
    for name, algorithm, size in cases(options.small):
        batches = [batch_of(algorithm, size, seed) for seed in range(2)]
        for hardware in places:
            torch.set_num_threads(1 if hardware.on_gpu else len(os.sched_getaffinity(0)))
            rate = Loop(algorithm, hardware, batches).rate(options.seconds)
            how = {"graphs": hardware.gpu.graphs, "bf16": hardware.gpu.bf16} if hardware.on_gpu else {}
            row = {"learner": name, "items": size, "device": hardware.name, **how, "updates_per_second": round(rate, 2)}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
