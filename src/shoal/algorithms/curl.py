"""CURL: contrastive unsupervised representations for reinforcement learning (Laskin, Srinivas and Abbeel 2020, 2004.04136).

    actors    the centre of an image  ->  code  ->  dqn (Discrete actions) or sac (Box actions)
    learner   three random crops of a batch: observations, next observations, keys
              dqn or sac       its own loss, of codes                        ->  gradient of its nets and of the encoder f
              encoder          InfoNCE: f(observation) W f'(key), against all keys of the batch  ->  added to that gradient
              f' <- m f' + (1 - m) f, which is the encoder of the target net too

It is a part that dqn and sac take (common/contrast.py): their nets see codes in the place of images, and everything else about
them is an option of theirs, --algorithm.dqn.* and --algorithm.sac.*. With dqn's atoms, noisy layers and prioritised replay it is
the paper's Rainbow version. The representation can also be learned by a process of its own (--architecture representation).

Deliberate differences:

                    paper and its source                      here
    encoder step    two optimisers on the contrastive loss    one step with the sum of both gradients
    actor           its own dense layer on the convolutions   an MLP on the code, whose gradient stops there
    actor, alpha    every second update                       every update
    Rainbow         a key network apart                       the target net's encoder, as in the SAC version
    Rainbow         crop 80, pad 4, crop 84                   random crops, as in the SAC version
    last offset     never drawn                               as likely as the others
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from shoal.acting import Policy, Progress
from shoal.algorithms import dqn, sac
from shoal.algorithms.common.contrast import ENCODER, Contrast
from shoal.algorithms.common.item_batch import ItemMinibatch
from shoal.algorithms.common.item_learn import ItemLearn
from shoal.algorithms.common.learn import Loss, PhasedLearn
from shoal.algorithms.common.metrics import CONTRAST_ACCURACY, CONTRAST_LOSS, phase_metrics
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.phases import Phase
from shoal.algorithms.records.transitions import Transitions
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.learning import Algorithm, Tolerance
from shoal.nets.encoder import image_shape, is_image
from shoal.nets.representation import RepresentationConfig
from shoal.options import Options, number
from shoal.slots import Layout
from shoal.telemetry.metrics import Metric

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["CURL", "Config", "RepresentationLearn"]

CUT = 7  # one pixel in this many is cut away, where the size of crops is not given: 28 -> 24, 98 -> 84
DISCRETE = ("head", ENCODER)
BOX = ("critic", "actor", "temperature", ENCODER)


@dataclass(frozen=True)
class CURLDiscreteOptions(dqn.Config):
    """dqn, with targets that move as smoothly as the encoder below them."""

    section = "algorithm.dqn"

    target_tau: float = number(0.05, at_least=0, at_most=1)
    """More than 0 moves the target net by this share of the way at every update, instead of copying."""


@dataclass(frozen=True)
class CURLBoxOptions(sac.Config):
    """sac, with the paper's numbers for images."""

    section = "algorithm.sac"

    actor_lr: float = number(1e-3, above=0, live=True)
    """Learning rate of the actor."""
    critic_lr: float = number(1e-3, above=0, live=True)
    """Learning rate of the critics and of the encoder."""
    alpha_lr: float = number(1e-4, above=0, live=True)
    """Learning rate of the temperature's logarithm."""
    alpha_start: float = number(0.1, above=0)
    """Where a learned temperature begins."""
    target_tau: float = number(0.01, above=0, at_most=1)
    """Share of the way that the target nets move; 1 copies."""
    target_period_updates: int = number(2, at_least=1)
    """Updates between two moves of the target nets."""


@dataclass(frozen=True)
class Config(Options):
    """CURL."""

    section = "algorithm"

    crop: int | Literal["auto"] = number("auto", at_least=1)
    """Side in pixels of the squares that are cut out of images; auto cuts a seventh away. The whole side goes without crops."""
    contrast: float = number(1.0, at_least=0)
    """What the contrastive loss is multiplied by; 0 goes without it."""
    detached: bool = False
    """Let the encoder learn from the contrastive loss alone."""
    crop_all: bool = True
    """Show random crops to the loss of dqn or sac too; otherwise it sees the centre (the paper's Rainbow version)."""
    key_momentum: float = number(0.95, at_least=0, at_most=1)
    """Share of the key encoder, which is the target net's, that stays at an update, m."""
    code_size: int = number(50, at_least=1, at_most=10_000)
    """Numbers in a code: what the encoder makes of an image."""
    projection: tuple[int, ...] = ()
    """Layers between codes and their comparison (Rainbow version: 256 128); none compares codes themselves."""
    logit_scale: float = number(1.0, above=0)
    """What similarities are multiplied by before the softmax (Rainbow version: 0.1)."""
    dqn: CURLDiscreteOptions = field(default_factory=CURLDiscreteOptions)
    """The algorithm where actions are Discrete."""
    sac: CURLBoxOptions = field(default_factory=CURLBoxOptions)
    """The algorithm where actions are a Box."""

    def validate(self) -> None:
        super().validate()
        self.dqn.validate()
        self.sac.validate()
        if any(not 1 <= size <= 1_000_000 for size in self.projection):
            sizes = " ".join(str(size) for size in self.projection)
            raise ConfigError(f"--algorithm.projection is {sizes}; every layer must have 1 to 1,000,000 units")


