"""The five kinds of wires, each in one file: stream, broadcast, call, group, shared.

Each is written once, against slots.Allocator: the inline runtime gives it plain memory and queues, the local runtime shared
memory and pipes, the Ray runtime private memory that links keep equal (`runtime/ray/links`).
"""

from shoal.runtime.wires.broadcast import BroadcastWire
from shoal.runtime.wires.call import CallWire
from shoal.runtime.wires.group import GroupWire
from shoal.runtime.wires.shared import SharedWire
from shoal.runtime.wires.stream import StreamWire
from shoal.runtime.wires.wire import Port, Wire

__all__ = ["BroadcastWire", "CallWire", "GroupWire", "Port", "SharedWire", "StreamWire", "Wire"]
