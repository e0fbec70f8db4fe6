"""Learning: presets as shipped reach their thresholds within their budgets; each seed counts."""

from __future__ import annotations

from typing import Any

from evidence.lines import Line, train

__all__ = ["LINES"]

PATIENCE_SECONDS = 600  # for a run that any number of steps may be given


def reaches(name: str, issue: int, words: str, *arguments: str, goal: float, budget: int | None, minutes: int = 0) -> Line:
    """A training run that must stop because the return was reached; without a budget after any number of env steps, and with
    `minutes` within these."""
    limit = ("--max-seconds", str(PATIENCE_SECONDS)) if budget is None else ("--max-env-steps", str(budget))
    if minutes:
        limit = (*limit, "--max-seconds", str(60 * minutes))

    def run(seed: int) -> dict[str, Any]:
        result = train(*arguments, "--until-return", str(goal), *limit, seed=seed)
        return {"met": result["stopped_by"] == "return" and result["eval_return"] >= goal, **result}

    within = "after any number of" if budget is None else f"within {budget:,}"
    clock = f" and {minutes} minutes" if minutes else ""
    return Line(f"learning-{name}", issue, f"{words} >= {goal:g} {within} env steps{clock}", run)


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
    *(reaches(f"{name}-cartpole", 3, f"{name} on CartPole-v1", name, "CartPole-v1", goal=475, budget=None)
      for name in ("impala_throughput", "ppo_throughput", "ppo_quick")),
]
