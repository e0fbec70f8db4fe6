"""Environments whose composed limit is known how to measure, each with the grid that its parts are tried over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CARTPOLE", "PONG", "SCENES", "Grid", "Scene", "Workload"]


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
    """An environment, the name that the peers' drivers know it by, and the grid of its limit."""

    env: str
    name: str
    grid: Grid


@dataclass(frozen=True)
class Workload:
    """What a limit is measured for: a preset in an environment, with overrides."""

    name: str
    scene: Scene
    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, **more: Any) -> dict[str, Any]:
        """The arguments of shoal.train; the Evaluator is off."""
        quiet = {"eval.enabled": False, "console.mode": "none"}
        return {"preset": self.preset, "env": self.scene.env, **quiet, **self.overrides, **more}

    def key(self) -> str:
        """The arguments as JSON: what a probe gets, and the key of a limit."""
        return json.dumps(self.arguments(), sort_keys=True)


CARTPOLE = Scene("CartPole-v1", "cartpole",
                 Grid((256, 1024, 4096), (256, 1024, 4096), (2048, 8192, 32768), ("compiled", "raw:gymnasium")))
PONG = Scene("ALE/Pong-v5", "pong", Grid((16, 32), (64, 256), (160, 1280), ("raw:ale",)))
SCENES = {scene.env: scene for scene in (CARTPOLE, PONG)}
