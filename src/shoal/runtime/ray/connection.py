"""The connection to a Ray cluster: joined or started, with Ray's noise kept away, and let go of."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import RayError

from shoal.errors import ConfigError
from shoal.runtime.guard import Guard
from shoal.runtime.ray.config import RayConfig, set_defaults
from shoal.runtime.ray.pulse import knock

__all__ = ["abandon", "connect", "connected", "disconnect", "remember"]

CLOSE_SECONDS = 20.0  # what Ray may take to let go of a cluster that is not there any more: it takes five

guard: Guard | None = None  # of the cluster that was started here


def connect(config: RayConfig, cpus: float) -> None:
    """Join the cluster, or start one here: with so many CPUs, since processes share cores here as on the local runtime."""
    set_defaults()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True,
                             "namespace": f"shoal-{uuid.uuid4().hex[:12]}"}
    address = config.joined
    try:
        with silence():
            if address:
                knock(address)
                ray.init(address=address, **quiet)
            else:
                start_here(num_cpus=max(math.ceil(cpus), len(os.sched_getaffinity(0))), include_dashboard=False,
                           object_store_memory=config.object_store_mb * 1_000_000, **quiet)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        where = f"--ray.address {address} cannot be joined" if address else "a local Ray cluster cannot be started"
        raise ConfigError(f"{where}: {reason(error)}; {way_in(address)}. Without --ray.address a cluster is started on this "
                          "machine") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray takes SIGTERM for itself; it is the run's
                signal.signal(number, handler)


def start_here(**settings: Any) -> None:
    """A cluster of our own; it does not outlive this process."""
    global guard
    guard = Guard()
    try:
        with guard.marking():
            ray.init(address="local", **settings)
    except BaseException:
        leave_nothing()
        raise


def remember(folder: Path) -> None:
    """A folder that is to go with the cluster that was started here, if it was."""
    if guard is not None:
        guard.remember(folder)


def leave_nothing() -> None:
    """Of a cluster that was started here."""
    global guard
    if guard is not None:
        guard.close()
        guard = None


def reason(error: Exception) -> str:
    """The first line of what Ray says."""
    text = str(getattr(error, "message", "") or error).strip()  # an AuthenticationError adds a page to its message
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def way_in(address: str | None) -> str:
    """What to look at where a cluster cannot be joined."""
    mode, keys = os.environ.get("RAY_AUTH_MODE"), token()
    if address and mode is None and keys:
        return f"there is a token here ({keys}), but RAY_AUTH_MODE is not set; if it asks for one, `export RAY_AUTH_MODE=token`"
    if address and mode == "token" and not keys:
        return "RAY_AUTH_MODE is token and there is none here: copy ~/.ray/auth_token from the head, or set RAY_AUTH_TOKEN"
    return "is it running (`ray status`), and is RAY_AUTH_MODE the same on both sides?"


def token() -> str:
    """Where Ray would find its token; nothing where there is none."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(name):
            return name
    return "~/.ray/auth_token" if Path("~/.ray/auth_token").expanduser().exists() else ""


def disconnect() -> None:
    """And stop the cluster, if it was started here."""
    try:
        if ray.is_initialized():
            with silence():
                ray.shutdown()
    finally:
        leave_nothing()


def abandon() -> None:
    """Let go of a cluster that is not there any more; Ray may wait for it, and would once more when this process ends."""
    letting_go = threading.Thread(target=ray.shutdown, name="lets go of Ray", daemon=True)
    with silence():
        letting_go.start()
        letting_go.join(CLOSE_SECONDS)
    if letting_go.is_alive():
        atexit.unregister(worker.shutdown)
    leave_nothing()


@contextlib.contextmanager
def connected(config: RayConfig, cpus: float) -> Iterator[float | None]:
    """One connection for several runs, one after the other. Gives the CPUs of the cluster; None: it is one of our own, which has as
    many as are asked for."""
    own = not ray.is_initialized()
    if own:
        connect(config, cpus)
    try:
        yield None if own and config.joined is None else float(ray.cluster_resources().get("CPU", 0.0))
    finally:
        if own:
            disconnect()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What Ray's native code says while it connects and disconnects goes past Python's streams."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
