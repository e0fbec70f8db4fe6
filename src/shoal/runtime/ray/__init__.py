"""The Ray runtime: the same program on a cluster. Places are Ray actors; wires are carried by Ray's calls and object store.

    fabric      a place's own copy of every wire, and its endpoints
    ferries     what one side of a wire writes is carried to the copy of the other side
    post        the messages between places, batched
    gloo        the group wire: torch.distributed, formed anew when its members change
    host        the Ray actor that a place is
    supervisor  the driver: starts, hears, restarts, keeps checkpoints
    connection  to a cluster: joined or started, and let go of
    cluster     placement groups, and what is to be known of nodes
    resources   what a program asks of it, and the words for what is missing
    pulse       whether it lives
    guard       ends what one of our own would leave behind

Nothing here is imported before somebody asks for `--runtime ray`, except `config`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.errors import ConfigError
from shoal.runtime.program import Program
from shoal.runtime.ray.config import RayConfig
from shoal.runtime.supervisor import Faults, Session

__all__ = ["RayConfig", "connected", "run_ray"]


def run_ray(program: Program, session: Session, log_dir: Path, faults: Faults | None = None,
            config: RayConfig | None = None) -> str:
    """Run a program on a Ray cluster until it is stopped; returns the reason."""
    config = config or RayConfig()
    _import_ray(config)
    from shoal.runtime.ray.supervisor import RaySupervisor
    from shoal.runtime.supervisor import supervised

    return supervised(RaySupervisor(program, session, log_dir, faults or Faults(), config), session)


@contextlib.contextmanager
def connected(config: RayConfig, cpus: float) -> Iterator[Callable[[Program], int] | None]:
    """One connection for several runs, one after the other. Gives what says how many actors of a program the cluster has room
    for; None: it is one of our own, with `cpus` CPUs, or as many as a run asks for."""
    _import_ray(config)
    from shoal.runtime.ray import connection
    from shoal.runtime.ray.resources import beside

    with connection.connected(config, cpus) as found:
        yield None if found is None else lambda program: beside(program, config, found)


def _import_ray(config: RayConfig) -> None:
    if "ray" not in sys.modules:  # these are read at its import
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # whatever Ray would print here, the run's own events say better
        if config.joined is None:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # from Ray 2.59 on it is the default of a local cluster
    try:
        import ray  # noqa: F401
    except ImportError as error:
        if error.name != "ray":
            raise
        raise ConfigError("--runtime ray needs Ray; install it with: pip install 'shoal[ray]'") from None
