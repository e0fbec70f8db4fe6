"""What a run directory knows of a league: its newest checkpoint, its vault, its evaluations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shoal.errors import CheckpointError, ConfigError
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.rundir import RunDir, numbers
from shoal.league.payoff import PayoffTable
from shoal.league.pool_nash import nash_weights
from shoal.league.vault import Vault
from shoal.telemetry.outputs import read_lines

if TYPE_CHECKING:
    from shoal.experiment.loaded_run import Run

__all__ = ["LeagueRecord", "PoolNash", "exploitability_over_time"]

POOL = 500  # snapshots that an equilibrium is computed over, the newest ones


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
        if newest is None and rundir.config().get("policies") == "league":
            raise ConfigError(f"{rundir.path} has no checkpoint yet; follow it with `shoal watch {rundir.path}`, and ask again "
                              "later")
        if path is None or not path.is_file():
            raise ConfigError(f"{rundir.path} is not a league; train one with `shoal train league shoal/RockPaperScissors-v0`")
        self.vault = Vault(rundir.path / "vault")
        try:
            self._read(json.loads(bytes(TensorFiles().load(path)["league"])))
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path} is not what a league had saved: {type(error).__name__}: {error}; remove this "
                                  "checkpoint, and the one before it is read") from None

    def _read(self, state: dict[str, Any]) -> None:
        league = state["league"]
        self.table = PayoffTable.from_state(league["payoff"])
        self.players = {name: (int(steps), int(saved), [str(one) for one in snapshots])
                        for name, (steps, saved, snapshots) in league["players"].items()}
        """By name: env steps, env steps when it was saved last, and its snapshots."""
        self.snapshots = list(league["parent"].keys())
        """The oldest first."""
        self.resets = {name: int(state["resets"][name]) for name in self.players}
        self.playing = frozenset(str(name) for name in state.get("playing", self.players))
        """Those that learn now; others have not begun, or have ended."""

    def origin(self, snapshot: str) -> tuple[int, str] | None:
        """Its player's env steps when it was saved, and the snapshot before it; None where its record is damaged."""
        try:
            about = self.vault.about(snapshot)
            return int(about["steps"]), str(about["parent"] or "the beginning")
        except (CheckpointError, KeyError, TypeError, ValueError, OverflowError):
            return None

    @cached_property
    def exploitability(self) -> list[tuple[int, float]]:
        """Of the first main agent as it was at each evaluation: (env steps of the league, exploitability)."""
        return exploitability_over_time(self.rundir)

    def pool_nash(self, run: Run) -> PoolNash | None:
        """Over the snapshots that can be read; None where there are none, the game is too large, or the policy has no
        probabilities."""
        from shoal.envs.exploitability import exploitability, mixture, payoffs
        from shoal.roles.coordinator import stored_tree
        from shoal.roles.matches import probabilities_of, quick_tree

        algorithm, names = run.prepared.algorithm, self.snapshots[-POOL:]
        tree = quick_tree(algorithm.policy(), run.prepared.source)
        if tree is None:
            return None
        policies = {}
        for name in names:
            policy = algorithm.policy()
            try:
                policy.load(stored_tree(self.vault, name, algorithm.published_layout()))
            except (CheckpointError, KeyError, ValueError):  # damaged: a league plays on without it too
                continue
            policies[name] = probabilities_of(policy, tree)
        if not policies:
            return None
        weights = nash_weights(payoffs(tree, list(policies.values())))
        found = exploitability(tree, mixture(tree, list(policies.values()), weights)).exploitability
        return PoolNash(float(found), {name: float(weight) for name, weight in zip(policies, weights, strict=True)})


def exploitability_over_time(rundir: RunDir) -> list[tuple[int, float]]:
    """What the evaluations of a run found: (env steps, exploitability), one for each version that the metrics show."""
    found: dict[float, tuple[int, float]] = {}
    for shot in read_lines(rundir.metrics_file):
        known = numbers(shot)
        if shot.get("kind") == "snapshot" and {"exploitability", "env_steps"} <= set(known):
            found.setdefault(known.get("eval_version", 0), (int(known["env_steps"]), float(known["exploitability"])))
    return list(found.values())
