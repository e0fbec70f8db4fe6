"""Who does what, with whom: one drawing per file, each with a figure, its options and one method that draws the graph.

Importing this package imports no torch: the command line lists names without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.learning import Architecture

__all__ = ["ARCHITECTURES", "named"]

ARCHITECTURES = {
    "synchronous": "shoal.architectures.synchronous:Synchronous",
    "actor_learner": "shoal.architectures.actor_learner:ActorLearner",
    "async_gradients": "shoal.architectures.async_gradients:AsyncGradients",
    "predictor_trainer": "shoal.architectures.predictor_trainer:PredictorTrainer",
    "central_inference": "shoal.architectures.central_inference:CentralInference",
    "gossip": "shoal.architectures.gossip:Gossip",
    "parameter_server": "shoal.architectures.parameter_server:ShardedParameterServer",
    "device": "shoal.architectures.device:Device",
    "qtopt": "shoal.architectures.qtopt:QTOptGraph",
    "representation": "shoal.architectures.representation:RepresentationGraph",
    "evolution": "shoal.architectures.evolution:Evolution",
    "evolution_master": "shoal.architectures.evolution_master:EvolutionMasterGraph",
}
"""Name -> module:class of a learning.Architecture."""


def named(name: str) -> Architecture:
    """The architecture of a name, or of an import path such as my.module:MyArchitecture."""
    path = ARCHITECTURES.get(name, name if ":" in name else "")
    if not path:
        raise ConfigError(f"there is no architecture {name!r}; choose one of {', '.join(ARCHITECTURES)}, or give module:Class")
    module, _, attribute = path.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the architecture {name} cannot be imported: {error}") from None
    from shoal.learning import Architecture

    if isinstance(found, type) and issubclass(found, Architecture):
        return found()
    raise ConfigError(f"{name} is not an architecture: {attribute} must be a subclass of shoal.learning.Architecture")
