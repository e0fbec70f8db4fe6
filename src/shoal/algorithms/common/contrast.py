"""CURL's part of an algorithm: an encoder of images that is learned by contrast, beside the algorithm's own loss (2004.04136).

    batch ──> three crops: observation (also the query), next observation, key
      the algorithm's phase   its loss, of codes            ──> gradient of its nets, and of the encoder (unless detached)
      encoder                 InfoNCE(f(query) W f'(key))   ──> gradient, added to that one: one step with the sum
                              f' <- m f' + (1 - m) f            f' is the encoder of the target net

Crops are made once, with an offset for each image that all its frames share; policies see the centre. Several learners tell each
other their keys, so that each finds its own queries among the keys of the joined batch.
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
KEYS, FIRST_KEY = "contrast_keys", "first_contrast_key"  # of all learners, in a minibatch's items; which are its own
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
        items, first = self.compared(minibatch.items), minibatch.items.get(FIRST_KEY, 0)
        learned, absent = model.representation, None
        assert learned is not None and learned.comparison is not None
        if KEYS in minibatch.items:
            everyone = minibatch.items[KEYS]
            keys, absent = everyone[:, 1:], everyone[:, 0] == 0
        else:
            keys = self.keys(target, minibatch)
        logits = learned.comparison(learned.projected(items["query"]), keys) * self.logit_scale
        if absent is not None:
            logits = logits.masked_fill(absent, -torch.inf)
        rows = ops.info_nce(logits, first)
        metrics = {"contrast_accuracy": ops.retrieved(logits.detach(), first).mean(), "contrast_loss": rows.detach().mean()}
        return Loss((minibatch.weight * rows).sum() * (minibatch.scale * self.weight), metrics)

    @torch.no_grad()
    def keys(self, target: Model[Any], minibatch: ItemMinibatch) -> torch.Tensor:
        """[B, P]."""
        assert target.representation is not None
        return target.representation.projected(self.compared(minibatch.items)["key_view"].to(target.params.device))

    @property
    def key_size(self) -> int:
        """Numbers in a key, P."""
        return self.config.projection[-1] if self.config.projection else self.config.code_size

    def told(self, target: Model[Any], minibatch: ItemMinibatch, index: int, learners: int) -> np.ndarray:
        """The keys of this learner, in its own of `learners` places [learners, B, 1 + P]: learners add them up. The first number of
        a row says that there is a key."""
        keys = self.keys(target, minibatch).cpu().numpy()
        places = np.zeros((learners, len(keys), 1 + keys.shape[1]), np.float32)
        places[index, :, 0], places[index, :, 1:] = 1, keys
        return places.ravel()

    def with_keys(self, minibatch: ItemMinibatch, told: np.ndarray, index: int, learners: int) -> ItemMinibatch:
        """The minibatch with what all learners have `told`, together."""
        size = len(minibatch.weight)
        everyone = torch.from_numpy(told.reshape(learners * size, -1)).to(minibatch.weight.device)
        return replace(minibatch, items={**minibatch.items, KEYS: everyone, FIRST_KEY: index * size})
