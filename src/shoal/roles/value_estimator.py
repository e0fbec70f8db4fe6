"""The value estimator: fitted Q of the newest weights on the recording that is learned from; ends a run whose goal is reached.

    weights (broadcast) ──▶ ValueEstimator ──▶ fqe

It is an evaluator for runs without a simulator (`--until "fqe >= X"`). Nets go on from one version to the next, so that only what
has changed has to be learned. A step of the role is a few updates: nobody waits for it. The value is that of the greedy policy
where episodes begin, as `shoal data evaluate` estimates it, without intervals.
"""

from __future__ import annotations

import numpy as np

from shoal.acting import Progress
from shoal.core import Me, Reader
from shoal.errors import ConfigError
from shoal.offline import open_demos
from shoal.offline.fitted_q import FittedQ, FittedQPlan
from shoal.offline.logged_steps import LoggedSteps, choices_of
from shoal.roles.parts import Parts
from shoal.runtime import Program
from shoal.runtime.wires import BroadcastWire

__all__ = ["ValueEstimator", "add_value_estimator"]

PLAN = FittedQPlan(updates=2_000)
SOME = 50  # updates in a step


def add_value_estimator(program: Program, parts: Parts, weights: BroadcastWire) -> None:
    """Add the role, where a goal asks for it."""
    if parts.eval.fitted is None:
        return
    if parts.algorithm.policy().initial_state(1):
        raise ConfigError(f'--until "{parts.eval.fitted}" does not fit --algorithm {parts.algorithm.name}, whose policy has a '
                          "memory; give --max-learner-steps")
    program.add("value_estimator", ValueEstimator, parts=parts, weights=weights.reader)


class ValueEstimator:
    """Estimates what published versions are worth; ends the run when two in a row reach the goal."""

    def __init__(self, me: Me, parts: Parts, weights: Reader) -> None:
        assert parts.demos is not None and parts.eval.fitted is not None
        self.me, self.weights, self.goal, self.period = me, weights, parts.eval.fitted, parts.eval.every_learner_steps or 1
        self.policy, self.published = parts.algorithm.policy(), parts.algorithm.published_layout().empty()
        self.steps = LoggedSteps.of(open_demos(parts.demos))
        self.fitted: FittedQ | None = None
        self.left = self.version = self.due = 0
        self.reached = self.done = False

    @property
    def keeps_turn(self) -> bool:
        return self.left > 0

    async def step(self) -> None:
        if not self.left:
            await self._await_version()
            return
        assert self.fitted is not None
        with self.me.stats.phase("evaluate"):
            for _ in range(min(SOME, self.left)):
                self.fitted.update()
                self.left -= 1
        self.me.beat()
        if not self.left:
            self._finish(float(self.fitted.start_value()[0]))

    async def _await_version(self) -> None:
        await self.weights.newer_than(self.version)
        self.version = self.weights.pull(self.published)
        steps = Progress.of(self.published["progress"]).learner_steps
        if self.done or steps < self.due:
            return
        self.due = steps + self.period
        self.policy.load(self.published)
        choices = choices_of(self.policy, self.steps, None)
        if self.fitted is None:
            self.fitted = FittedQ(self.steps, choices, PLAN, np.ones((1, len(self.steps.lengths))))
        else:
            self.fitted.follow(choices)
        self.left = PLAN.updates - self.fitted.done

    def _finish(self, value: float) -> None:
        self.me.stats.set("fqe", value)
        before, self.reached = self.reached, self.goal.reached({"fqe": value})
        if before and self.reached:
            self.done = True
            self.me.finish(self.goal.reason)
