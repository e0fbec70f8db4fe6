"""A batch of items of a replay table as a learner needs it: tensors, importance weights, and the share of this learner.

A batch has `probability` [B], with which each item was drawn, and `table_size` [1] or [B], of the table it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shoal.core import Tree
from shoal.ops import priorities

__all__ = ["ItemMinibatch", "item_minibatch", "item_sums"]

ABSENT = frozenset(("probability", "table_size", "weights_version", "label_version", "key", "time", "observation_moments"))
"""No loss needs them."""


@dataclass
class ItemMinibatch:
    """A batch and what is true while it is learned from."""

    items: Tree
    weight: torch.Tensor
    """Of each item [B]: makes up for how often it is drawn."""
    scale: float
    """What the sum of this learner's losses is multiplied by, so that the learners' mean is that of the joined batch."""


def item_sums(batch: Tree, index: int, learners: int) -> np.ndarray:
    """What learners add up: how many they are, how many items they have, and in a place for each learner the smallest N P(i) of its
    items. From the smallest of all follows the largest importance weight of the joined batch, whatever the exponent."""
    places = np.zeros(learners)
    places[index] = (np.asarray(batch["table_size"]) * batch["probability"]).min()
    return np.array([1.0, len(batch["probability"]), *places])


def item_minibatch(batch: Tree, sums: np.ndarray, beta: float, tensor: Callable[[Tree], Tree],
                   small: Callable[[np.ndarray], torch.Tensor]) -> ItemMinibatch:
    """`beta` is the exponent of the importance weights (N P(i))^-beta, which are divided by the largest of all learners'. `tensor`
    and `small` are those of PhasedLearn."""
    learners, count, places = sums[0], sums[1], sums[2:]
    if learners > len(places):
        raise ValueError(f"the sums of {int(learners)} learners were made for {len(places)}: each learner must call "
                         "sums(batch, index, learners) with its own index and the number of all learners")
    raw = priorities.importance_weights(batch["probability"], batch["table_size"], beta)
    largest = raw.max()
    if len(places) > 1:
        smallest = places[places > 0].min()
        mine = (np.asarray(batch["table_size"]) * batch["probability"]).min() == smallest
        largest = largest if mine else smallest**-beta
    weight = raw / largest
    items = tensor({name: part for name, part in batch.items() if name not in ABSENT})
    return ItemMinibatch(items, small(weight.astype(np.float32)), float(learners / count))
