"""What a policy sees of steps: the observation, and what was done and earned before, where a net wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core import StepView, Tree

if TYPE_CHECKING:
    from shoal.envs import Step

__all__ = ["Sight"]


class Sight:
    """Turns steps into StepViews. `view` is the same object every time."""

    def __init__(self, prev_action: np.ndarray | None = None) -> None:
        """`prev_action` is a zero action of all seats [B, ...]; None where the net does not look back."""
        self.view: Any = StepView(None, None)  # type: ignore[arg-type]
        self._looks_back = prev_action is not None
        if prev_action is not None:
            self.view.prev_action, self.view.prev_reward = prev_action, np.zeros(len(prev_action), np.float32)

    def of(self, step: Step, action: Tree | None = None) -> StepView:
        """The view of `step`, to which `action` led; an episode begins with neither action nor reward."""
        view = self.view
        if self._looks_back and action is not None:
            done = action if step.executed_action is None else step.executed_action
            going = ~step.first
            np.multiply(done, going.reshape(-1, *(1,) * (np.ndim(done) - 1)), out=view.prev_action, casting="unsafe")
            np.multiply(step.reward, going, out=view.prev_reward)
        view.observation, view.first, view.action_mask = step.observation, step.first, step.action_mask
        return view
