"""What a policy sees of steps: the observation and, where a net wants them, the previous action and reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.acting import StepView
from shoal.core import Tree
from shoal.slots import map_tree

if TYPE_CHECKING:
    from shoal.envs import Step

__all__ = ["StepViewer", "executed", "rows_of_view"]


def executed(action: Tree, step: Step) -> Tree:
    """What the environment did: the action that was chosen, unless it reports another one."""
    return action if step.executed_action is None else step.executed_action


def rows_of_view(view: StepView, rows: np.ndarray) -> StepView:
    """What these seats see."""

    def some(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else array[rows]

    return StepView(map_tree(lambda x: x[rows], view.observation), view.first[rows], some(view.action_mask),
                    None if view.prev_action is None else map_tree(lambda x: x[rows], view.prev_action), some(view.prev_reward))


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
            tail = (-1, *(1,) * (np.ndim(done) - 1))
            asked: Any = True if step.acts is None else step.acts  # a seat that waits keeps what it saw
            np.multiply(done, going.reshape(tail), out=self._prev_action, casting="unsafe",
                        where=asked if asked is True else asked.reshape(tail))
            np.multiply(step.reward, going, out=self._prev_reward, where=asked)
        view.observation, view.first, view.action_mask = step.observation, step.first, step.action_mask
        return view
