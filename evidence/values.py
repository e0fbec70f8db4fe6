"""Learning and faults of issue 6, and rainbow of issue 18: the presets that learn from replay, as shipped."""

from __future__ import annotations

from dataclasses import replace

from evidence import value_mechanisms
from evidence.faults import survives
from evidence.learning import reaches
from evidence.lines import Line

__all__ = ["LINES"]

SEEDS = (1, 2, 3)  # seed 0 of apex on CartPole was looked at while it was tuned
FAULTS = ("replay 0", "actor 1", "learner 0")


def learns(preset: str, env: str, words: str, where: str, goal: float, budget: int = 200_000) -> Line:
    return reaches(f"{preset}-{where}", 6, f"{preset} on {words}", preset, env, goal=goal, budget=budget, minutes=5)


LEARNING = [
    learns("dqn", "shoal/Catch-v0", "Catch", "catch", 0.95),
    learns("dqn", "CartPole-v1", "CartPole-v1", "cartpole", 450),
    learns("double_dqn", "CartPole-v1", "CartPole-v1", "cartpole", 450),
    learns("dqn_2013", "shoal/Catch-v0", "Catch", "catch", 0.95),
    learns("apex", "CartPole-v1", "CartPole-v1", "cartpole", 450),
    learns("apex", "shoal/LureChain-v0", "the lure chain (L = 4)", "lure", 0.95),
    learns("r2d2", "shoal/TMaze-v0", "a T-maze (L = 8)", "tmaze", 0.9),
    learns("r2d2", "shoal/CartPolePOMDP-v0", "a CartPole without velocities", "pomdp", 350, budget=2_000_000),
    learns("seed_r2d2", "shoal/TMaze-v0", "a T-maze (L = 8)", "tmaze", 0.9),
]
KILLS = [survives("apex", ("apex",), FAULTS), survives("apex-saved", ("apex", "--replay.checkpoint", "--actors", "2"), FAULTS)]

RAINBOW = replace(learns("rainbow", "shoal/Catch-v0", "Catch", "catch", 0.95), issue=18, seeds=(1, 2, 3, 4, 5))

LINES = [*(replace(line, issue=6, seeds=SEEDS) for line in (*LEARNING, *KILLS)), RAINBOW, *value_mechanisms.LINES]
