"""--ray.*: the cluster that a run joins, and what the run asks of it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.options import Options, number

__all__ = ["RayConfig", "abandoned", "set_defaults"]

abandoned = threading.Event()
"""Set once a cluster that is gone was left: from then on Ray's threads may hang or crash when Python ends."""


def set_defaults() -> None:
    """Set environment variables that Ray's nodes read, where the user has not set them."""
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
                        ("RAY_worker_niceness", "0")):  # Ray's default of 15 leaves roles a thirtieth of a contended core
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class RayConfig(Options):
    """The cluster of --runtime ray."""

    section = "ray"

    address: str | None = None
    """Join this cluster: auto, or HOST:PORT. By default a cluster is started on this machine and stopped at the end."""
    cpus_per_place: float = number(1.0, at_least=0.01)
    """CPUs that each process asks for; one that computes with N threads asks for N - 1 more."""
    object_store_mb: int = number(512, at_least=80)
    """Size of the object store of a cluster that is started on this machine, in MB."""
    wait_seconds: float = number(0.0, at_least=0)
    """Seconds to wait for nodes that are still starting before the run fails for lack of CPUs or GPUs."""

    @property
    def gpus_per_place(self) -> float:
        """GPUs that each process which computes on a GPU asks for."""
        return 1.0

    @property
    def joined(self) -> str | None:
        """The address of the cluster to join; None to start one. Ray sets RAY_ADDRESS for jobs that were submitted."""
        return self.address or os.environ.get("RAY_ADDRESS")

    def validate(self) -> None:
        super().validate()
        if self.address is not None and "://" in self.address:
            raise ConfigError(f"--ray.address is {self.address}; a run joins a cluster from one of its nodes, not through a "
                              "client: give --ray.address auto or HOST:PORT there (`ray job submit` starts a command on a node)")
        if self.address is not None and self.address != "auto" and ":" not in self.address:
            raise ConfigError(f"--ray.address is {self.address}; it must be auto or HOST:PORT, or none for a cluster of its own")
