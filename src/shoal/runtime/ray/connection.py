"""Joins or starts a Ray cluster, keeps Ray's own output away, and leaves the cluster again."""

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
from shoal.runtime.cleanup import CleanupProcess
from shoal.runtime.ray.liveness import check_reachable
from shoal.runtime.ray.ray_config import RayConfig, abandoned, set_defaults

__all__ = ["abandon", "connect", "connected", "disconnect", "remember"]

CLOSE_SECONDS = 20.0  # that Ray may take to leave a cluster that is gone; it usually takes five

cleanup: CleanupProcess | None = None  # of the cluster that was started here


def connect(config: RayConfig, cpus: float) -> None:
    """Join the cluster, or start one on this machine with this many CPUs: its processes share cores as on the local runtime."""
    set_defaults()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True,
                             "namespace": f"shoal-{uuid.uuid4().hex[:12]}"}
    address = config.joined
    try:
        with silence():
            if address:
                check_reachable(address)
                ray.init(address=address, **quiet)
            else:
                start_here(num_cpus=max(math.ceil(cpus), len(os.sched_getaffinity(0))), include_dashboard=False,
                           object_store_memory=config.object_store_mb * 1_000_000, **quiet)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        where = f"cannot join --ray.address {address}" if address else "cannot start a Ray cluster on this machine"
        raise ConfigError(f"{where}: {reason(error)}; {way_in(address)}. Without --ray.address, a cluster is started on this "
                          "machine") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray installs a handler for SIGTERM; the run needs its own
                signal.signal(number, handler)


def start_here(**settings: Any) -> None:
    """Start a cluster on this machine that does not outlive this process."""
    global cleanup
    cleanup = CleanupProcess()
    try:
        with cleanup.marking_children():
            ray.init(address="local", **settings)
    except BaseException:
        clean_up()
        raise


def remember(folder: Path) -> None:
    """Remove this folder with the cluster, if the cluster was started here."""
    if cleanup is not None:
        cleanup.remember(folder)


def clean_up() -> None:
    """Clean up after a cluster that was started here."""
    global cleanup
    if cleanup is not None:
        cleanup.close()
        cleanup = None


def reason(error: Exception) -> str:
    """The first line of what Ray says."""
    text = str(getattr(error, "message", "") or error).strip()  # an AuthenticationError adds a page to its message
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def way_in(address: str | None) -> str:
    """What to check when a cluster cannot be joined."""
    mode, keys = os.environ.get("RAY_AUTH_MODE"), token()
    if address and mode is None and keys:
        return f"this machine has a token ({keys}), but RAY_AUTH_MODE is not set; try `export RAY_AUTH_MODE=token`"
    if address and mode == "token" and not keys:
        return "RAY_AUTH_MODE is token, but this machine has none: copy ~/.ray/auth_token from the head, or set RAY_AUTH_TOKEN"
    return "check that it is running (`ray status`) and that RAY_AUTH_MODE is the same on both sides"


def token() -> str:
    """Where Ray would find its token; empty where there is none."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(name):
            return name
    return "~/.ray/auth_token" if Path("~/.ray/auth_token").expanduser().exists() else ""


def disconnect() -> None:
    """Leave the cluster, and stop it if it was started here."""
    try:
        if ray.is_initialized():
            with silence():
                ray.shutdown()
    finally:
        clean_up()


def abandon() -> None:
    """Leave a cluster that is gone; Ray may wait for it, and would wait again when this process ends."""
    leaving = threading.Thread(target=ray.shutdown, name="leaves Ray", daemon=True)
    abandoned.set()
    with silence():
        leaving.start()
        leaving.join(CLOSE_SECONDS)
    if leaving.is_alive():
        atexit.unregister(worker.shutdown)
    clean_up()


@contextlib.contextmanager
def connected(config: RayConfig, cpus: float) -> Iterator[float | None]:
    """One connection for several runs in turn. Yields the CPUs of the cluster; None for a cluster that is started here, which has
    as many as a run asks for."""
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
    """Hide what Ray's native code prints while it connects and disconnects; it bypasses Python's streams."""
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
