"""Learning of issue 18: the presets that learn continuous control from replay, as shipped. Of 5 seeds 4 must meet a line."""

from __future__ import annotations

from dataclasses import replace

from evidence.learning import reaches
from evidence.lines import Line

__all__ = ["LINES"]

SEEDS = (1, 2, 3, 4, 5)  # seeds 11 and 12 and those from 101 on were looked at while values were tuned


def learns(preset: str, env: str, where: str, goal: float, budget: int) -> Line:
    line = reaches(f"{preset}-{where}", 18, f"{preset} on {env}", preset, env, goal=goal, budget=budget)
    return replace(line, seeds=SEEDS, least=4)


LINES = [
    learns("sac", "Pendulum-v1", "pendulum", -200, 15_000),
    learns("sac_throughput", "Pendulum-v1", "pendulum", -200, 15_000),
    learns("td3", "Pendulum-v1", "pendulum", -200, 15_000),
    learns("ddpg", "Pendulum-v1", "pendulum", -300, 20_000),
    learns("apex_dpg", "Pendulum-v1", "pendulum", -250, 100_000),
    learns("sac", "InvertedPendulum-v5", "inverted-pendulum", 950, 30_000),
    learns("sac", "CartPole-v1", "cartpole", 450, 100_000),
]
