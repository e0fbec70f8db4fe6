"""R2D2: recurrent replay, distributed (Kapturowski et al. 2019); with demonstrations it is R2D3 (Gulcehre et al. 2019).

    actors    LSTM, epsilon ladder  ->  overlapping windows of an episode, with the state before them and a priority
    learner   both nets walk through the burn-in from the stored state, without gradient
              -> n-step double-Q targets on a squashed scale  ->  sum of half squared errors over the window's loss steps

                    paper                               here
    burn-in         40 steps, also for the first        what the episode has: its first steps are in a loss as well
    episode's end   unclear                             the last window is padded; padding counts for nothing
    time limits     treated as the end                  bootstrapped from the true last observation
    state           stored                              stored, or zero (the paper's comparison); burn_in=0 turns burn-in off
    previous reward as it is                            clipped to [-1, 1], as everywhere in shoal
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from shoal.algorithms.common.metrics import (
    DELTA_Q_FIRST,
    DELTA_Q_LAST,
    IMPORTANCE_MIN,
    Q_MAX,
    Q_MEAN,
    TARGET_MEAN,
    TD_ERROR,
    phase_metrics,
)
from shoal.algorithms.q_learning.algorithm import QLearning, QLearningConfig
from shoal.algorithms.q_learning.learn import Judged
from shoal.algorithms.q_learning.model import QModel
from shoal.algorithms.records.windows import Windows
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.learning import Tolerance
from shoal.nets.q_network import QOutput
from shoal.ops import value
from shoal.options import number
from shoal.slots import map_tree

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["R2D2", "Config"]


@dataclass(frozen=True)
class Config(QLearningConfig):
    """Recurrent Q-learning from windows."""

    burn_in: int = number(40, at_least=0)
    """Burn-in: steps before the loss steps that only bring the recurrent state up to date; 0 for none."""
    length: int = number(80, at_least=1)
    """Loss steps of a window."""
    stride: int = number(40, at_least=1)
    """Steps between the beginnings of two windows."""
    state: Literal["stored", "zero"] = "stored"
    """State in which a window begins: as the actor had it, or zero."""
    eta: float = number(0.9, at_least=0, at_most=1)
    """Weight of the largest error of a window in its priority; the rest is that of the mean."""
    gamma: float = number(0.997, at_least=0, at_most=1)
    n_step: int = number(5, at_least=1, at_most=100_000)
    dueling: bool = True
    rescale: bool = True
    importance: float = number(0.6, at_least=0, at_most=1)
    exploration: Literal["schedule", "ladder"] = "ladder"
    epsilon: float = number(0.4, at_least=0, at_most=1, live=True)
    target_period_updates: int = number(2500, at_least=0)
    lr: float = number(1e-4, above=0, live=True)
    optimiser_epsilon: float = number(1e-3, above=0)
    diagnose: bool = False
    """Keep q-values and state of every step in the items, and measure how wrong the states are that training begins from."""

    def validate(self) -> None:
        super().validate()
        if self.stride > self.length:
            raise ConfigError(
                f"stride={self.stride} is more than length={self.length}: the steps between two windows would be in no loss; "
                f"set stride={self.length} or less"
            )


class R2D2(QLearning[Config]):
    """See the module."""

    name, config_class, tolerates = "r2d2", Config, Tolerance.REPLAY
    metrics = (*phase_metrics(("all",)), TD_ERROR, Q_MEAN, Q_MAX, TARGET_MEAN, IMPORTANCE_MIN, DELTA_Q_FIRST, DELTA_Q_LAST)

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        if net.recurrent != "lstm":
            raise ConfigError(f"r2d2 needs a net with memory, but --net.recurrent is {net.recurrent}; set it to lstm, or use dqn")
        super().__init__(config, spec, net, seats)

    @cached_property
    def record(self) -> Windows:
        config = self.config
        return Windows(
            **self.item_options(),
            burn_in=config.burn_in,
            length=config.length,
            stride=config.stride,
            eta=config.eta,
            state={name: tuple(x.shape[1:]) for name, x in self.model().net.initial_state(1).items()},
            previous=self.plan.net.prev_action_reward,
            extras={"q": ((self.actions,), "float32")} if config.diagnose else {},
            keep_states=config.diagnose,
        )

    def errors(self) -> WindowErrors:
        return WindowErrors(self.config)


class WindowErrors:
    """Errors of windows: items [B, L, ...] are turned to [L, B, ...] here."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.captures = not config.diagnose  # which asks how many windows are whole

    def __call__(self, model: QModel, target: QModel, items: Tree, noise: torch.Tensor | None = None) -> Judged:
        """Its nets have no noisy layers, so there is no `noise`."""
        config, l = self.config, self.config.burn_in  # noqa: E741
        rows = {name: map_tree(lambda x: x.transpose(0, 1), items[name])
                for name in ("action", "reward", "discount", "valid")}  # fmt: skip
        action, reward, discount, valid = (rows[name][l:] for name in rows)
        online_q = self.unroll(model, items).q  # [m + 1, B, A]
        with torch.no_grad():
            target_q = self.unroll(target, items).q
            mask = items.get("action_mask")
            mask = None if mask is None else mask.transpose(0, 1)[l + 1 :]
            if config.double:
                following = value.double_q_values(value.legal(online_q[1:], mask), target_q[1:])
            else:
                following = value.q_values(value.legal(target_q[1:], mask))
        # No return reaches across the last real step: there it bootstraps, or the discount is 0.
        keep = torch.cat([valid[1:], torch.ones_like(valid[:1])]).float()
        goal = value.transformed_targets(reward, config.gamma * discount, following, config.n_step, keep, config.rescale)
        q = value.chosen(online_q[:-1], action)
        error = torch.where(valid, goal - q, 0)
        size, steps = error.detach().abs(), valid.sum(0).clamp(min=1)
        priority = config.eta * size.amax(0) + (1 - config.eta) * size.sum(0) / steps
        more = self.staleness(model, items, online_q) if config.diagnose else {}
        return Judged(value.squared(error).sum(0), priority, q, goal, valid, more)

    def unroll(self, model: QModel, items: Tree) -> QOutput:
        """q-values of the loss rows and of the one after them; the burn-in is walked through without a gradient."""
        l = self.config.burn_in  # noqa: E741
        columns = [items["observation"], items["first"]]
        if "prev_action" in items:
            columns += [items["prev_action"], items["prev_reward"]]
        columns = [map_tree(lambda x: x.transpose(0, 1), column) for column in columns]
        state = items["state"]
        if self.config.state == "zero":
            state = map_tree(torch.zeros_like, state)
        if l:
            with torch.no_grad():
                observation, first, *previous = (map_tree(lambda x: x[:l], column) for column in columns)
                state = model.unroll(observation, first, state, *previous).state
        observation, first, *previous = (map_tree(lambda x: x[l:], column) for column in columns)
        return model.unroll(observation, first, state, *previous)

    @torch.no_grad()
    def staleness(self, model: QModel, items: Tree, online_q: torch.Tensor) -> dict[str, torch.Tensor]:
        """Delta Q at the first and at the last loss step of the windows without padding (section 3 of the paper).

        It compares, with today's weights, the q-values after walking through the window with those from the actor's state
        at that very step: 0 where the state is as good as the actor's own.
        """
        l, whole = self.config.burn_in, items["valid"][:, self.config.burn_in :].all(1)  # noqa: E741
        columns = [items["observation"], items["first"]]
        if "prev_action" in items:
            columns += [items["prev_action"], items["prev_reward"]]
        scale = online_q[:-1, whole].amax((0, 2))
        found = {}
        for name, row in (("delta_q_first", l), ("delta_q_last", l + self.config.length - 1)):
            observation, first, *previous = (map_tree(lambda x: x[whole, row], column) for column in columns)  # noqa: B023
            state = map_tree(lambda x: x[whole, row], items["states"])  # noqa: B023
            with model.precision():
                from_actor = model.net.step(model.see(observation), first, state, *previous).q
            found[name] = value.delta_q(online_q[row - l, whole], from_actor, scale).mean()
        return found
