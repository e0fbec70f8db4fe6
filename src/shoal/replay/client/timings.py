"""How long a client waits for a server, besides the timeout of a call. Read as `timings.NAME`, so that one place sets them."""

from __future__ import annotations

__all__ = ["CLOCK_SECONDS", "DEAD_SECONDS", "GRACE_SECONDS", "LATE_SECONDS", "PING_SECONDS"]

GRACE_SECONDS = 1.0
"""How much longer than its timeout a client waits for the answer to arrive."""
LATE_SECONDS = 0.5
"""The server may answer this much after the timeout; the rest of the grace is for the answer's way back."""
PING_SECONDS = 0.5
"""A client that waits asks this often whether the server is alive."""
CLOCK_SECONDS = 0.05
"""An answer as quick as this measures the server's clock well enough."""
DEAD_SECONDS = 10.0
"""A server that was silent this long counts as dead for a call without a timeout, and for one shard among several."""
