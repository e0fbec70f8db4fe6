"""What is measured: a few cases, each a preset and an environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CARTPOLE", "CASES", "NATURE", "PONG", "Case", "Grid", "Scene"]


@dataclass(frozen=True)
class Grid:
    """Batch sizes that each part of the limit is tried with."""

    envs: tuple[int, ...]
    """Environments stepped together."""
    frames: tuple[int, ...]
    """Frames that the policy sees at once."""
    learn_frames: tuple[int, ...]
    """Frames in one batch of the learner (rounded to whole columns of T steps)."""
    backends: tuple[str, ...]
    """Environment back-ends: shoal's by their names, or raw:gymnasium and raw:ale without shoal around them."""


@dataclass(frozen=True)
class Scene:
    """An environment with what belongs to it: grid, reference loop, how long to look."""

    env: str
    reference: str
    grid: Grid
    warm_seconds: float
    seconds: float
    """Length of the window after the warm-up."""


@dataclass(frozen=True)
class Case:
    """One row of the efficiency table."""

    name: str
    scene: Scene
    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    efficiency_goal: float | None = None

    def arguments(self, **more: Any) -> dict[str, Any]:
        """What shoal.train is called with; the Evaluator is off."""
        quiet = {"eval.enabled": False, "console.mode": "none"}
        return {"preset": self.preset, "env": self.scene.env, **quiet, **self.overrides, **more}


CARTPOLE = Scene(
    "CartPole-v1",
    "cartpole",
    Grid((256, 1024, 4096), (256, 1024, 4096), (2048, 8192, 32768), ("compiled", "raw:gymnasium")),
    warm_seconds=2.0,
    seconds=4.0,
)
PONG = Scene(
    "ALE/Pong-v5",
    "pong",
    Grid((16, 32), (64, 256), (160, 1280), ("raw:ale",)),
    warm_seconds=3.0,
    seconds=12.0,
)
NATURE = {"net.torso": "nature"}
PAIR = {**NATURE, "actors": 2, "learners": 2, "architecture.one_place": True}
"""A process for each of two cores, with an actor and a learner: what `--actors auto` finds on them, without its half a minute."""

CASES = (
    Case("CartPole impala", CARTPOLE, "impala_throughput", efficiency_goal=0.6),
    Case("CartPole ppo", CARTPOLE, "ppo_throughput", efficiency_goal=0.6),
    Case("Pong impala", PONG, "impala", {**PAIR, "architecture.envs_per_actor": 64, "architecture.batch_slots": 1},
         efficiency_goal=0.85),
    Case("Pong ppo", PONG, "ppo", {**PAIR, "architecture.envs_per_actor": 16, "algorithm.unroll": 32}),
)
