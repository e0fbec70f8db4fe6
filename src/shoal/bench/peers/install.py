"""Peers in virtual environments of their own, under .peers/. Each has the same PyTorch as shoal, as its CPU build."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.bench.machine import ROOT
from shoal.bench.measure import tail

__all__ = ["PEERS", "Peer", "install"]

FOLDER = ROOT / ".peers"
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Peer:
    """A library to be compared with."""

    name: str
    package: str
    """The distribution whose version is shown."""
    requirements: tuple[str, ...]

    @property
    def python(self) -> Path:
        return FOLDER / self.name / "bin" / "python"


PEERS = (
    Peer("sample_factory", "sample-factory", ("sample-factory==2.1.1", "ale-py==0.12.1")),
    Peer("rllib", "ray", ("ray[rllib]==2.60.*", "ale-py==0.12.1")),
    Peer("sb3", "stable-baselines3", ("stable-baselines3>=2.7", "ale-py==0.12.1")),
)

VERSIONS = """
import importlib.metadata as m
names = ({package!r}, "torch", "gymnasium", "numpy", "ale-py")
print(", ".join(name + " " + m.version(name) for name in names))
"""


def install(peer: Peer, say: Callable[[str], None]) -> tuple[bool, str]:
    """Install what is missing. Returns whether it can be used, and its versions or the reason why not."""
    found = versions(peer)
    if found is None:
        say(f"installing {peer.name} into {FOLDER / peer.name}")
        steps = ([sys.executable, "-m", "venv", str(FOLDER / peer.name)],
                 [str(peer.python), "-m", "pip", "install", "--quiet", TORCH],
                 [str(peer.python), "-m", "pip", "install", "--quiet", TORCH, *peer.requirements])
        for command in steps:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return False, f"could not be installed: {tail(done.stderr)}"
        found = versions(peer)
    if found is None:
        return False, "was installed but cannot tell its version"
    if "+cpu" not in found:
        return True, f"{found} (not the CPU build of torch)"
    return True, found


def versions(peer: Peer) -> str | None:
    """`name version, ...` of what is installed; None where something is missing."""
    if not peer.python.exists():
        return None
    done = subprocess.run([str(peer.python), "-c", VERSIONS.format(package=peer.package)], capture_output=True, text=True,
                          check=False)
    return done.stdout.strip() if done.returncode == 0 else None
