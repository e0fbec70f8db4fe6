"""Peers in virtual environments of their own, under .peers/. Who needs PyTorch has the same one as shoal, as its CPU build."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.bench.bound import bound
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
    beside: tuple[str, ...] = ("torch", "gymnasium", "numpy", "ale-py")
    """Other distributions that it runs with, whose versions are shown too."""

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
print(", ".join(name + " " + m.version(name) for name in {names!r}))
"""


def install(peer: Peer, say: Callable[[str], None]) -> tuple[bool, str]:
    """Install what is missing. Returns whether it can be used, and its versions or the reason why not."""
    found, torch = versions(peer), (TORCH,) * ("torch" in peer.beside)
    if found is None:
        say(f"installing {peer.name} into {FOLDER / peer.name}")
        pip = [str(peer.python), "-m", "pip", "install", "--quiet"]
        steps = [[sys.executable, "-m", "venv", str(FOLDER / peer.name)], *([*pip, one] for one in torch),
                 [*pip, *torch, *peer.requirements]]
        for command in steps:
            done = _run(command)
            if done.returncode:
                return False, f"could not be installed: {tail(done.stderr) or tail(done.stdout) or f'exit code {done.returncode}'}"
        found = versions(peer)
    if found is None:
        return False, "was installed but cannot tell its version"
    if torch and "+cpu" not in found:
        return True, f"{found} (not the CPU build of torch)"
    return True, found


def versions(peer: Peer) -> str | None:
    """`name version, ...` of what is installed; None where something is missing."""
    done = _run([str(peer.python), "-c", VERSIONS.format(names=(peer.package, *peer.beside))])
    return done.stdout.strip() if done.returncode == 0 else None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command that may be missing: then it fails as one that is there would."""
    return subprocess.run(bound(command), capture_output=True, text=True, check=False)
