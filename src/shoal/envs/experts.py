"""Scripted experts for shoal's own environments: sources of demonstrations.

    shoal data record shoal.envs.experts:follow_cue shoal/CueLure-v0 --episodes 20
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["follow_cue"]


def follow_cue(observation: np.ndarray, memory: dict[str, Any]) -> int:
    """T-maze and cue-lure corridor: go on to the junction, then take the door that the cue named at the beginning."""
    cue, junction, _ = observation
    if cue:
        memory["door"] = int(cue > 0)
    return memory["door"] if junction else 1
