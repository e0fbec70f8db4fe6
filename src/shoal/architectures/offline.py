"""A learner over demonstrations alone, whatever the architecture would be with actors:

    demonstrations ◀── samples (call) ── learner ── weights (broadcast) ──▶ evaluator
"""

from __future__ import annotations

from shoal.errors import ConfigError
from shoal.roles.evaluator import add_evaluator
from shoal.roles.learner import Learner
from shoal.roles.parts import Parts
from shoal.runtime import Program

__all__ = ["draw_offline"]


def draw_offline(program: Program, parts: Parts) -> None:
    from shoal.roles.demonstrations import DemonstrationServer  # only now: it imports Numba
    from shoal.roles.replay_wires import samples_wire

    if parts.learners != 1:
        raise ConfigError(f"--learners {parts.learners} with --offline does not fit: there is one learner; leave it out")
    samples = samples_wire(program, parts, turns=False)
    weights = program.broadcast("weights", parts.algorithm.published_layout())
    program.add("demonstrations", DemonstrationServer, parts=parts, samples=samples.server)
    program.add("learner", Learner, parts=parts, batches=samples.client, weights=weights.publisher,
                compute_threads=parts.learner_threads)
    add_evaluator(program, parts, weights)