class CURL(Algorithm):
    """See the module."""

    name, config_class, tolerates = "curl", Config, Tolerance.REPLAY
    from_replay = runs_on_gpu = represents = True

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int, contrast: Contrast | None = None) -> None:
        """`contrast` replaces what the config says of it."""
        config.validate()
        self.config = config
        part = contrast or contrast_of(config, spec)
        self.inner: dqn.DQN | sac.SAC
        if isinstance(spec.action_space, gym.spaces.Discrete):
            self.inner = dqn.DQN(config.dqn, spec, net, seats, part)
        elif isinstance(spec.action_space, gym.spaces.Box):
            self.inner = sac.SAC(config.sac, spec, net, seats, part)
        else:
            raise ConfigError(f"curl cannot act in {spec.name}: it takes dqn for Discrete actions and sac for Box actions, but the "
                              f"action space is {spec.action_space}; use an environment with one of the two, or ppo")
        self.plan, self.contrast = self.inner.plan, part
        self._made_with = (config, spec, net, seats)
        self.metrics = _metrics(self.inner, DISCRETE if isinstance(self.inner, dqn.DQN) else BOX)

    @property
    def record(self) -> Transitions:
        return self.inner.record

    def policy(self) -> Policy:
        return self.inner.policy()

    def learn(self, seed: int) -> ItemLearn[Any]:
        return self.inner.learn(seed)

    def apart(self, shared: bool) -> CURL:
        """With an encoder that is learned elsewhere."""
        return CURL(*self._made_with, replace(self.contrast, apart=True, detached=not shared))

    def representation(self, seed: int) -> RepresentationLearn:
        """The encoder alone: it begins as that of `learn(seed)`, and has the same optimiser."""
        return RepresentationLearn(self.contrast, CURL(*self._made_with).learn(seed).parameters.phase(ENCODER), seed)

    def contrasted_layout(self, batch: int) -> Layout:
        return self.contrast.layout(batch, str(self.plan.spec.observation_space.dtype))

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        return self.inner.explore(index, count, seats, progress)

    def published_layout(self) -> Layout:
        return self.inner.published_layout()


def _metrics(inner: type[Algorithm] | Algorithm, phases: Sequence[str]) -> tuple[Metric, ...]:
    """What dqn or sac measures, and the encoder; in phases of other names."""
    known = {metric.name for metric in (*phase_metrics(("all",)), *phase_metrics(BOX))}
    of_encoder = [metric for metric in phase_metrics(phases) if metric.name.startswith(ENCODER)]
    own = [metric for metric in phase_metrics(phases) if metric not in of_encoder]
    apart = (replace(metric, measured_by=ENCODER) for metric in (*of_encoder, CONTRAST_ACCURACY, CONTRAST_LOSS))
    return (*(metric for metric in inner.metrics if metric.name not in known), *own, *apart)


CURL.metrics = tuple(dict.fromkeys((*_metrics(dqn.DQN, DISCRETE), *_metrics(sac.SAC, BOX))))


def contrast_of(config: Config, spec: EnvSpec) -> Contrast:
    """The part for the images of an environment."""
    space = spec.observation_space
    if not isinstance(space, gym.spaces.Box) or not is_image(space, "auto"):
        raise ConfigError(f"curl cannot learn in {spec.name}: it learns from crops of one image, but an observation is {space}; "
                          "use an environment with pixels, or dqn or sac")
    shape, channels_last = image_shape(space.shape)
    side = min(shape[1:])
    crop = side - max(1, side // CUT) if config.crop == "auto" else config.crop
    if crop > side:
        raise ConfigError(f"--algorithm.crop {crop} is larger than the images of {spec.name}, which are {shape[1]} x {shape[2]}; "
                          f"give {side} or less, or auto")
    seen = RepresentationConfig(shape, channels_last, crop, config.code_size, config.projection)
    return Contrast(seen, config.contrast, config.key_momentum, config.logit_scale, config.crop_all, config.detached)


class RepresentationLearn(PhasedLearn[Model[nn.Module]]):
    """The encoder alone, for a role that learns nothing else: a learning.Learn of one phase.

    A batch has items as a table gives them, or crops that were made already, with their weights. Items of a table count alike,
    however they are drawn: there is no value in them that could be wrong.
    """

    def __init__(self, contrast: Contrast, phase: Phase, seed: int) -> None:
        super().__init__(self._model(contrast, seed), (phase,), target=self._model(contrast, seed))
        self.contrast = contrast

    def _model(self, contrast: Contrast, seed: int) -> Model[nn.Module]:
        return Model(nn.Module(), contrast.codes, representation=contrast.representation(seed, learns=True))

    def split(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[ItemMinibatch]:
        """One: two crops of each image."""
        if "key_view" in batch:
            views, weight = {name: batch[name] for name in ("query", "key_view")}, batch["weight"]
        else:
            query, key = self.contrast.pair(batch["observation"], rng)
            views, weight = {"query": query, "key_view": key}, np.ones(len(query), np.float32)
        items: dict[str, Any] = {name: self.tensor(view) for name, view in views.items()}
        yield ItemMinibatch(items, torch.from_numpy(weight), 1.0 / len(weight))

    def loss(self, minibatch: ItemMinibatch, phase: str) -> Loss:
        assert self.target is not None
        return self.contrast.loss(self.model, self.target, minibatch)
