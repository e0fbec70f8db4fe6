"""Shared-memory slots: layouts of nested arrays in flat memory, anonymous shared memory, channels that carry numbers.

Depends on nothing else in shoal; the wires of the runtimes and the replay service use it.
"""

from shoal.slots.layout import Field, Layout, assign, leaf_at, leaves, map_tree
from shoal.slots.memory import Allocator, Channel, InlineAllocator, LocalAllocator, MemoryBlock, fence
from shoal.slots.waiting import Wait, any_of

__all__ = ["Allocator", "Channel", "Field", "InlineAllocator", "Layout", "LocalAllocator", "MemoryBlock", "Wait", "any_of",
           "assign", "fence", "leaf_at", "leaves", "map_tree"]
