"""How fast the device architecture could be: the same kernels with and without learning, each as one captured graph.

    python -m benchmarks.device_limit [ENV] [--envs 16384 65536 262144] [--unroll 16] [--compile] [--seconds 3] [--device cuda]

Prints one JSON line for each number of environments: env steps/s of acting alone (network, sampling, environment, recording), of
the whole update, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.synthetic import waiting_for
from benchmarks.work_rate import work_rate
from shoal import algorithms, envs
from shoal.algorithms import a2c
from shoal.device.placement import GpuConfig, Hardware
from shoal.nets import NetConfig
from shoal.roles.device_learner import DeviceLearner
from shoal.roles.parts import EnvSource, Parts
from shoal.telemetry import Stats

__all__ = ["main", "measure"]


def learner(env: str, num_envs: int, unroll: int, hardware: Hardware, **net: Any) -> DeviceLearner:
    """The role of the device architecture, without a program around it."""
    names = Stats.names()
    me: Any = SimpleNamespace(stats=Stats(names, np.zeros(len(names))), rng=lambda salt="": np.random.default_rng(0), name="device",
                              index=0, replicas=1)
    algorithm = algorithms.make(a2c.Config(unroll=unroll), envs.describe(env), NetConfig(**net), num_envs)
    return DeviceLearner(me, Parts(algorithm, EnvSource(env), num_envs, hardware=hardware), None, 1)


def repeated(action: Callable[[], Any], hardware: Hardware, generator: torch.Generator) -> Callable[[], Any]:
    """`action`, as a captured graph where there is a GPU."""
    if not hardware.on_gpu:
        return action
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def rate(action: Callable[[], Any], decisions: int, seconds: float, hardware: Hardware) -> float:
    """Env steps/s of an action that makes this many decisions."""
    wait = waiting_for(hardware)

    def several() -> int:
        for _ in range(8):
            action()
        wait()
        return 8 * decisions

    action()
    return work_rate(several, seconds, wait)


def measure(env: str, counts: list[int], unroll: int, hardware: Hardware, seconds: float) -> Iterator[dict[str, Any]]:
    for count in counts:
        acting = learner(env, count, unroll, hardware)
        alone = rate(repeated(acting.unroll.play, hardware, acting.generator), acting.unroll.decisions, seconds, hardware)
        del acting
        whole = learner(env, count, unroll, hardware)
        both = rate(repeated(whole._update, hardware, whole.generator), whole.unroll.decisions, seconds, hardware)
        del whole
        yield {"env": env, "envs": count, "unroll": unroll, "compile": hardware.gpu.compile, "device": hardware.name,
               "acting_env_steps_per_second": round(alone), "update_env_steps_per_second": round(both),
               "share": round(both / alone, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="?", default="CartPole-v1")
    parser.add_argument("--envs", type=int, nargs="+", default=[16384, 65536, 262144])
    parser.add_argument("--unroll", type=int, default=16)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    hardware = Hardware(options.device, GpuConfig(compile=options.compile))
    for line in measure(options.env, options.envs, options.unroll, hardware, options.seconds):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
