"""Rows of several groups of environments, side by side for one forward pass and apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.acting import StepView
from shoal.core import Tree
from shoal.slots import map_tree

__all__ = ["join_rows", "join_views", "rows_of"]


def join_rows(trees: Sequence[Tree]) -> Tree:
    """One below the other; None where there is none."""
    if trees[0] is None:
        return None
    if isinstance(trees[0], dict):
        return {key: join_rows([tree[key] for tree in trees]) for key in trees[0]}
    return np.concatenate([np.asarray(tree) for tree in trees])


def join_views(views: Sequence[StepView]) -> StepView:
    if len(views) == 1:
        return views[0]
    names = ("observation", "first", "action_mask", "prev_action", "prev_reward")
    return StepView(*(join_rows([getattr(view, name) for view in views]) for name in names))


def rows_of(tree: Tree, position: int, count: int) -> Any:
    """The rows of the `position`-th group of `count` rows."""
    return map_tree(lambda x: x[position * count : (position + 1) * count], tree)
