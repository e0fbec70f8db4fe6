"""The libraries that shoal is compared with, each in a virtual environment of its own under .peers/. Those that need PyTorch have
shoal's version of it, as its CPU build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.machine import ROOT
from shoal.bench.parent_death import tied_to_parent
from shoal.bench.rates import tail
from shoal.errors import ConfigError

__all__ = ["DRIVERS", "PEERS", "PeerLibrary", "install", "peer_named"]

FOLDER = ROOT / ".peers"
DRIVERS = Path(__file__).parent / "drivers"
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class PeerLibrary:
    """A library to compare with."""

    name: str
    package: str
    """The distribution whose version is shown."""
    requirements: tuple[str, ...] = ()
    """What is installed into its environment; with none it runs in shoal's own."""
    beside: tuple[str, ...] = ("torch", "gymnasium", "numpy", "ale-py")
    """Other distributions that it runs with, whose versions are shown too."""
    shares: str = ""
    """The peer whose environment it runs in; none: one of its own."""

    @property
    def folder(self) -> Path:
        return FOLDER / (self.shares or self.name)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python" if self.requirements else Path(sys.executable)

    def command(self, order: Mapping[str, Any]) -> list[str]:
        """Its driver with an order, to be run in DRIVERS with `driver_environment`."""
        return [str(self.python), str(DRIVERS / f"drive_{self.name}.py"), json.dumps(order)]


PEERS = (
    PeerLibrary("sample_factory", "sample-factory", ("sample-factory==2.1.1", "ale-py==0.12.1")),
    PeerLibrary("rllib", "ray", ("ray[rllib]==2.60.*", "ale-py==0.12.1")),
    PeerLibrary("sb3", "stable-baselines3", ("stable-baselines3>=2.7", "ale-py==0.12.1")),
    PeerLibrary("sb3_dqn", "stable-baselines3", ("stable-baselines3>=2.7", "ale-py==0.12.1"), shares="sb3"),
    PeerLibrary("torchrl", "torchrl", ("torchrl==0.14.*", "gymnasium==1.4.0", "ale-py==0.12.1")),
    PeerLibrary("cleanrl", "gymnasium", ("gymnasium==1.4.0", "ale-py==0.12.1")),
    PeerLibrary("cleanrl_dqn", "gymnasium", ("gymnasium==1.4.0", "ale-py==0.12.1"), shares="cleanrl"),
    PeerLibrary("reference_loop", "gymnasium", beside=("torch", "numpy")),
)

VERSIONS = """
import importlib.metadata as m
print(", ".join(name + " " + m.version(name) for name in {names!r}))
"""


def peer_named(name: str) -> PeerLibrary:
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise ConfigError(f"there is no peer {name!r}; there are {', '.join(peer.name for peer in PEERS)}")


def driver_environment() -> dict[str, str]:
    """The environment variables of a driver, which finds its neighbours and nothing of shoal."""
    return {**os.environ, "PYTHONPATH": str(DRIVERS)}


def install(peer: PeerLibrary, say: Callable[[str], None]) -> tuple[bool, str]:
    """Install what is missing. Returns whether the peer can be used, and its versions or the reason why not."""
    found, torch = versions(peer), (TORCH,) * ("torch" in peer.beside)
    if found is None and peer.requirements:
        say(f"installing {peer.name} into {peer.folder}")
        pip = [str(peer.python), "-m", "pip", "install", "--quiet"]
        steps = [[sys.executable, "-m", "venv", str(peer.folder)], *([*pip, one] for one in torch),
                 [*pip, *torch, *peer.requirements]]
        for command in steps:
            done = _run(command)
            if done.returncode:
                return False, f"could not be installed: {tail(done.stderr) or tail(done.stdout) or f'exit code {done.returncode}'}"
        found = versions(peer)
    if found is None:
        return False, "was installed but cannot tell its version"
    if torch and peer.requirements and "+cpu" not in found:
        return True, f"{found} (not the CPU build of torch)"
    return True, found


def versions(peer: PeerLibrary) -> str | None:
    """`name version, ...` of what is installed; None where something is missing."""
    done = _run([str(peer.python), "-c", VERSIONS.format(names=(peer.package, *peer.beside))])
    return done.stdout.strip() if done.returncode == 0 else None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; one whose program is missing fails like any other."""
    return subprocess.run(tied_to_parent(command), capture_output=True, text=True, check=False)
