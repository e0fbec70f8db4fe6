"""Links: each carries what one side of a wire writes in its place to the copy of the other side, in another place.

The wires themselves are the same code on one machine and on a cluster, with the same states and the same rules about who may
change which. A link only does what shared memory did: it makes a change on one side visible on the other.

    stream      "full":   the bytes of a slot and its number      the producer's copy keeps the slot until
                "free":   the number of a slot that was read      this has come back: a consumer that dies loses nothing
    broadcast   "value":  a version, to a place that wants one    each version is put once, and only if a place wants it
                "want":   what a place has; it wants the next
    call        "ask":    the bytes of a request                  sent again to a restarted server
                "answer": the bytes of the reply
    group       "store":  where to join the process group of an epoch

`renewed` says that a member has a new incarnation: the link sends it again what its predecessor had been sent.
"""

from shoal.runtime.ray.links.broadcast_link import BroadcastLink
from shoal.runtime.ray.links.call_link import CallLink
from shoal.runtime.ray.links.link import Link, LinkContext
from shoal.runtime.ray.links.stream_link import StreamLink

__all__ = ["BroadcastLink", "CallLink", "Link", "LinkContext", "StreamLink"]
