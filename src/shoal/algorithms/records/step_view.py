"""What a policy sees of steps: the observation and, where a net wants them, the previous action and reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shoal.core import Tree
from shoal.learning import StepView

if TYPE_CHECKING:
    from shoal.envs import Step

__all__ = ["StepViewer", "executed"]


def executed(action: Tree, step: Step) -> Tree:
    """What the environment did: the action that was chosen, unless it reports another one."""
    return action if step.executed_action is None else step.executed_action


class StepViewer:
    """Turns steps into StepViews. `view` is the same object every time."""

    def __init__(self, prev_action: np.ndarray | None = None) -> None:
        """`prev_action` is a zero action of all seats [B, ...]; None where the net does not see it."""
        self.view = StepView(None, np.zeros(0, bool))
        self._prev_action, self._prev_reward = prev_action, np.zeros(0 if prev_action is None else len(prev_action), np.float32)
        if prev_action is not None:
            self.view.prev_action, self.view.prev_reward = prev_action, self._prev_reward

    def of(self, step: Step, action: Tree | None = None) -> StepView:
        """The view of `step`, to which `action` led; an episode begins with neither action nor reward."""
        view = self.view
        if self._prev_action is not None and action is not None:
            done, going = executed(action, step), ~step.first
            np.multiply(done, going.reshape(-1, *(1,) * (np.ndim(done) - 1)), out=self._prev_action, casting="unsafe")
            np.multiply(step.reward, going, out=self._prev_reward)
        view.observation, view.first, view.action_mask = step.observation, step.first, step.action_mask
        return view
