"""Runs programs: `run(program, session, kind)` on `inline`, `local` or `ray`. Nothing here knows reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.runtime.program import CONTROL, Program
from shoal.runtime.ray.ray_config import RayConfig
from shoal.runtime.supervisor import Faults, Session, Supervisor

if TYPE_CHECKING:
    from shoal.runtime.fork_server_client import ForkServerClient

__all__ = ["CONTROL", "RUNTIMES", "Faults", "Program", "RayConfig", "Session", "Supervisor", "run"]

RUNTIMES = ("inline", "local", "ray")


def run(program: Program, session: Session, kind: str, log_dir: Path, faults: Faults | None = None,
        fork_server: ForkServerClient | None = None, ray: RayConfig | None = None) -> str:
    """Run a program until its session or a role stops it; returns the reason. Raises RoleFailed if a role cannot run."""
    if kind == "inline":
        from shoal.runtime.inline import run_inline

        return run_inline(program, session)
    if kind == "local":
        from shoal.runtime.local import run_local

        return run_local(program, session, log_dir, faults, fork_server)
    if kind == "ray":
        from shoal.runtime.ray import run_ray

        return run_ray(program, session, log_dir, faults, ray)
    raise ConfigError(f"there is no runtime {kind!r}; use one of {', '.join(RUNTIMES)}")
