"""CURL's part of an algorithm: an encoder of images that is learned by contrast, beside the algorithm's own loss (2004.04136).

    batch ──> three crops: observation (also the query), next observation, key
      the algorithm's phase   its loss, of codes            ──> gradient of its nets, and of the encoder (unless detached)
      encoder                 InfoNCE(f(query) W f'(key))   ──> gradient, added to that one: one step with the sum
                              f' <- m f' + (1 - m) f            f' is the encoder of the target net

Crops are made once, with an offset for each image that all its frames share; policies see the centre. Of several learners each
contrasts its own part of the joined batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from shoal.algorithms.common.item_batch import ItemMinibatch
from shoal.algorithms.common.learn import Loss
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.phases import Phase, TargetSchedule
from shoal.core import Tree
from shoal.nets.representation import RepresentationConfig, RepresentationNetwork, build_representation
from shoal.ops import contrast as ops
from shoal.slots import Field, Layout

__all__ = ["ENCODER", "VIEWS", "Contrast"]

ENCODER = "encoder"
"""The phase of the representation."""
VIEWS = ("query", "key_view")
"""What is compared: two crops of each observation."""
SEED = 2  # added to the learner's: its nets have that one and the next


@dataclass(frozen=True)
class Contrast:
    """Plain data that pickles."""

    config: RepresentationConfig
    weight: float = 1.0
    """What the contrastive loss is multiplied by."""
    momentum: float = 0.95
    """Share of the key encoder that stays, m."""
    logit_scale: float = 1.0
    crops_all: bool = True
    """Whether the algorithm's own loss sees random crops too; otherwise the centre."""
    detached: bool = False
    """Whether the algorithm's own loss leaves the encoder alone."""
    apart: bool = False
    """Whether somebody else learns the encoder."""

    @property
    def codes(self) -> gym.spaces.Box:
        """What the algorithm's nets read."""
        return gym.spaces.Box(-np.inf, np.inf, (self.config.code_size,), np.float32)

    def representation(self, seed: int, learns: bool = False) -> RepresentationNetwork:
        """`learns`: with what compares codes; policies do without."""
        return build_representation(self.config, seed + SEED, learns)

    def feeding(self, phase: Phase) -> Phase:
        """The algorithm's phase whose loss the encoder learns from too."""
        return phase if self.detached else replace(phase, feeds=ENCODER)

    def phase(self, like: Phase) -> Phase:
        """The encoder's own: an optimiser as that of the phase that feeds it. Its target is the key encoder."""
        period = like.target.period_updates if like.target is not None and like.target.tau else 0
        follows = TargetSchedule(period, 1.0 - self.momentum) if self.momentum < 1 else TargetSchedule()
        return replace(like, name=ENCODER, target=follows, feeds="", period_updates=1)

    def with_encoder(self, phases: Sequence[Phase]) -> tuple[Phase, ...]:
        """The phases of an algorithm, the first of which teaches the encoder too; then the encoder's own, unless it is apart."""
        first, *more = phases
        return (self.feeding(first), *more, *(() if self.apart else (self.phase(first),)))

    def views(self, batch: Tree, rng: np.random.Generator) -> Tree:
        """The batch with its crops: two of each observation, and where the algorithm sees crops too, one of those is its own."""
        query, key = self.pair(batch["observation"], rng)
        if not self.crops_all:
            return {**batch, "query": query, "key_view": key}
        return {**batch, "observation": query, "next_observation": self._crop(batch["next_observation"], rng), "key_view": key}

    def pair(self, images: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Two crops of each image, at offsets of their own."""
        return self._crop(images, rng), self._crop(images, rng)

    def compared(self, items: Tree) -> dict[str, Any]:
        """The VIEWS of a minibatch's items."""
        return {"query": items["query" if "query" in items else "observation"], "key_view": items["key_view"]}

    def _crop(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        (_, height, width), size = self.config.shape, self.config.crop
        return ops.crop(images, ops.random_offsets(rng, len(images), height, width, size), size, self.config.channels_last)

    def layout(self, batch: int, dtype: str) -> Layout:
        """Of the VIEWS of a batch, and of its weights."""
        channels, side = self.config.shape[0], self.config.crop
        image = Field((batch, side, side, channels) if self.config.channels_last else (batch, channels, side, side), dtype)
        return Layout({**dict.fromkeys(VIEWS, image), "weight": Field((batch,), "float32")})

    def loss(self, model: Model[Any], target: Model[Any], minibatch: ItemMinibatch) -> Loss:
        """InfoNCE of a minibatch whose items have `views`."""
        items = self.compared(minibatch.items)
        learned, follows = model.representation, target.representation
        assert learned is not None and learned.comparison is not None and follows is not None
        with torch.no_grad():
            keys = follows.projected(items["key_view"])
        logits = learned.comparison(learned.projected(items["query"]), keys) * self.logit_scale
        rows = ops.info_nce(logits)
        metrics = {"contrast_accuracy": ops.retrieved(logits.detach()).mean(), "contrast_loss": rows.detach().mean()}
        return Loss((minibatch.weight * rows).sum() * (minibatch.scale * self.weight), metrics)
