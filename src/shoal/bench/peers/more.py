"""Peers of the suites beyond those of `make bench-peers`: TorchRL, and a script in CleanRL's manner with nothing but PyTorch."""

from __future__ import annotations

from shoal.bench.peers.install import PEERS, Peer
from shoal.errors import ConfigError

__all__ = ["ALL", "peer_named"]

ALL = (
    *PEERS,
    Peer("torchrl", "torchrl", ("torchrl==0.14.*", "gymnasium==1.4.0", "ale-py==0.12.1")),
    Peer("cleanrl", "gymnasium", ("gymnasium==1.4.0", "ale-py==0.12.1")),
)


def peer_named(name: str) -> Peer:
    for peer in ALL:
        if peer.name == name:
            return peer
    raise ConfigError(f"there is no peer {name!r}; there are {', '.join(peer.name for peer in ALL)}")
