"""What a run directory knows of a league: its newest checkpoint, its vault, its evaluations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.rundir import RunDir
from shoal.league.payoff import PayoffTable
from shoal.league.pool_nash import nash_weights
from shoal.league.vault import Vault
from shoal.telemetry.outputs import read_lines

if TYPE_CHECKING:
    from shoal.experiment.loaded_run import Run

__all__ = ["LeagueRecord", "PoolNash", "exploitability_over_time"]

POOL = 60  # snapshots that an equilibrium is computed over, the newest ones


@dataclass(frozen=True)
class PoolNash:
    """The equilibrium of the game in which each side picks a snapshot of the league."""

    exploitability: float
    weights: dict[str, float]


class LeagueRecord:
    """A league as of its newest checkpoint."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir
        newest = rundir.checkpoints().sound(tables=False)
        path = None if newest is None else newest / "coordinator-0.safetensors"
        if path is None or not path.is_file():
            raise ConfigError(f"{rundir.path} is not a league; train one with `shoal train league shoal/RockPaperScissors-v0`")
        self.state: dict[str, Any] = json.loads(bytes(TensorFiles().load(path)["league"]))
        self.table, self.vault = PayoffTable.from_state(self.state["league"]["payoff"]), Vault(rundir.path / "vault")

    @property
    def players(self) -> dict[str, tuple[int, int, list[str]]]:
        """By name: env steps, env steps when it was saved last, and its snapshots."""
        return dict(self.state["league"]["players"])

    @property
    def snapshots(self) -> list[str]:
        """The oldest first."""
        return list(self.state["league"]["parent"])

    @cached_property
    def exploitability(self) -> list[tuple[int, float]]:
        """Of the first main agent as it was at each evaluation: (env steps of the league, exploitability)."""
        return exploitability_over_time(self.rundir)

    def pool_nash(self, run: Run) -> PoolNash | None:
        """Over the snapshots; None where the game is too large, or the policy has no probabilities."""
        from shoal.envs.exploitability import exploitability, mixture, payoffs
        from shoal.roles.coordinator import stored_tree
        from shoal.roles.matches import probabilities_of, quick_tree

        algorithm, names = run.prepared.algorithm, self.snapshots[-POOL:]
        tree = quick_tree(algorithm.policy(), run.prepared.source)
        if tree is None:
            return None
        policies = []
        for name in names:
            policy = algorithm.policy()
            policy.load(stored_tree(self.vault, name, algorithm.published_layout()))
            policies.append(probabilities_of(policy, tree))
        weights = nash_weights(payoffs(tree, policies))
        found = exploitability(tree, mixture(tree, policies, weights)).exploitability
        return PoolNash(float(found), {name: float(weight) for name, weight in zip(names, weights, strict=True)})


def exploitability_over_time(rundir: RunDir) -> list[tuple[int, float]]:
    """What the evaluations of a run found: (env steps, exploitability), one for each version that the metrics show."""
    found: dict[float, tuple[int, float]] = {}
    for shot in read_lines(rundir.metrics_file):
        if shot.get("kind") == "snapshot" and shot.get("exploitability") is not None:
            found.setdefault(float(shot.get("eval_version") or 0), (int(shot["env_steps"]), float(shot["exploitability"])))
    return list(found.values())
