"""The Ray runtime: the same program on a cluster. Places are Ray actors; Ray's calls and object store carry the wires.

    ray_supervisor  the driver: starts places, takes their reports, restarts them, holds checkpoints
    wire_totals     the numbers of wires, added up over places
    host            the Ray actor of a place
    place_wires     a place's own copy of every wire, and its ends
    place_memory    the memory and the channels of that copy
    links           carry what one side of a wire writes to the copy of the other side
    messenger       messages between places, in batches
    connection      joins or starts a cluster, and leaves it
    cluster         placement groups, nodes, actors
    resources       what a program asks of a cluster, and the error texts where the cluster has less
    liveness        whether the cluster is alive

Nothing here is imported before a run asks for `--runtime ray`, except `ray_config`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.errors import ConfigError
from shoal.runtime.program import Program
from shoal.runtime.ray.ray_config import RayConfig
from shoal.runtime.supervisor import Faults, Session

__all__ = ["RayConfig", "connected", "run_ray"]


def run_ray(program: Program, session: Session, log_dir: Path, faults: Faults | None = None,
            config: RayConfig | None = None) -> str:
    """Run a program on a Ray cluster until it is stopped; returns the reason."""
    config = config or RayConfig()
    _import_ray(config)
    from shoal.runtime.ray.ray_supervisor import RaySupervisor
    from shoal.runtime.supervisor import supervised

    return supervised(RaySupervisor(program, session, log_dir, faults or Faults(), config), session)


@contextlib.contextmanager
def connected(config: RayConfig, cpus: float) -> Iterator[Callable[[Program], int] | None]:
    """One connection for several runs in turn. Yields a function that says how many of the roles that only send or ask a program
    may have on the cluster; None for a cluster that is started here, with `cpus` CPUs or as many as a run asks for."""
    _import_ray(config)
    from shoal.runtime.ray import connection
    from shoal.runtime.ray.resources import replicas_that_fit

    with connection.connected(config, cpus) as found:
        yield None if found is None else lambda program: replicas_that_fit(program, config, found)


def _import_ray(config: RayConfig) -> None:
    if "ray" not in sys.modules:  # these are read at its import
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # the run's own events say it better than Ray
        if config.joined is None:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # from Ray 2.59 on it is the default of a local cluster
    try:
        import ray  # noqa: F401
    except ImportError as error:
        if error.name != "ray":
            raise
        raise ConfigError("--runtime ray needs Ray; install it with: pip install 'shoal[ray]'") from None
