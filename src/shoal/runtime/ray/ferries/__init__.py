"""Ferries: each carries what one side of a wire wrote in its place to the copy of the other side, in another place.

The wires themselves are the same code on one machine and on a cluster; so are their states, and who may change which.
A ferry only does what shared memory did: it makes a change on one side seen on the other.

    stream      "full":  the bytes of a slot and its number      producer's copy keeps the slot until
                "free":  the number of a slot that was read      this has come back: a consumer that dies loses nothing
    broadcast   "value": a version, to a place that wants one    one put per version, and none that nobody wants
                "want":  what a place has; it wants the next
    call        "ask":   the bytes of a request                  asked again of a server's successor
                "answer": the bytes of the reply

`renewed` is the supervisor's word that a member has a new incarnation: whatever its predecessor had been told is told again.
"""

from shoal.runtime.ray.ferries.base import Ferry, Ground
from shoal.runtime.ray.ferries.broadcast import BroadcastFerry
from shoal.runtime.ray.ferries.call import CallFerry
from shoal.runtime.ray.ferries.stream import StreamFerry

__all__ = ["BroadcastFerry", "CallFerry", "Ferry", "Ground", "StreamFerry"]
