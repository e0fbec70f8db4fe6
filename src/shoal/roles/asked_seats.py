"""Acting for the seats that are asked, where not all are at every step (shoal.envs.multi_agent)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.acting import StepView
from shoal.algorithms.records.step_view import rows_of_view
from shoal.core import Tree
from shoal.slots import assign, map_tree

__all__ = ["AskedSeats"]


class AskedSeats:
    """Lets a policy act for some of B seats and keeps what every seat decided last; the recurrent states of the others wait."""

    def __init__(self, act: Callable[..., tuple[Tree, Tree, Tree]], state: Tree) -> None:
        """`act` is a Policy.act, `state` the initial state of all seats."""
        self._act, self._state = act, state
        self.rows = np.zeros(0, np.int64)
        """[K]: the seats that acted last."""
        self.view: StepView
        """[K]: what they saw."""
        self.action: Any = None
        """[B, ...]: every seat's last decision, ..."""
        self.before: Tree = map_tree(_copy, state)
        """[B, ...]: ... the state that it was made with, ..."""
        self.extras: dict[str, np.ndarray] = {}
        """[B, ...]: ... and what the policy said of it."""

    def act(self, view: StepView, acts: np.ndarray, explore: np.ndarray | None, rng: torch.Generator) -> np.ndarray:
        """Act for the seats with `acts` [B] on what they see in `view`; returns `action`, old ones of the others included."""
        self.rows = rows = np.flatnonzero(acts)
        self.view = rows_of_view(view, rows)
        state = map_tree(lambda x: x[rows], self._state)
        action, following, extras = self._act(self.view, state, None if explore is None else explore[rows], rng)
        if self.action is None:
            self.action = np.zeros((len(acts), *np.shape(action)[1:]), np.asarray(action).dtype)
            self.extras = {name: np.zeros((len(acts), *np.shape(x)[1:]), np.asarray(x).dtype) for name, x in extras.items()}
        self.action[rows] = action
        for name, values in extras.items():
            self.extras[name][rows] = values
        assign(self.before, rows, state)
        assign(self._state, rows, following)
        decided: np.ndarray = self.action
        return decided

    def of_rows(self, tree: Tree) -> Tree:
        """The rows of `before` or `extras` that acted last."""
        return map_tree(lambda x: x[self.rows], tree)


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else np.array(x)
