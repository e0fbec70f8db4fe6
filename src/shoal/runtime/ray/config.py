"""--ray.*: the cluster that a run joins, and what it asks of it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from shoal.errors import ConfigError

__all__ = ["RayConfig", "set_defaults"]


def set_defaults() -> None:
    """What the nodes that this process starts read from its environment, where the user has not set it."""
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
                        ("RAY_worker_niceness", "0")):  # Ray's own 15 gives all roles a thirtieth of a core that others want too
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class RayConfig:
    """The cluster of --runtime ray."""

    address: str | None = None
    """Join this cluster: auto, or HOST:PORT; without it one is started on this machine and stopped at the end."""
    cpus_per_place: float = 1.0
    """CPUs that each process asks for; a learner with more threads asks for one more each."""
    gpus_per_learner: float = 1.0
    """GPUs that each learner and each inference server asks for, where the run computes on GPUs."""
    object_store_mb: int = 512
    """Size of the object store of a cluster that is started here."""
    wait_seconds: float = 0.0
    """How long to wait for nodes that are still on their way before it is said what is missing."""

    @property
    def joined(self) -> str | None:
        """The address of the cluster to join; None to start one. Ray's own variable says where a submitted job belongs."""
        return self.address or os.environ.get("RAY_ADDRESS")

    def validate(self) -> None:
        for name, least in (("cpus_per_place", 0.01), ("gpus_per_learner", 0.0), ("object_store_mb", 80), ("wait_seconds", 0.0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ConfigError(f"ray.{name}={value} is not possible: give --ray.{name.replace('_', '-')} {least:g} or more")
        if self.address is not None and "://" in self.address:
            raise ConfigError(f"ray.address={self.address!r} is not possible: a run joins a cluster from one of its nodes, not "
                              "through a client; give --ray.address auto or HOST:PORT there (`ray job submit` starts a command "
                              "on a node)")
        if self.address is not None and self.address != "auto" and ":" not in self.address:
            raise ConfigError(f"ray.address={self.address!r} is not possible: give --ray.address auto, HOST:PORT, or None for a "
                              "cluster of its own")
