"""Workers that play perturbed policies and tell each other returns: evolution strategies (Salimans et al. 2017, 1703.03864).

      worker 0 ─┐
      worker 1 ─┼── scores (group: each writes its own members', all add up) ──▶ every worker makes the same update
      worker 2 ─┘
      the senior worker ── weights (broadcast) ──▶ evaluator

This is the paper's algorithm 2. Every worker knows the seed, so it can rebuild everybody's perturbations: an iteration carries 16
bytes per member and the statistics of observations, however many parameters the policy has. A worker that joins is sent a state.

                    paper                                     here
    what is shared  a broadcast of each worker's returns      a sum: everybody's entries of one vector
    a lost worker   its results are missing from the batch    its members are played by the others: the iteration is the same
    a slow worker   waits for nobody (published code)         all wait for it; episodes have an adaptive limit
    drift           not looked for                            a checksum travels with the returns, a replica is resynchronised
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.learning import Architecture, ArchitectureOptions, Delivery, Tolerance
from shoal.options import number
from shoal.roles.evaluator import add_evaluator
from shoal.roles.evolution_worker import EvolutionWorker, group_bytes
from shoal.roles.parts import Parts
from shoal.runtime import Program

__all__ = ["Config", "Evolution"]


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Workers, with a master or without; there are as many as --actors."""

    envs_per_actor: int = number(64, at_least=1)
    """Episodes that a worker plays side by side, E: a chunk. Returns follow from the seed and the chunk, not from who plays it."""


class Evolution(Architecture):
    """See the module."""

    name = "evolution"
    config_class = Config
    takes_unrolls = False
    takes_scores = True
    learner_role = scaled_role = "worker"
    reports_steps = False

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.NOTHING, "all workers have the same parameters in every iteration")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        if parts.learners != 1:
            raise ConfigError(f"--learners {parts.learners}: every worker of evolution learns; use --actors {parts.learners}")
        if parts.env.varied:
            raise ConfigError(f"environments that vary from actor to actor ({', '.join(parts.env.varied)}): workers of evolution "
                              "play each other's members; use any other architecture")
        weights = program.broadcast("weights", parts.algorithm.published_layout()) if parts.eval.enabled else None
        scores = program.group("scores", group_bytes(parts, parts.actors))
        program.add("worker", EvolutionWorker, parts=parts, group=scores.member, weights=weights and weights.publisher,
                    replicas=(1, parts.actors, parts.actors), compute_threads=parts.learner_threads)
        add_evaluator(program, parts, weights)
