"""Who does what, with whom: one file per architecture, each with a figure, a Config and one function that draws the graph.

Importing this package imports no torch: the command line lists names without it.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from shoal.errors import ConfigError

__all__ = ["ARCHITECTURES", "named"]

ARCHITECTURES = {
    "synchronous": "shoal.architectures.synchronous",
    "actor_learner": "shoal.architectures.actor_learner",
    "async_gradients": "shoal.architectures.async_gradients",
    "predictor_trainer": "shoal.architectures.predictor_trainer",
    "central_inference": "shoal.architectures.central_inference",
    "gossip": "shoal.architectures.gossip",
    "parameter_server": "shoal.architectures.parameter_server",
    "device": "shoal.architectures.device",
}
"""Name -> module with Config, delivers(config) and draw(program, parts, config)."""


def named(name: str) -> ModuleType:
    if name not in ARCHITECTURES:
        raise ConfigError(f"there is no architecture {name!r}; choose one of {', '.join(ARCHITECTURES)}")
    return import_module(ARCHITECTURES[name])
