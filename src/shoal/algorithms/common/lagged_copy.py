"""A copy of a vector as it was some updates ago: a ring of snapshots, so that the lag is the same at all times.

    every P updates:   lagged <- the oldest snapshot, which is L updates old;   its place in the ring <- the vector now

Between two snapshots the copy stays as it is, so its age goes from L to L + P. Before the first L updates are made it is the vector
that training began with. A copy that is renewed every L updates instead would be between 0 and L updates old.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Lag", "LaggedCopy"]


@dataclass(frozen=True)
class Lag:
    """How old the copy is, in updates, and how many of them lie between two snapshots."""

    updates: int
    snapshot_updates: int

    @property
    def snapshots(self) -> int:
        return -(-self.updates // self.snapshot_updates)


class LaggedCopy:
    """`state` is all of it as named tensors, changed in place only."""

    def __init__(self, lag: Lag, vector: torch.Tensor) -> None:
        self.lag = lag
        self.state = {"lagged": vector.detach().clone(), "snapshots": vector.detach().repeat(lag.snapshots, 1)}

    @torch.no_grad()
    def follow(self, vector: torch.Tensor, updates: torch.Tensor, changed: bool | torch.Tensor = True) -> None:
        """Call it after every update: `updates` [1] counts them. Where `changed` is a tensor no number is read."""
        lagged, snapshots = self.state["lagged"], self.state["snapshots"]
        period = self.lag.snapshot_updates
        if isinstance(changed, torch.Tensor):
            due = changed & (updates % period == 0)
            at = (torch.div(updates, period, rounding_mode="floor") % len(snapshots)).long()
            old = snapshots.index_select(0, at)
            snapshots.index_copy_(0, at, torch.where(due, vector.unsqueeze(0), old))
            lagged.copy_(torch.where(due, old[0], lagged))
        elif changed and int(updates) % period == 0:
            oldest = snapshots[int(updates) // period % len(snapshots)]
            lagged.copy_(oldest)
            oldest.copy_(vector)
