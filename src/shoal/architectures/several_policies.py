"""Several named policies: the actors are shared, everything else is there once for each policy P that learns.

      actor 0 ─┐                                  ┌─ P.learner ──── P.weights (broadcast) ──▶ actors, all evaluators
      actor 1 ─┼── P.unrolls (stream, blocks) ────┤
      ...     ─┘                                  └─ ...            P.evaluator ──▶ its own environments

An actor sends a policy's slot when it is full, whatever the state of the other policies' slots. In lock step it fills one slot of
every policy, and waits for new weights of all of them. Evaluators read the weights of all policies: the other seats of their
environments are played by the newest versions.
"""

from __future__ import annotations

from shoal.errors import ConfigError
from shoal.roles.batches import Intake
from shoal.roles.learner import Learner
from shoal.roles.learner_group import learner_group
from shoal.roles.parts import Parts, learner_places
from shoal.roles.policy_actor import PolicyActor, episode_return_of
from shoal.roles.policy_evaluator import PolicyEvaluator
from shoal.runtime import Program
from shoal.telemetry import Metric

__all__ = ["draw_policies"]


def draw_policies(program: Program, parts: Parts, *, depth: int, intake: Intake, per_version: int, one_place: bool,
                  actor: str = "actor", learner: str = "learner") -> None:
    """Draw the graph of a program with several policies. A stream has `depth` slots for each actor and learner; `per_version` as in
    PolicyActor; with `one_place` actors live in the process of their learners; `actor` and `learner` are what the architecture
    calls these roles."""
    assert parts.policies is not None
    learning = parts.policies.learning
    if any(policy.algorithm.from_replay for policy in learning.values()):
        raise ConfigError(f"several policies with --algorithm {parts.algorithm.name} do not fit: it learns from replay tables, and "
                          "actors fill one table; use an algorithm that learns from unrolls (ppo, a2c, appo, vtrace)")
    place = learner_places(parts) if one_place else None
    streams, weights = {}, {}
    for name, own in learning.items():
        with program.scoped(name):
            streams[name] = program.stream("unrolls", own.algorithm.record.layout, depth=depth, paired=one_place)
            weights[name] = program.broadcast("weights", own.algorithm.published_layout())
    program.metrics += tuple(Metric(episode_return_of(name), "mean", "reward", f"Undiscounted return of {name} in training.")
                             for name in learning)
    program.add(actor, PolicyActor, parts=parts, experience={name: stream.sink for name, stream in streams.items()},
                weights={name: wire.reader for name, wire in weights.items()}, per_version=per_version,
                replicas=(1, parts.actors, parts.actors), place=place)
    for name, own in learning.items():
        with program.scoped(name):
            program.add(learner, Learner, parts=own, batches=streams[name].source, weights=weights[name].publisher,
                        group=learner_group(program, own), intake=intake, replicas=own.learners, place=place,
                        compute_threads=own.learner_threads, private_bytes=intake.slots * streams[name].layout.nbytes)
    for name, own in learning.items() if parts.eval.enabled else ():
        with program.scoped(name):
            program.add("evaluator", PolicyEvaluator, parts=own, policies=parts.policies, policy=name,
                        weights={other: wire.reader for other, wire in weights.items()})
    program.finishers = len(learning)
