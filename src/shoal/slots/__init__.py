"""Shared-memory slots: layouts of nested arrays over flat memory, anonymous shared memory, channels that carry numbers.

Depends on nothing else in shoal; used by the runtimes' wires and by the replay service.
"""

from shoal.slots.layout import Field, Layout, leaves, map_tree
from shoal.slots.medium import Channel, Inline, Local, Medium, Memory, fence
from shoal.slots.waiting import Wait, any_of

__all__ = ["Channel", "Field", "Inline", "Layout", "Local", "Medium", "Memory", "Wait", "any_of", "fence", "leaves", "map_tree"]
