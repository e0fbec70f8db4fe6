"""A best response that is learned: how exploitable a policy is in a game that is too large to compute it.

A new policy learns with PPO against the policy, which plays as it did in training, on every side in turn. What it wins in
fresh games afterwards is a lower bound of what a true best response would win.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.experiment.evaluation import Evaluation

if TYPE_CHECKING:
    from shoal.experiment.loaded_run import Run

__all__ = ["best_response"]

ANSWER, RIVAL = "answer", "rival"


def best_response(run: Run, name: str | None, env_steps: int, episodes: int, seed: int) -> Evaluation:
    """Fresh games of a policy that was trained for `env_steps` against a run's policy, as the new policy saw them."""
    from shoal.experiment.run import train

    prepared, policy = run.prepared, name or next(iter(run.prepared.policies))
    if prepared.spec.seats_per_env == 1 or prepared.seating is not None:
        raise ConfigError(f"--best-response needs a game with one policy on all sides (--policies self-play or league), which "
                          f"{run.directory} is not; leave it out")
    agents = prepared.source.describe_multi_agent()[0].agents

    def policy_of(agent: str, episode: int) -> str:
        return ANSWER if agents.index(agent) == episode % len(agents) else RIVAL

    with tempfile.TemporaryDirectory() as folder:
        answer = train("ppo", prepared.plan.env.target, policies={ANSWER: None, RIVAL: f"{run.directory}:{policy}"},
                       policy_of=policy_of, runtime="inline", actors=1, seed=seed, max_env_steps=env_steps, tensorboard=False,
                       envs=dataclasses.asdict(prepared.plan.experiment.envs), console={"mode": "none"},
                       run_dir=f"{folder}/answer")
        return answer.evaluate(episodes, seed, run.as_opponent(answer, policy, greedy=False), ANSWER)
