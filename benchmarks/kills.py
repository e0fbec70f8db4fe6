"""Kills roles of a run, for cases of `shoal bench` with `kill`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.experiment.prepare import Prepared

__all__ = ["check_kill", "kill_victims"]

AIM_SECONDS = 0.02


def kill_victims(pid: int, victims: Sequence[str], metrics: Path, every: int, kills: list[dict[str, Any]],
                 over: threading.Event) -> None:
    """SIGKILL each victim in turn, `every` env steps apart, and note it in `kills`."""
    for number, victim in enumerate(victims, 1):
        while not over.is_set():
            steps = _env_steps(metrics)
            found = _process(pid, victim) if steps >= number * every else None
            if found is not None:
                os.kill(found, signal.SIGKILL)
                kills.append({"victim": victim, "env_steps": steps})
                break
            over.wait(AIM_SECONDS)


def check_kill(kill: Sequence[str], ready: Prepared, auto: bool) -> None:
    """Refuse to kill a process that will not exist; with `auto` actors, how many there are is known only when it runs."""
    program = ready.program()
    members = [[f"{name} {index}" for name, index in place.members if index < program.nodes[name].start]
               for place in program.places.values()]
    titles = [" + ".join(names) for names in members if names]  # as `ps` shows them
    for victim in kill:
        roles = {part.rpartition(" ")[0] for part in victim.split(" + ")}
        if not (roles <= set(program.nodes) if auto else victim in titles):
            raise ConfigError(f"kill={victim!r} is not possible: no process is called that; there are {', '.join(titles)}")


def _env_steps(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    lines = metrics.read_text(encoding="utf-8").splitlines()
    for line in reversed(lines):
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if "env_steps" in row:
                return int(row["env_steps"])
    return 0


def _process(parent: int, victim: str) -> int | None:
    """A process below `parent` by the name that `ps` shows."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(parent).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(child.cmdline()).strip() == f"shoal: {victim}" and child.status() != psutil.STATUS_ZOMBIE:
                    return int(child.pid)
    return None
