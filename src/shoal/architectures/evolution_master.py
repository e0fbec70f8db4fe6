"""A master hands out parameters and collects returns: evolution strategies as in the published code (Salimans et al. 2017,
1703.03864).

      master ── tasks (broadcast: parameters, observation statistics, limit of episodes) ──▶ workers
      workers ── results (stream: task, members, returns) ──▶ master
      master ── weights (broadcast) ──▶ evaluator

Nobody waits for a slow worker: a task is over when `population` members have come, no matter who played them. What comes later is
refused. `evolution` is the paper's own algorithm: parameters never travel, and any number of workers gives the same bits; here it
depends on who was faster.

                    published code                            here
    a result        what a worker played in 0.2 s             a chunk of --architecture.envs-per-actor episodes
    a batch         10,000 episodes and 100,000 steps         --algorithm.population members
    evaluation      0.3 % of all jobs play the parameters     the Evaluator does
"""

from __future__ import annotations

from shoal.architectures.evolution import Config
from shoal.errors import ConfigError
from shoal.learning import Architecture, Delivery, Tolerance
from shoal.roles.evaluator import add_evaluator
from shoal.roles.evolution_master import EvolutionMaster, TaskWorker, result_layout, task_layout
from shoal.roles.parts import Parts
from shoal.runtime import Program

__all__ = ["EvolutionMasterGraph"]


class EvolutionMasterGraph(Architecture):
    """See the module."""

    name, config_class, learner_role, scaled_role = "evolution_master", Config, "master", "worker"
    takes_unrolls, takes_scores = False, True

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.NOTHING, "results of older parameters are refused")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        if parts.learners != 1:
            raise ConfigError(f"--learners {parts.learners}: evolution_master has one master; use --actors {parts.learners}")
        tasks = program.broadcast("tasks", task_layout(parts))
        results = program.stream("results", result_layout(parts))
        weights = program.broadcast("weights", parts.algorithm.published_layout()) if parts.eval.enabled else None
        program.add("master", EvolutionMaster, parts=parts, tasks=tasks.publisher, results=results.source,
                    weights=weights and weights.publisher, compute_threads=parts.learner_threads)
        program.add("worker", TaskWorker, parts=parts, tasks=tasks.reader, results=results.sink,
                    replicas=(1, parts.actors, parts.actors))
        add_evaluator(program, parts, weights)
