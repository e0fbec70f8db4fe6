"""Issue 8: one protocol, two back-ends, the same numbers. Whole games, longer than the test suite has time for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from evidence.lines import ROOT, Line

__all__ = ["LINES"]

POOL = ROOT / ".peers" / "envpool" / "bin" / "python"
GAMES = {
    "Pong, sticky actions": {"game": "ALE/Pong-v5", "steps": 2500, "options": {"noop_max": 1}},
    "Pong, no sticky actions, clipped": {"game": "ALE/Pong-v5", "steps": 2500, "options": {
        "noop_max": 1, "repeat_action_probability": 0.0, "reward_clipping": True}},
    "Breakout, sticky actions, lives": {"game": "ALE/Breakout-v5", "steps": 1500, "options": {
        "noop_max": 1, "life_loss": "discount"}},
    # no multiple of 100: in envpool a game begins a step late
    "Breakout, no sticky actions, truncated": {"game": "ALE/Breakout-v5", "steps": 1450, "options": {
        "noop_max": 1, "repeat_action_probability": 0.0, "max_num_frames_per_episode": 400}},
}


def played(backend: str, orders: list[dict[str, Any]]) -> list[list[Any]]:
    python = sys.executable
    if backend == "envpool" and not importlib.util.find_spec("envpool"):
        python = str(POOL)
        if not POOL.exists():
            raise RuntimeError("envpool is not installed; the top of tests/envs/test_atari.py says how")
    done = subprocess.run([python, str(ROOT / "tests" / "envs" / "atari_playback.py"), json.dumps([{**order, "backend": backend}
                           for order in orders])], capture_output=True, text=True, check=False, timeout=600,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    told: list[list[Any]] = json.loads(done.stdout)
    return told


def same(seed: int) -> dict[str, Any]:
    """Every observation (its checksum), reward, discount, end and return of both back-ends, side by side."""
    orders = [{**order, "seed": seed} for order in GAMES.values()]
    games = {}
    for name, ours, theirs in zip(GAMES, played("ale", orders), played("envpool", orders), strict=True):
        different = sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
        ends = sum(row[0] == "first" for row in ours) - 1
        games[name] = {"rows": len(ours), "ends of games": ends, "different": different}
    return {"met": all(not game["different"] and game["ends of games"] for game in games.values()), "games": games}


LINES = [Line("atari-backends", 8, "the same actions through ALE's vector environment and through envpool give the same numbers, "
              "over the ends of games", same, seeds=(1, 2, 3, 4, 5))]
