"""Learners over recordings alone, whatever the architecture would be with actors:

    reader ◀── samples (call) ── learners ── weights (broadcast) ──▶ evaluator, where there is a simulator

Items that are made of recorded steps alone and drawn alike are read from disk, epoch by epoch (roles/dataset_reader.py). Others,
which have priorities or recurrent states, lie in a table: the role is called demonstrations then (roles/demonstrations.py).
"""

from __future__ import annotations

from shoal.roles.evaluator import add_evaluator
from shoal.roles.learner import Learner
from shoal.roles.learner_group import learner_group
from shoal.roles.parts import Parts
from shoal.runtime import Program

__all__ = ["draw_offline"]


def draw_offline(program: Program, parts: Parts) -> None:
    from shoal.roles.dataset_reader import DatasetReader
    from shoal.roles.demonstrations import DemonstrationServer  # only now: it imports Numba
    from shoal.roles.replay_wires import samples_wire

    samples = samples_wire(program, parts, turns=False)
    weights = program.broadcast("weights", parts.algorithm.published_layout(), least_readers=0)  # nobody acts
    if parts.item_record.from_steps_alone and parts.item_record.decisions == 1 and not parts.replay.exponent:
        program.add("reader", DatasetReader, parts=parts, samples=samples.server)
    else:
        program.add("demonstrations", DemonstrationServer, parts=parts, samples=samples.server)
    program.add("learner", Learner, parts=parts, batches=samples.client, weights=weights.publisher,
                group=learner_group(program, parts), replicas=parts.learners, compute_threads=parts.learner_threads)
    add_evaluator(program, parts, weights)
