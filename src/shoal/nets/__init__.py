"""Networks: torsos, recurrent cores, action heads, and the actor-critic built from them.

    observation ──torso──> features ──core──> features ──linear──> policy parameters, value
                                                          └── ActionHead reads the parameters: sample, log_prob, entropy

All parameters of a net are one flat vector (`flat.flatten`), which optimisers, wires and checkpoints work on. Importing
this package does not import torch, so that `config.NetConfig` costs nothing on the command line.
"""

from __future__ import annotations

from typing import Any

from shoal.nets.config import NetConfig

__all__ = ["ActionHead", "ActorCritic", "NetConfig", "Output", "build", "flat_grad", "flatten"]

_HOME = {
    "ActionHead": "heads",
    "ActorCritic": "actor_critic",
    "Output": "actor_critic",
    "build": "actor_critic",
    "flat_grad": "flat",
    "flatten": "flat",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
