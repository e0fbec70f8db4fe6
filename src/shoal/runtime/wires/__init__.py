"""The five kinds of wires, each in one file: stream, broadcast, call, group, shared.

Each is written once, against slots.Medium: the inline runtime gives it plain memory and queues, the local runtime
shared memory and pipes.
"""

from shoal.runtime.wires.base import Port, Wire
from shoal.runtime.wires.broadcast import Broadcast
from shoal.runtime.wires.call import Call
from shoal.runtime.wires.group import Group
from shoal.runtime.wires.shared import Shared
from shoal.runtime.wires.stream import Stream

__all__ = ["Broadcast", "Call", "Group", "Port", "Shared", "Stream", "Wire"]
