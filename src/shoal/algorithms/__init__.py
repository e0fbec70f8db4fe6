"""The algorithms, one file each. They know nothing of processes: see shoal.core for what each has to offer.

    algorithm = algorithms.make("ppo", spec, NetConfig(), seats=8)          # or an own Config instead of the name

Importing this package imports no torch: the command line lists names and reads configurations without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.core import Algorithm
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["ALGORITHMS", "make", "named"]

ALGORITHMS = {
    "a2c": ("shoal.algorithms.a2c", "A2C"),
    "ppo": ("shoal.algorithms.ppo", "PPO"),
    "vtrace": ("shoal.algorithms.vtrace", "VTrace"),
    "appo": ("shoal.algorithms.appo", "APPO"),
    "dqn": ("shoal.algorithms.dqn", "DQN"),
    "r2d2": ("shoal.algorithms.r2d2", "R2D2"),
}
"""Name -> (module, class). The module's `Config` belongs to it."""


def named(name: str) -> tuple[type, type]:
    """The Config and the Algorithm class of a name."""
    if name not in ALGORITHMS:
        raise ConfigError(f"there is no algorithm {name!r}; choose one of {', '.join(ALGORITHMS)}")
    module, cls = ALGORITHMS[name]
    loaded = import_module(module)
    return loaded.Config, getattr(loaded, cls)


def make(algorithm: str | Any, spec: EnvSpec, net: NetConfig, seats: int) -> Algorithm:
    """From a name (its default Config) or a Config, for environments like `spec` and actors with `seats` seats each."""
    if isinstance(algorithm, str):
        config_type, cls = named(algorithm)
        return cls(config_type(), spec, net, seats)
    for name, (module, _) in ALGORITHMS.items():
        if type(algorithm).__module__ == module:
            return named(name)[1](algorithm, spec, net, seats)
    raise ConfigError(f"{type(algorithm).__name__} is no algorithm's Config; use that of {', '.join(ALGORITHMS)}")
