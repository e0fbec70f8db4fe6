"""Learning of issue 14: an algorithm that was written outside of the package trains on the runtimes, named on the command line."""

from __future__ import annotations

from evidence.learning import reaches
from evidence.lines import Line

__all__ = ["LINES"]

OPTIONS = ("--actors", "1", "--architecture.envs-per-actor", "1", "--net.hidden", "64", "64", "--net.activation", "relu",
           "--replay.batch-size", "128", "--replay.min-size", "1000", "--replay.insert-batch", "1",
           "--replay.samples-per-insert", "128", "--replay.exponent", "0", "--eval.every-env-steps", "1000", "--eval.episodes",
           "20")
LINES: list[Line] = [
    reaches(f"outside-ddpg-{runtime}", 14, f"tests/algorithms/outside_ddpg.py x synchronous on Pendulum-v1, --runtime {runtime}",
            "--algorithm", "tests.algorithms.outside_ddpg:DDPG", "--architecture", "synchronous", "Pendulum-v1", *OPTIONS,
            "--runtime", runtime, goal=-300, budget=20_000)
    for runtime in ("inline", "local")
]
