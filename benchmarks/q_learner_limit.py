"""Updates/s of the value-based learners, from batches in host memory.

    python -m benchmarks.q_learner_limit [--seconds 3] [--device cpu] [--small]

dqn has the Nature CNN and 512 transitions in a batch, r2d2 the Nature CNN with an LSTM of 512 and 64 windows of 40 + 80 steps. On a
GPU each is measured with graphs and without, in bfloat16 and in float32; then on all cores of the CPU. The loop is a
Learner's: the next update is begun before priorities, metrics and verdict of the last one are looked at, and weights go to
the host after every update. Prints one JSON object for each. --small is for a test.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.synthetic import ACTIONS, spec_of, waiting_for
from benchmarks.work_rate import work_rate
from shoal import algorithms
from shoal.acting import Progress
from shoal.algorithms import dqn, r2d2
from shoal.core import Tree
from shoal.device.placement import GpuConfig, Hardware
from shoal.device.transfer import DeviceEvent, to_host
from shoal.nets import NetConfig
from shoal.slots import map_tree

__all__ = ["main"]

WARM_UPDATES = 8  # on a GPU: by then graphs are captured


def cases(small: bool) -> Iterator[tuple[str, Any, int]]:
    """Name, algorithm, items in a batch."""
    spec = spec_of(gym.spaces.Box(0, 255, (4, 10, 10), np.uint8)) if small else spec_of()
    torso = "small_conv" if small else "nature"
    value = dqn.Config(n_step=3, dueling=True, dueling_hidden=512, loss="squared", optimiser="rmsprop_centred", lr=6.25e-5,
                       optimiser_epsilon=1.5e-7, target_period_updates=2500)
    yield "dqn", algorithms.make(value, spec, NetConfig(torso=torso), 4), 16 if small else 512
    burn_in, length = (4, 8) if small else (40, 80)
    window = r2d2.Config(burn_in=burn_in, length=length, stride=4, lr=1e-4, dueling_hidden=512)
    memory = NetConfig(torso=torso, recurrent="lstm", lstm_size=64 if small else 512, prev_action_reward=True)
    yield "r2d2", algorithms.make(window, spec, memory, 4), 4 if small else 64


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


class LearnerLoop:
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

    def update(self) -> int:
        """One update; returns 1."""
        learn, batch = self.learn, self.batches[self.made % len(self.batches)]
        for minibatch in learn.minibatches(batch, learn.sums(batch), Progress(), self._rng):
            gradient, metrics = learn.gradients(minibatch, "all")
            verdict = learn.apply(gradient, "all")
        self.made += 1
        if not self.hardware.on_gpu:
            return 1
        metrics.send()
        now = to_host(learn.priorities), metrics, to_host(verdict), learn.snapshot(Progress()), DeviceEvent(self.hardware.device)
        if self._before is not None:
            self._look(*self._before)
        self._before = now
        learn.release()
        return 1

    def _look(self, priorities: Any, metrics: Any, verdict: Any, snapshot: Any, mark: DeviceEvent) -> None:
        mark.wait()
        priorities.numpy(), dict(metrics.items()), bool(verdict), snapshot()

    def rate(self, seconds: float) -> float:
        """Updates/s, from the moment when it is warm."""
        for _ in range(WARM_UPDATES if self.hardware.on_gpu else 1):
            self.update()
        return work_rate(self.update, seconds, waiting_for(self.hardware))


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
            rate = LearnerLoop(algorithm, hardware, batches).rate(options.seconds)
            how = {"graphs": hardware.gpu.graphs, "bf16": hardware.gpu.bf16} if hardware.on_gpu else {}
            row = {"learner": name, "items": size, "device": hardware.name, **how, "updates_per_second": round(rate, 2)}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
