"""Learning and faults of issue 6: the presets that learn from replay, as shipped."""

from __future__ import annotations

from dataclasses import replace

from tests.evidence.faults import survives
from tests.evidence.learning import reaches

__all__ = ["LINES"]

LINES = [
    reaches("dqn-catch", 6, "dqn on Catch", "dqn", "shoal/Catch-v0", goal=0.95, budget=200_000),
    reaches("dqn-cartpole", 6, "dqn on CartPole-v1", "dqn", "CartPole-v1", goal=450, budget=200_000),
    reaches("double_dqn-cartpole", 6, "double_dqn on CartPole-v1", "double_dqn", "CartPole-v1", goal=450, budget=200_000),
    reaches("apex-cartpole", 6, "apex on CartPole-v1", "apex", "CartPole-v1", goal=450, budget=200_000),
    reaches("apex-lure", 6, "apex on the lure chain (L = 4)", "apex", "shoal/LureChain-v0", goal=0.95, budget=200_000),
    reaches("r2d2-tmaze", 6, "r2d2 on a T-maze (L = 8)", "r2d2", "shoal/TMaze-v0", goal=0.9, budget=200_000),
    reaches("r2d2-pomdp", 6, "r2d2 on a CartPole without velocities", "r2d2", "shoal/CartPolePOMDP-v0", goal=350, budget=2_000_000),
    reaches("seed_r2d2-tmaze", 6, "seed_r2d2 on a T-maze (L = 8)", "seed_r2d2", "shoal/TMaze-v0", goal=0.9, budget=200_000),
    *(replace(survives(name, words, ("replay 0", "actor 1", "learner 0")), issue=6)
      for name, words in (("apex", ("apex",)), ("apex-saved", ("apex", "--replay.checkpoint", "--actors", "2")))),
]
