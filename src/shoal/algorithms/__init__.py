"""The algorithms, one file each. They know nothing of processes: `shoal.learning` says what each has to offer.

    algorithm = algorithms.make("ppo", spec, NetConfig(), seats=8)          # or its Config, or "my.module:MyAlgorithm"

Importing this package imports no torch: the command line lists names without it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.learning import Algorithm
from shoal.options import Options

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["ALGORITHMS", "class_of", "make", "named"]

ALGORITHMS = {
    "a2c": "shoal.algorithms.a2c:A2C",
    "ppo": "shoal.algorithms.ppo:PPO",
    "vtrace": "shoal.algorithms.vtrace:VTrace",
    "appo": "shoal.algorithms.appo:APPO",
    "dqn": "shoal.algorithms.dqn:DQN",
    "r2d2": "shoal.algorithms.r2d2:R2D2",
    "qtopt": "shoal.algorithms.qtopt:QTOpt",
    "ddpg": "shoal.algorithms.ddpg:DDPG",
    "td3": "shoal.algorithms.td3:TD3",
    "sac": "shoal.algorithms.sac:SAC",
    "curl": "shoal.algorithms.curl:CURL",
    "bc": "shoal.algorithms.bc:BC",
    "td3_bc": "shoal.algorithms.td3_bc:TD3BC",
    "marwil": "shoal.algorithms.marwil:MARWIL",
    "cql": "shoal.algorithms.cql:CQL",
    "iql": "shoal.algorithms.iql:IQL",
    "es": "shoal.algorithms.es:ES",
}
"""Name -> "module:Class"."""


def named(name: str) -> type[Algorithm]:
    """The class of a name, or of "my.module:MyAlgorithm"; its options are its `config_class`."""
    place = ALGORITHMS.get(name, name)
    module, colon, attribute = place.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"there is no algorithm {name!r}; choose one of {', '.join(ALGORITHMS)}, or name your own class as "
                          '"my.module:MyAlgorithm"')
    try:
        found = vars(import_module(module)).get(attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the algorithm {name!r} cannot be imported: {error}; run shoal where Python finds {module}, or set "
                          "PYTHONPATH") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        what = f"has no {attribute}" if found is None else f"has {attribute}, which is not a subclass of shoal.learning.Algorithm"
        raise ConfigError(f"the algorithm {name!r} is not there: the module {module} {what}")
    return found


def class_of(config: Options) -> type[Algorithm]:
    """The algorithm whose options these are: it stands in the same module as its Config."""
    for found in vars(sys.modules[type(config).__module__]).values():
        if isinstance(found, type) and issubclass(found, Algorithm) and vars(found).get("config_class") is type(config):
            return found
    raise ConfigError(f"{type(config).__name__} is not the Config of an algorithm; use that of {', '.join(ALGORITHMS)}, or put "
                      "your own into the module of your Algorithm, which names it as its config_class")


def make(algorithm: str | Options | type[Algorithm], spec: EnvSpec, net: NetConfig, seats: int) -> Algorithm:
    """From a name or a class (with its default Config) or from a Config, for environments like `spec` and actors with `seats`
    seats each."""
    if isinstance(algorithm, Options):
        return class_of(algorithm)(algorithm, spec, net, seats)
    cls = named(algorithm) if isinstance(algorithm, str) else algorithm
    return cls(cls.config_class(), spec, net, seats)
