"""Learning of issue 5: its presets on CartPole, seed on a T-maze, and all 24 pairs of the grid on Catch."""

from __future__ import annotations

from typing import Any

from evidence.learning import reaches
from evidence.lines import Line, train

__all__ = ["ALGORITHMS", "ARCHITECTURES", "LINES"]

ALGORITHMS = ("a2c", "ppo", "vtrace", "appo")
ARCHITECTURES = ("synchronous", "actor_learner", "async_gradients", "predictor_trainer", "central_inference", "gossip")
GRID_STEPS = 500_000
KEPT = ("stopped_by", "eval_return", "env_steps", "learner_steps", "seconds", "policy_lag", "restarts")


def grid(architecture: str) -> Line:
    """One column of the grid, with the defaults of algorithm and architecture."""

    def run(seed: int) -> dict[str, Any]:
        pairs = {}
        for algorithm in ALGORITHMS:
            result = train("--algorithm", algorithm, "--architecture", architecture, "shoal/Catch-v0", "--actors", "2",
                           "--until-return", "0.9", "--max-env-steps", str(GRID_STEPS), seed=seed)
            pairs[algorithm] = {"met": result["stopped_by"] == "return" and result["eval_return"] >= 0.9,
                                **{key: result[key] for key in KEPT}}
        return {"met": all(pair["met"] for pair in pairs.values()), "pairs": pairs,
                "env_steps": max(pair["env_steps"] for pair in pairs.values())}

    return Line(f"learning-grid-{architecture}", 5, f"{', '.join(ALGORITHMS)} x {architecture}, defaults: Catch >= 0.9 within "
                f"{GRID_STEPS:,} env steps", run)


PRESETS = {"a3c": ("a3c",), "a3c-master": ("a3c", "--architecture.mode", "master"), "ga3c": ("ga3c",), "seed": ("seed",),
           "appo": ("appo",), "rapid_ppo": ("rapid_ppo",), "gala": ("gala",)}

LINES = [
    *(reaches(f"{name}-cartpole", 5, f"{' '.join(words)} on CartPole-v1", *words, "CartPole-v1", goal=450, budget=400_000)
      for name, words in PRESETS.items()),
    reaches("seed-tmaze", 5, "seed with LSTM on a T-maze", "seed", "shoal/TMaze-v0", goal=0.9, budget=200_000),
    *(grid(architecture) for architecture in ARCHITECTURES),
]
