"""Learners over recordings alone, whatever the architecture would be with actors:

    readers ◀── samples (call) ── learners ── weights (broadcast) ──▶ evaluator, where there is a simulator
                                                                  └──▶ value estimator, where a goal is fitted Q

Items that are made of recorded steps alone and drawn alike are read from disk, epoch by epoch (roles/dataset_reader.py). Others,
which have priorities or recurrent states, lie in a table: the role is called demonstrations then (roles/demonstrations.py).
"""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import ConfigError
from shoal.offline import open_shards
from shoal.roles.evaluator import add_evaluator
from shoal.roles.learner import Learner
from shoal.roles.learner_group import learner_group
from shoal.roles.parts import Parts
from shoal.roles.value_estimator import add_value_estimator
from shoal.runtime import Program

__all__ = ["draw_offline"]


def draw_offline(program: Program, parts: Parts) -> None:
    from shoal.roles.dataset_reader import DatasetReader
    from shoal.roles.demonstrations import DemonstrationServer  # only now: it imports Numba
    from shoal.roles.replay_wires import samples_wire

    by_epochs = parts.item_record.from_steps_alone and parts.item_record.decisions == 1 and not parts.replay.exponent
    readers = _readers(parts) if by_epochs else 1
    parts = replace(parts, counted_readers=readers if parts.item_record.observation_moments else 0)
    drawn = parts.of_table(parts.table, replace(parts.replay, shards=readers)) if readers > 1 else parts
    samples = samples_wire(program, drawn, turns=False)
    weights = program.broadcast("weights", parts.algorithm.published_layout(), least_readers=0)  # nobody acts
    if by_epochs:
        program.add("reader", DatasetReader, replicas=readers, parts=parts, samples=samples.server)
    else:
        program.add("demonstrations", DemonstrationServer, parts=parts, samples=samples.server)
    program.add("learner", Learner, parts=drawn, batches=samples.client, weights=weights.publisher,
                group=learner_group(program, drawn), replicas=parts.learners, compute_threads=parts.learner_threads)
    add_evaluator(program, parts, weights)
    add_value_estimator(program, parts, weights)


def _readers(parts: Parts) -> int:
    """How many there are; each needs a file."""
    wanted = parts.data.readers
    if wanted == 1:
        return 1
    if parts.replay.shards > 1:
        raise ConfigError(f"--replay.shards {parts.replay.shards} speaks of a replay table, and recordings are read from disk; "
                          f"leave it out")
    assert parts.demos is not None
    files = len(open_shards(parts.demos).shard_steps)
    if files < wanted:
        raise ConfigError(f"--data.readers {wanted}, but {parts.demos} has {files} file{'s' if files > 1 else ''}, and each reader "
                          f"needs one; give at most {files}")
    return wanted
