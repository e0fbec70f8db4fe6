"""Several learners that make the update of one: the wire they share, and how they agree on one state."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from shoal.core import Group, GroupMember, Me
from shoal.learning import ComparingLearn, Updater
from shoal.roles.learner_state import LearnerState, learner_arrays
from shoal.roles.parts import Parts
from shoal.roles.recorded_moments import COLUMNS
from shoal.runtime import Program
from shoal.runtime.device_group import DeviceGroup
from shoal.runtime.wires import Port
from shoal.slots import Layout

__all__ = ["agree", "agree_again", "group_on", "learner_group", "state_bytes"]

U = TypeVar("U", bound=Updater)


def learner_group(program: Program, parts: Parts) -> Port | None:
    """The port through which several learners share gradients, and their whole state when one has died; None for one."""
    if parts.learners == 1:
        return None
    learn = parts.algorithm.learn(parts.seed)
    told = learn.told_bytes(parts.replay.batch_size, parts.learners) if isinstance(learn, ComparingLearn) else 0
    return program.group("gradients", max(state_bytes(learn, parts.counted_readers), told)).port("member")


def group_on(me: Me, parts: Parts, group: GroupMember | None) -> Group | None:
    """A learner's group: over the GPUs where learners are on GPUs."""
    return group if group is None or not parts.hardware.on_gpu else DeviceGroup(group, parts.hardware.device, me.note)


async def agree(state: LearnerState[U], group: Group) -> None:
    """Enter a group of learners, with the state of its senior member."""
    layout, flat = _packed(state)
    await group.sync(flat)
    state.load(layout.views(flat))


async def agree_again(state: LearnerState[U], group: Group) -> None:
    """Take over the state of the senior member of a group that this learner is in. All members call it together."""
    layout, flat = _packed(state)
    senior = await group.sum(flat if group.leader else np.zeros_like(flat))
    state.load(layout.views(senior))


def state_bytes(learn: Updater, readers: int = 0) -> int:
    """What a group wire must carry for members to agree, also on what they have counted of a recording's readers."""
    return Layout.of(learner_arrays(learn, np.zeros(2, np.int64), np.zeros((readers, COLUMNS), np.int64))).nbytes


def _packed(state: LearnerState[U]) -> tuple[Layout, np.ndarray]:
    """A copy of the state in one piece, and where its arrays lie in it."""
    mine = state.arrays()
    layout = Layout.of(mine)
    flat = np.zeros(layout.nbytes, np.uint8)
    layout.copy(layout.views(flat), mine)
    return layout, flat
