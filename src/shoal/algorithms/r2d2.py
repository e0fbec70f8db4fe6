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

import numpy as np
import torch

from shoal.algorithms.blueprint import check_numbers
from shoal.algorithms.q_learner import Judged, QLearn
from shoal.algorithms.q_model import QModel, QPolicy
from shoal.algorithms.q_plan import QPlan, explored
from shoal.algorithms.training import ValueOptimiserName
from shoal.algorithms.windows import Windows
from shoal.core import Progress, Tolerance, Tree
from shoal.errors import ConfigError
from shoal.nets.q_network import QOutput
from shoal.ops import value
from shoal.slots import Layout, map_tree

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["R2D2", "Config"]


@dataclass(frozen=True)
class Config:
    """Recurrent Q-learning from windows."""

    burn_in: int = 40
    """Steps before a window's loss steps through which the state is brought up to date; 0 goes without."""
    length: int = 80
    """Loss steps of a window."""
    stride: int = 40
    """Steps between the beginnings of two windows."""
    state: Literal["stored", "zero"] = "stored"
    """State in which a window begins: as the actor had it, or zero."""
    eta: float = 0.9
    """Weight of the largest error of a window in its priority; the rest is that of the mean."""
    gamma: float = 0.997
    """Discount."""
    n_step: int = 5
    """Rewards in a return before it bootstraps."""
    double: bool = True
    """Let the net select the action that the target net evaluates."""
    dueling: bool = True
    """Give the net one stream for the state's value and one for the advantages."""
    dueling_hidden: int = 64
    """Units in the hidden layer of each of the two streams."""
    zero_head: bool = False
    """Let all q-values begin at 0."""
    rescale: bool = True
    """Learn values on a squashed scale."""
    reward_clip: float = 0.0
    """Clip rewards to this size; 0 keeps them."""
    importance: float = 0.6
    """Exponent beta of the importance weights; without effect on a table that is drawn from uniformly."""
    importance_final: float | None = None
    """Beta at the end of the env_steps budget; none keeps it constant."""
    exploration: Literal["schedule", "ladder"] = "ladder"
    """ladder: every environment its own epsilon for the whole run; schedule: one epsilon for all, falling."""
    epsilon: float = 0.4
    """Share of random actions on the first rung of the ladder, or at the beginning."""
    epsilon_final: float = 0.05
    """Share of random actions in the end (schedule)."""
    epsilon_steps: int = 10_000
    """Environment steps over which epsilon falls (schedule)."""
    ladder_alpha: float = 7.0
    """How far the ladder reaches: its last rung is epsilon^(1 + alpha)."""
    target_period_updates: int = 2500
    """Updates between two copies of the net to the target net; 0 never copies, 1 goes without a target net."""
    target_tau: float = 0.0
    """More than 0 moves the target net by this share of the way at every update, instead of copying."""
    lr: float = 1e-4
    """Learning rate."""
    lr_final: float | None = None
    """Learning rate at the end of the env_steps budget; none keeps it constant."""
    optimiser: ValueOptimiserName = "adam"
    """adam, rmsprop, rmsprop_centred (epsilon inside the root), adagrad or sgd."""
    optimiser_epsilon: float = 1e-3
    """Epsilon of the optimiser."""
    rmsprop_decay: float = 0.95
    """Decay of rmsprop's moments."""
    adagrad_start: float = 0.1
    """What adagrad's sums of squares begin with."""
    grad_norm: float = 40.0
    """Longest gradient; longer ones are scaled down. 0 does not clip."""
    diagnose: bool = False
    """Keep q-values and state of every step in the items, and measure how wrong the states are that training begins from."""

    def validate(self) -> None:
        check_numbers(
            self,
            positive=("length", "stride", "n_step", "lr", "optimiser_epsilon", "dueling_hidden"),
            shares=("gamma", "eta", "importance", "importance_final", "epsilon", "epsilon_final", "target_tau", "rmsprop_decay"),
            not_negative=("burn_in", "reward_clip", "epsilon_steps", "ladder_alpha", "target_period_updates", "lr_final",
                          "adagrad_start", "grad_norm"),
        )  # fmt: skip
        if self.stride > self.length:
            raise ConfigError(
                f"stride={self.stride} is more than length={self.length}: the steps between two windows would be in no loss; "
                f"set stride={self.length} or less"
            )


class R2D2:
    """See the module."""

    name = "r2d2"
    tolerates = Tolerance.REPLAY
    from_replay = runs_on_gpu = True

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        config.validate()
        if net.recurrent != "lstm":
            raise ConfigError(f"net.recurrent = {net.recurrent!r}: r2d2 is about memory; set it to lstm, or use dqn")
        self.config = config
        self.plan = QPlan.of(self.name, config, spec, net, seats)

    @cached_property
    def record(self) -> Windows:
        config, plan = self.config, self.plan
        state = {name: tuple(x.shape[1:]) for name, x in plan.model().net.initial_state(1).items()}
        return Windows(
            plan.scene,
            config.burn_in,
            config.length,
            config.stride,
            config.eta,
            state,
            previous=plan.net.prev_action_reward,
            diagnose=config.diagnose,
        )

    def policy(self) -> QPolicy:
        return QPolicy(self.plan.model())

    def learn(self, seed: int) -> QLearn:
        return QLearn(self.config, self.plan, seed, WindowErrors(self.config))

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        return explored(self.config, index, count, seats, progress)

    def published_layout(self) -> Layout:
        return self.plan.published_layout()


class WindowErrors:
    """Errors of windows: items [B, L, ...] are turned to [L, B, ...] here."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.captures = not config.diagnose  # which asks how many windows are whole

    def __call__(self, model: QModel, target: QModel, items: Tree) -> Judged:
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
                from_actor = model.net.step(observation, first, state, *previous).q
            found[name] = value.delta_q(online_q[row - l, whole], from_actor, scale).mean()
        return found
