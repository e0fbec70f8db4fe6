"""The Ray runtime: the same program on a cluster. Places are Ray actors; wires are carried by Ray's calls and object store.

    fabric      a place's own copy of every wire, and its endpoints
    ferries     what one side of a wire writes is carried to the copy of the other side
    post        the messages between places, batched
    gloo        the group wire: torch.distributed, formed anew when its members change
    host        the Ray actor that a place is
    supervisor  the driver: starts, hears, restarts, keeps checkpoints
    cluster     joined or started; resources, placement groups

Nothing here is imported before somebody asks for `--runtime ray`, except `config`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.errors import ConfigError
from shoal.runtime.program import Program
from shoal.runtime.ray.config import RayConfig
from shoal.runtime.supervisor import Faults, Session

__all__ = ["RayConfig", "run_ray"]


def run_ray(program: Program, session: Session, log_dir: Path, faults: Faults | None = None,
            config: RayConfig | None = None) -> str:
    """Run a program on a Ray cluster until it is stopped; returns the reason."""
    config = config or RayConfig()
    if "ray" not in sys.modules:  # these are read at its import
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # whatever Ray would print here, the run's own events say better
        if config.joined is None:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # from Ray 2.59 on it is the default of a local cluster
    try:
        from shoal.runtime.ray.supervisor import RaySupervisor
        from shoal.runtime.supervisor import supervised
    except ImportError as error:
        if error.name != "ray":
            raise
        raise ConfigError("--runtime ray needs Ray; install it with: pip install 'shoal[ray]'") from None
    return supervised(RaySupervisor(program, session, log_dir, faults or Faults(), config), session)
