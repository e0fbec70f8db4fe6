"""Networks: torsos, recurrent cores, action heads, and the nets built from them.

    build          actor-critic         observation -> policy parameters (an ActionHead reads them) and value
    build_q        action values        observation -> Q(s, .) of discrete actions
    build_actor    deterministic actor  observation -> action within its bounds
    build_squashed_actor                observation -> tanh of a Gaussian
    build_gaussian_actor                observation -> a Gaussian, for recorded actions
    build_critic   critics              observation, action -> Q(s, a), N times
    build_policy   a policy alone       observation -> policy parameters
    build_values   critics              observation -> Q(s, .) of discrete actions, N times

All parameters of a net are one flat vector (`flatten`), which optimisers, wires and checkpoints work on. Importing this package
does not import torch, so that the command line can read `NetConfig` quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.nets.net_config import NetConfig

if TYPE_CHECKING:
    from shoal.nets.actor_critic import ActorCriticNetwork, ActorCriticOutput, build
    from shoal.nets.continuous import (
        Critic,
        DeterministicActor,
        GaussianActor,
        PolicyNetwork,
        SquashedGaussianActor,
        StackedValues,
        build_actor,
        build_critic,
        build_gaussian_actor,
        build_policy,
        build_squashed_actor,
        build_values,
    )
    from shoal.nets.flat import flat_grad, flatten
    from shoal.nets.heads import ActionHead
    from shoal.nets.q_network import HeadConfig, QNetwork, QOutput, build_q

__all__ = ["ActionHead", "ActorCriticNetwork", "ActorCriticOutput", "Critic", "DeterministicActor", "GaussianActor", "HeadConfig",
           "NetConfig", "PolicyNetwork", "QNetwork", "QOutput", "SquashedGaussianActor", "StackedValues", "build", "build_actor",
           "build_critic", "build_gaussian_actor", "build_policy", "build_q", "build_squashed_actor", "build_values", "flat_grad",
           "flatten"]

_HOME = {
    "actor_critic": ("ActorCriticNetwork", "ActorCriticOutput", "build"),
    "continuous": ("Critic", "DeterministicActor", "GaussianActor", "PolicyNetwork", "SquashedGaussianActor", "StackedValues",
                   "build_actor", "build_critic", "build_gaussian_actor", "build_policy", "build_squashed_actor", "build_values"),
    "flat": ("flat_grad", "flatten"),
    "heads": ("ActionHead",),
    "q_network": ("HeadConfig", "QNetwork", "QOutput", "build_q"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
