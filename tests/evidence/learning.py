"""Learning: presets as shipped reach their thresholds within their budgets; each seed counts."""

from __future__ import annotations

from typing import Any

from tests.evidence.lines import Line, train

__all__ = ["LINES"]


def reaches(name: str, issue: int, words: str, *arguments: str, goal: float, budget: int) -> Line:
    """A training run that must stop because the return was reached."""

    def run(seed: int) -> dict[str, Any]:
        result = train(*arguments, "--until-return", str(goal), "--max-env-steps", str(budget), seed=seed)
        return {"met": result["stopped_by"] == "return" and result["eval_return"] >= goal, **result}

    return Line(f"learning-{name}", issue, f"{words} >= {goal:g} within {budget:,} env steps", run)


LINES = [
    reaches("impala-cartpole", 2, "impala on CartPole-v1", "impala", "CartPole-v1", goal=475, budget=400_000),
    reaches("ppo-cartpole", 2, "ppo on CartPole-v1", "ppo", "CartPole-v1", goal=475, budget=300_000),
    reaches("a2c-cartpole", 2, "a2c on CartPole-v1", "a2c", "CartPole-v1", goal=450, budget=1_000_000),
    reaches("ppo-pendulum", 2, "ppo on Pendulum-v1", "ppo", "Pendulum-v1", goal=-300, budget=400_000),
    reaches("lstm-cartpole", 2, "vtrace with LSTM on a CartPole without velocities", "impala", "shoal/CartPolePOMDP-v0",
            goal=350, budget=2_000_000),
    reaches("impala-catch", 2, "impala on Catch", "impala", "shoal/Catch-v0", goal=0.95, budget=200_000),
    reaches("ppo-catch", 2, "ppo on Catch", "ppo", "shoal/Catch-v0", goal=0.95, budget=200_000),
    reaches("a2c-catch", 2, "a2c on Catch", "a2c", "shoal/Catch-v0", goal=0.95, budget=200_000),
]
