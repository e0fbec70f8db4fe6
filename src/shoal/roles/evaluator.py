"""The Evaluator: fresh episodes with one published version, and the end of a run whose return is reached.

    weights (broadcast) ──▶ Evaluator ──▶ its own environments

A step of the role is one step of its environments, so that it can be checkpointed, told something or stopped in the middle of an
evaluation: nobody ever waits for it. One that is stopped half-way counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from shoal.acting import Progress
from shoal.core import Me, Reader, Tree, Wait, any_of
from shoal.envs import BatchedEnv
from shoal.envs.split_env import SplitEnv
from shoal.roles.episodes import EpisodePlay
from shoal.roles.goals import METRICS
from shoal.roles.matches import exploitability_of, match_rates, quick_tree
from shoal.roles.parts import Parts
from shoal.runtime import Program
from shoal.runtime.wires import BroadcastWire
from shoal.slots import leaves, map_tree

__all__ = ["Evaluator", "add_evaluator"]

SIDE_BY_SIDE = 100       # environments at most
SLOW_SECONDS = 0.001     # for a step of one environment: from here on several processes are worth it
CHANCE = 1.645           # standard errors that luck exceeds one time in twenty
STEPS_EACH = 1_000       # of the last evaluation's env steps, for each of its environments


def add_evaluator(program: Program, parts: Parts, weights: BroadcastWire | None) -> None:
    """Add the role that evaluates published weights, where evaluations are wanted."""
    if parts.eval.enabled and weights is not None:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)


class Evaluated(NamedTuple):
    """A version whose return is known."""

    scores: dict[str, float]
    """By the names of goals.METRICS; always its return."""
    episodes: int
    version: int
    weights: Tree
    std: float = 0.0
    """Deviation, from episode to episode, of the score that versions are compared by."""

    def sentence(self) -> str:
        return f"{self.scores['return']:,.2f} over {self.episodes:,} episode{'s' * (self.episodes != 1)}"

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """For a checkpoint, where `name` is best or last."""
        return {**{f"{name}_{metric}": np.array([value]) for metric, value in self.scores.items()},
                f"{name}_episodes": np.array([self.episodes]), f"{name}_version": np.array([self.version]),
                f"{name}_std": np.array([self.std]),
                **{f"{name}/{'/'.join(path)}": leaf for path, leaf in leaves(self.weights)}}


class Evaluator:
    """Plays fresh episodes with one published version; ends the run when the return is reached twice."""

    def __init__(self, me: Me, parts: Parts, weights: Reader) -> None:
        self.me, self.weights, self.plan, self.source = me, weights, parts.eval, parts.env.against(parts.eval.against)
        self.policy, self.record = parts.algorithm.policy(), parts.algorithm.record
        self.layout = parts.algorithm.published_layout()
        self.published = self.layout.empty()
        self.seeds = me.rng("evaluation")
        self.rng = torch.Generator().manual_seed(int(self.seeds.integers(2**31)))
        self.explore = None if self.plan.greedy else parts.algorithm.explore
        self.rows, self.processes = min(self.plan.episodes, SIDE_BY_SIDE), 1
        self.env: BatchedEnv = self._make(self.rows)
        self.env_seconds = 0.0  # for a step of one of them
        self.play: EpisodePlay | None = None
        self.tree = quick_tree(self.policy, parts.env) if parts.eval.against is not None else None
        self.version, self.due = 0, 0
        self.first_scores: dict[str, float] | None = None  # of an evaluation that reached the goal and is to be confirmed
        self.best: Evaluated | None = None
        self.latest: Evaluated | None = None
        self.last: Evaluated | None = None  # only once the last evaluation is over
        self.versions = 0                   # evaluated so far
        self.done = self.settled = self.ending = False
        self._forget()  # what a predecessor had begun

    # ------------------------------------------------------------------ one step of its environments
    @property
    def keeps_turn(self) -> bool:
        return self.play is not None

    async def step(self) -> None:
        if self.play is None:
            await self._await_version()
        if self.play is None:
            return
        stats, play = self.me.stats, self.play  # the very first one may compile, as the first step of any role
        with stats.phase("evaluate"):
            stats.add("eval_env_steps", play.step())
        stats.set("eval_episodes_played", play.episodes)
        self.me.beat()
        if play.over:
            self._finish(play)

    async def _await_version(self) -> None:
        """Wait until there is something to evaluate, and begin."""
        self.settled = True  # nothing is changed before there is something new
        told = Wait(lambda: self.play is not None, "control", "a last evaluation")
        await (told if self.done or self.ending else any_of(self.weights.newer_than(self.version), told))
        self.settled = False
        if self.play is not None:
            return
        self.version = self.weights.pull(self.published)
        progress = Progress.of(self.published["progress"])
        period = self.plan.every_learner_steps
        done = progress.env_steps if period is None else progress.learner_steps
        if done >= self.due:
            self.due = done + (period or self.plan.every_env_steps)
            self._load()
            self._remake(self.rows, self.plan.free_cores)
            self._begin()

    def _make(self, rows: int) -> BatchedEnv:
        return self.source.make(rows)

    def _load(self) -> None:
        """Play with the version that was pulled from now on."""
        self.policy.load(self.published)

    def _remake(self, rows: int, cores: int) -> None:
        """Environments for the next evaluation: slow ones in several processes, where cores are free."""
        processes = min(rows, cores) if self.env_seconds >= SLOW_SECONDS else 1
        if (rows, processes) == (self.rows, self.processes):
            return
        self.env.close()
        self.rows, self.processes = rows, processes
        self.env = self._make(rows) if processes == 1 else SplitEnv(self.source.make, rows, processes)

    def _begin(self, env_steps: int | None = None) -> None:
        """Begin to evaluate the version that the policy has."""
        progress, env = Progress.of(self.published["progress"]), self.env
        explore = None if self.explore is None else self.explore(0, 1, env.num_seats, progress)
        longest = max(self.plan.max_episode_steps, env.max_episode_steps or 0)
        seed = int(self.seeds.integers(2**31))
        self.play = EpisodePlay(self.policy, self.record, env, self.plan.episodes, seed, self.rng, explore, env_steps=env_steps,
                                max_episode_steps=longest)
        self.me.stats.set("eval_episodes_planned", self.plan.episodes)
        self.me.stats.set("eval_episodes_played", 0)

    def _finish(self, play: EpisodePlay) -> None:
        """The result of an evaluation. One that reaches the goal is played again before it counts."""
        self._forget()
        scores, goal = self._report(play), self.plan.goal
        confirms, self.first_scores = self.first_scores, None
        if goal is not None and goal.reached(scores) and not self.ending:
            if confirms is None:
                self.first_scores = scores
                self._begin()
                return
            self.done = True
            self._keep(scores, play)
            self.me.finish(goal.reason)
        else:
            worse = confirms is not None and self._rank(confirms) < self._rank(scores)
            self._keep(confirms if worse and confirms is not None else scores, play)

    @property
    def _metric(self) -> str:
        """What versions are compared by: the goal's metric; without a goal exploitability, where it is computed, else the return.
        The return against random play may say nothing: in rock-paper-scissors every policy's is 0."""
        if self.plan.goal is not None:
            return self.plan.goal.metric
        return "return" if self.tree is None else "exploitability"

    def _rank(self, scores: Mapping[str, float]) -> float:
        """Higher is better."""
        if self.plan.goal is not None:
            return self.plan.goal.rank(scores)
        return -scores[self._metric] if self._metric == "exploitability" else scores[self._metric]

    def _forget(self) -> None:
        """No evaluation is under way."""
        if self.play is not None:
            self.env_seconds = self.play.env_seconds * self.processes
        self.play = None
        self.me.stats.set("eval_episodes_planned", 0)

    def _report(self, play: EpisodePlay) -> dict[str, float]:
        stats, returns = self.me.stats, play.returns
        scores = {"return": float(returns.mean()), **(match_rates(returns) if self.plan.against is not None else {})}
        if self.tree is not None:
            scores["exploitability"] = exploitability_of(self.policy, self.tree)
        for name, value in list(scores.items())[1:]:
            stats.set(name, value)
        for name, value in (("eval_return", returns.mean()), ("eval_std", returns.std()), ("eval_episodes", len(returns)),
                            ("eval_version", self.version)):
            stats.set(name, float(value))
        stats.add("evaluations")
        if play.unfinished:
            self.me.note(f"{play.unfinished} of {len(returns)} episodes of an evaluation had not ended after "
                         f"{int(play.lengths.max()):,} steps and were counted as they were (--eval.max-episode-steps)")
        return scores

    def _keep(self, scores: Mapping[str, float], play: EpisodePlay) -> None:
        """Remember the best version, and the last one at the end: what `shoal play` and `run.policy` use."""
        std = self._deviation(scores, play)
        self.latest = found = Evaluated(dict(scores), play.episodes, self.version, map_tree(np.copy, self.published), std)
        if self.best is None or self._better(found, self.best):
            self.best = found
        self.versions += 1
        if self.ending:
            self.last = found

    def _deviation(self, scores: Mapping[str, float], play: EpisodePlay) -> float:
        """From episode to episode, of the score that versions are compared by."""
        metric = self._metric
        if metric == "return":
            return float(play.returns.std())
        share = scores[metric]
        return math.sqrt(share * (1 - share)) if metric in ("win_rate", "loss_rate") else 0.0  # exploitability is computed

    def _better(self, found: Evaluated, best: Evaluated) -> bool:
        """Whether a version takes the place of the best so far. One with fewer episodes, as the last may have, must be better by
        more than chance: a few lucky episodes prove nothing. That of the beginning is no rival; an untrained net plays nearly
        uniformly, which some games cannot exploit."""
        if self.plan.goal is None and self._metric == "exploitability" and self.versions < 2:
            return True
        gain = self._rank(found.scores) - self._rank(best.scores)
        if found.episodes >= best.episodes or self.versions < 2:
            return gain >= 0
        noise = CHANCE * max(found.std, best.std) * math.sqrt(1 / found.episodes + 1 / best.episodes)
        if 0 <= gain <= noise:
            self.me.note(f"version {found.version:,}, with {found.sentence()}, is not above version {best.version:,}, with "
                         f"{best.sentence()}, by more than chance; the latter stays the best")
        return gain > noise

    # ------------------------------------------------------------------ the end of a run
    def set(self, *, last_env_steps: int) -> None:
        """Drop the evaluation under way and evaluate the newest version, in about `last_env_steps` decisions; 0 ends that now, with
        the episodes that have ended."""
        if not last_env_steps:
            if self.ending and self.play is not None:
                self._cut_short(self.play)
            return
        self._forget()
        self.ending, self.first_scores = True, None
        newest = self.weights.version
        if self.latest is not None and self.latest.version == newest:
            self.last = self.latest  # it has just been evaluated
        elif newest:
            self.version = self.weights.pull(self.published)
            self._load()
            self._remake(max(1, min(self.rows, last_env_steps // STEPS_EACH)), self.plan.last_cores)
            self._begin(last_env_steps)

    def _cut_short(self, play: EpisodePlay) -> None:
        if play.episodes:
            self._finish(play)
        else:
            self._forget()

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray]:
        best = self.best or Evaluated({"return": -np.inf}, 0, 0, self.layout.empty())
        return {"versions": np.array([self.versions]), "confirmed": np.array([self.done]), **best.arrays("best"),
                **(self.last.arrays("last") if self.last is not None else {})}

    def load(self, state: dict[str, np.ndarray]) -> None:
        if not np.isfinite(state["best_return"][0]):
            return
        weights = self.layout.empty()
        for path, leaf in leaves(weights):
            leaf[...] = state[f"best/{'/'.join(path)}"]
        episodes, version = (int(state[name][0]) if name in state else 0 for name in ("best_episodes", "best_version"))
        scores = {name: float(state[f"best_{name}"][0]) for name in METRICS if f"best_{name}" in state}
        std = float(state["best_std"][0]) if "best_std" in state else 0.0
        self.best = Evaluated(scores, episodes, version, weights, std)
        if self._metric not in scores:
            self.best = None  # it was judged by something else
        self.versions = int(state["versions"][0]) if "versions" in state else 2  # of an earlier version, which did not count them

    def close(self) -> None:
        self.env.close()
