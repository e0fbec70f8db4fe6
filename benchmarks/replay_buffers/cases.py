"""Cases of a suite with a `workload`: checks them, and runs a replay buffer's driver."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import cases as peer_cases
from benchmarks.peers.install import PeerLibrary, peer_named
from benchmarks.peers.process_monitor import last_json
from benchmarks.replay_buffers.workloads import check_kind
from shoal.bench.child_processes import TOO_LONG, ChildProcesses
from shoal.bench.rates import tail
from shoal.bench.run_folders import temporary_run_folder
from shoal.bench.suite import Job, SuiteCase
from shoal.errors import ConfigError

__all__ = ["PEERS", "check", "run"]

PEERS = (
    PeerLibrary("cpprb", "cpprb", ("cpprb", "numpy"), ("numpy",)),
    peer_named("sb3"),
    PeerLibrary("reverb", "dm-reverb", ("dm-reverb==0.14.0", "tensorflow-cpu==2.15.*"), ("tensorflow-cpu",)),
    peer_named("torchrl"),
)
TRANSPORTS = ("inline", "ipc", "tcp")
PATHS = re.compile(r"/(?:[^/\s'\")]+/)+([^/\s'\")]+)")  # in error messages: the file's name is enough


def buffer_names() -> list[str]:
    """Everything that `who` of a case may name."""
    return [*(f"shoal {transport}" for transport in TRANSPORTS), *(peer.name for peer in PEERS)]


def check(case: SuiteCase) -> None:
    try:
        check_kind(str(case.workload))
    except ValueError as error:
        raise ConfigError(f"workload={error}") from None
    if not (case.size and case.who):
        raise ConfigError("a workload needs a buffer; add size = 100_000 and who = [\"shoal inline\"]")
    if case.size < 1:
        raise ConfigError(f"size={case.size} is not possible: give 1 or more")
    for who in case.who:
        if who not in buffer_names():
            raise ConfigError(f"who={who!r} is not possible: give {', '.join(buffer_names())}")
        if case.workload == "sequences" and not who.startswith(("shoal", "reverb")):
            raise ConfigError(f"who={who!r} does not fit workload='sequences': only shoal and reverb store sequences; leave it out")


def run(job: Job, children: ChildProcesses, kept: Path | None) -> dict[str, Any]:
    """The buffer's rates, or its error; there are no logs to keep."""
    case, who = job.case, str(job.who)
    for able, words in map(peer_cases.installed, (peer for peer in PEERS if peer.name == who)):
        if not able:
            return {"error": words, "skipped": True}
    seconds = case.max_seconds or 1.0
    with temporary_run_folder() as folder:
        frames = folder / "pong.npy"
        recorded = case.workload != "small" and record_pong(frames)
        rates = measure(command(who, str(case.workload), case.size, seconds, frames if recorded else None), seconds, children)
    error = rates.pop("error", None)
    return {"error": error, "rates": rates}


def record_pong(path: Path, steps: int = 1024) -> bool:
    """Write frames of Pong under random actions as 84x84 grey; False without ale-py."""
    try:
        import ale_py
        import gymnasium as gym
    except ImportError:
        return False
    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", obs_type="grayscale")
    env.action_space.seed(0)
    env.reset(seed=0)
    rows, columns = np.linspace(34, 193, 84).astype(int), np.linspace(0, 159, 84).astype(int)
    frames: list[np.ndarray] = []
    while len(frames) < steps:
        frame, _, terminated, truncated, _ = env.step(env.action_space.sample())
        frames.append(frame[rows][:, columns])
        if terminated or truncated:
            env.reset()
    np.save(path, np.array(frames, np.uint8))
    return True


def command(who: str, kind: str, size: int, seconds: float, recording: Path | None) -> list[str]:
    """The command that measures one buffer."""
    words = [kind, str(size), str(seconds), *([str(recording)] if recording else [])]
    if who.startswith("shoal "):
        return [sys.executable, "-m", "benchmarks.replay_buffers.drive_shoal", who.removeprefix("shoal "), *words]
    (peer,) = (peer for peer in PEERS if peer.name == who)
    return [str(peer.python), str(Path(__file__).with_name("drive_peers.py")), peer.name, *words]


def measure(words: Sequence[str], seconds: float, children: ChildProcesses) -> dict[str, Any]:
    """What a driver printed last, or its error."""
    done = children.run(words, 240 + 30 * seconds)
    if done.returncode == TOO_LONG:
        return {"error": "took too long"}
    found = last_json(done.stdout)
    if done.returncode or found is None:
        return {"error": PATHS.sub(r"\1", tail(done.stderr, 1))[:300] or f"exit code {done.returncode}"}
    return found
