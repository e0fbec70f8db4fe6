"""A run that has ended, or that was loaded from its directory: its policies, to act with and to evaluate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import CheckpointError, ConfigError
from shoal.experiment.policy_choice import PolicyChoice, choose_policy, policy_files
from shoal.experiment.prepare import Prepared
from shoal.experiment.rundir import RunDir
from shoal.telemetry.console import counted

if TYPE_CHECKING:
    import torch

    from shoal.core import Tree
    from shoal.envs import BatchedEnv
    from shoal.envs.opponent_env import OpponentMaker
    from shoal.experiment.evaluation import Evaluation
    from shoal.experiment.policies import PreparedPolicy
    from shoal.experiment.trained_policy import TrainedPolicy

__all__ = ["Run", "compute_threads"]

SHOWN = 4  # snapshots in a sentence


@dataclass(repr=False)
class Run:
    """A run that has ended (or that was loaded from its directory)."""

    directory: Path
    summary: dict[str, Any]
    prepared: Prepared
    checkpoint: str | None = None
    """The name of the checkpoint that is used; none: the newest."""

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        from shoal.experiment.run_card import run_card

        return run_card(f"{self.prepared.plan.title} on {self.prepared.plan.env.name}", self.directory, self.summary)

    def __repr__(self) -> str:
        plan, summary = self.prepared.plan, self.summary
        shown = [f"{name} {summary[name]:,.6g}" for name in ("env_steps", "eval_return") if summary.get(name) is not None]
        return f"<Run {self.directory}: {', '.join([f'{plan.title} on {plan.env.name}', *shown])}>"

    @cached_property
    def _checkpoint(self) -> Path:
        if self.checkpoint is not None:
            return RunDir(self.directory).checkpoints().named(self.checkpoint)
        newest = RunDir(self.directory).checkpoints().sound(tables=False)
        if newest is None:
            raise CheckpointError(f"{self.directory} has no whole checkpoint; start the run again with `shoal train`")
        return newest

    def _named(self, name: str | None, snapshots: Sequence[str] = ()) -> PreparedPolicy:
        """A policy by its name; the first one that learns without one. `snapshots` could be named too."""
        policies = self.prepared.policies
        if name is not None and name not in policies:
            raise ConfigError(f"{self.directory} has no policy {name}; there are {', '.join(policies)}"
                              f"{_and_snapshots(snapshots, list(policies))}")
        return policies[name] if name is not None else next(iter(policies.values()))

    def choice_of(self, name: str | None = None) -> PolicyChoice:
        """Which version of a policy is used: the best of all evaluated ones of the newest checkpoint, unless the run was trained or
        loaded with policy="last"."""
        return choose_policy(self._checkpoint, self.prepared.plan.experiment.policy, self._named(name).scope)

    def published_by(self, name: str | None = None) -> Tree:
        """The weights of that version."""
        from shoal.experiment.evaluation import published_of

        policy = self._named(name)
        if not policy_files(self._checkpoint, policy.scope):
            raise ConfigError(f"{self.directory}: {policy.name} has not begun to learn; there are {', '.join(self.policies)}")
        return published_of(policy.algorithm, self._checkpoint, self.choice_of(name), policy.scope)

    @cached_property
    def choice(self) -> PolicyChoice:
        """Which version of the policy is used; of the first one where there are several."""
        return self.choice_of()

    @cached_property
    def published(self) -> Tree:
        """The weights of that version."""
        return self.published_by()

    @property
    def policy(self) -> TrainedPolicy:
        """Acts, greedily if not told otherwise, for one observation or a batch; `policy.reset()` at the start of an episode."""
        return next(iter(self.policies.values()))

    @property
    def module(self) -> torch.nn.Module:
        """The policy's network: `run.module(observations)["action"]`, `torch.save(run.module.state_dict(), "policy.pt")`."""
        return self.policy.module

    @cached_property
    def policies(self) -> dict[str, TrainedPolicy]:
        """By name, those that have begun to learn; one policy for all agents is "main" where it has no other name."""
        from shoal.experiment.trained_policy import TrainedPolicy

        return {name: TrainedPolicy(one.algorithm, self.published_by(name), one.raw_observation_space, one.raw_action_space)
                for name, one in self.prepared.policies.items() if policy_files(self._checkpoint, one.scope)}

    @property
    def greedy(self) -> bool:
        """Whether its policies are evaluated with their likeliest actions; otherwise (--eval.no-greedy) with sampled ones."""
        return self.prepared.plan.experiment.eval.greedy

    def as_opponent(self, home: Run, name: str | None = None, greedy: bool | None = None) -> OpponentMaker:
        """This run's policy (one of its policies, or a snapshot of a league) as an opponent of another run's, playing as in this
        run's evaluations; not `greedy`: with sampled actions, as it plays in training. Snapshots always do."""
        from shoal.league.vault import Vault
        from shoal.roles.coordinator import stored_tree
        from shoal.roles.policy_opponent import policy_opponent

        vault = Vault(self.directory / "vault") if self.prepared.league is not None and name not in self.prepared.policies else None
        snapshots = [] if vault is None else vault.names()
        snapshot = name if name in snapshots else None
        mine, theirs = self._named(None if snapshot else name, snapshots), home.prepared.spec
        if (mine.spec.observation_space, mine.spec.action_space) != (theirs.observation_space, theirs.action_space):
            raise ConfigError(f"{self.directory} cannot play against {home.directory}: its policy is for {mine.spec.name}, which "
                              f"has other spaces than {theirs.name}; give a run of the same game")
        if vault is not None and snapshot is not None:
            return policy_opponent(mine.algorithm, stored_tree(vault, snapshot, mine.algorithm.published_layout()), greedy=False)
        return policy_opponent(mine.algorithm, self.published_by(name), self.greedy if greedy is None else greedy)

    def evaluate(self, episodes: int = 100, seed: int = 1_000_000, against: str | Run | OpponentMaker | None = None,
                 policy: str | None = None) -> Evaluation:
        """Fresh episodes of a policy (the first one without a name), greedy where the run's evaluations are; matches against an
        opponent (random, perfect, a run) where one is given or the run had one. Other policies of the run play for the other
        agents."""
        from shoal.experiment.evaluation import evaluate

        opponent, chosen = against or self.prepared.plan.experiment.against, self._named(policy)
        env = self._env(chosen, opponent.as_opponent(self) if isinstance(opponent, Run) else opponent, min(episodes, 100))
        try:
            with compute_threads(1):
                longest = self.prepared.plan.experiment.eval.max_episode_steps
                found = evaluate(chosen.algorithm, self.published_by(policy), env, episodes, seed, longest, self.greedy)
                return found if opponent is None else replace(found, matches=True)
        finally:
            env.close()

    def _env(self, chosen: PreparedPolicy, opponent: str | OpponentMaker | None, num_envs: int) -> BatchedEnv:
        """Where a policy is evaluated: on all seats, on one against an opponent, or on its own among the other policies."""
        from shoal.roles.policy_evaluator import PolicySeats
        from shoal.roles.policy_opponent import policy_opponent

        source, seating = self.prepared.source, self.prepared.seating
        if seating is None or opponent is not None:
            return source.against(opponent).make(num_envs)
        named = self.prepared.named()
        partners = {other.name: policy_opponent(other.algorithm, self.published_by(other.name), self.greedy)
                    for other in self.prepared.several}
        partners |= {other.name: other.fixed for other in named.policies if other.fixed is not None}
        return PolicySeats(source.make_multi_agent(num_envs), named, chosen.name, partners)


def _and_snapshots(snapshots: Sequence[str], players: Sequence[str]) -> str:
    """The end of a sentence: how many there are, and the newest one of each of the first players."""
    newest = {name.rpartition("-")[0]: name for name in snapshots}  # a Vault sorts those of a player by their numbers
    shown = [newest[player] for player in players if player in newest][:SHOWN]
    return f", and {counted(len(snapshots), 'snapshot')} (newest: {', '.join(shown)})" if shown else ""


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """What torch may use in this process meanwhile: small nets are several times slower with threads that wait for
    each other on busy cores, and an inline run must not depend on the number of cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
