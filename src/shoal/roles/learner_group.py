"""Several learners that make the update of one: the wire they share, and how they agree on one state."""

from __future__ import annotations

import numpy as np

from shoal.core import Group, GroupMember, Me
from shoal.learning import Learn
from shoal.roles.learner_state import LearnerState, learner_arrays
from shoal.roles.parts import Parts
from shoal.runtime import Program
from shoal.runtime.device_group import DeviceGroup
from shoal.runtime.wires import Port
from shoal.slots import Layout

__all__ = ["agree", "group_on", "learner_group"]


def learner_group(program: Program, parts: Parts) -> Port | None:
    """The port through which several learners share gradients, and their whole state when one has died; None for one."""
    if parts.learners == 1:
        return None
    learn = parts.algorithm.learn(parts.seed)
    nbytes = Layout.of(learner_arrays(learn, np.zeros(2, np.int64))).nbytes
    return program.group("gradients", nbytes).port("member")


def group_on(me: Me, parts: Parts, group: GroupMember | None) -> Group | None:
    """A learner's group: over the GPUs where learners are on GPUs."""
    return group if group is None or not parts.hardware.on_gpu else DeviceGroup(group, parts.hardware.device, me.note)


async def agree(state: LearnerState[Learn], group: Group) -> None:
    """Enter a group of learners, with the state of its senior member."""
    mine = state.arrays()
    layout = Layout.of(mine)
    flat = np.zeros(layout.nbytes, np.uint8)
    layout.copy(layout.views(flat), mine)
    await group.sync(flat)
    state.load(layout.views(flat))
