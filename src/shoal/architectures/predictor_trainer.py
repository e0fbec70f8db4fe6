"""Agents without a model, predictors and trainers over one model: GA3C (Babaeizadeh et al. 2017, 1611.06256, figure 1).

      agent 0 ─┐  predictions (call)   ┌───────────────────────────────────────────┐
      agent 1 ─┼─────────────────────▶ │ predictor 0 ..   ┌───────────────────┐    │
      ...     ─┘ ◀──── actions ─────── │                  │ model (shared)    │    │ ── weights (broadcast) ──▶ evaluator
         │                             │                  └───────────────────┘    │
         └── unrolls (stream, short) ▶ │ trainer 0 ..                              │
                                       └──── one process, a thread for each ───────┘
      coordinator (optional): changes the numbers of agents, predictors and trainers, keeps what trains faster

A predictor answers whatever is pending when it is free, up to a cap; it never waits for a batch to fill. Parameters are never
copied: predictors read those that trainers write. So they change within an unroll, and by how much depends on the length of
the training queue: `queue_slots` is a learning hyper-parameter.

                   paper and its source                    here
    an agent       one environment                         `envs_per_actor`, stepped together
    returns        by the agent, from predicted values     by the trainer, from its own values: right for V-trace and GAE too
    segments       end with the episode; the last          T steps across episode ends; x_T is the next one's x_0
                   experience is withheld
    log pi         of max(pi, 1e-6)                         exact, from the log-softmax; with lag, --algorithm vtrace corrects it
    recurrent nets none                                    the state travels with the request
    adjusting      every 20 s, three steps at once         the same; off unless `adjust_seconds` is given
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.learning import Architecture, ArchitectureOptions, Delivery, Tolerance
from shoal.options import number
from shoal.roles.adjuster import NumberAdjuster
from shoal.roles.batches import Intake
from shoal.roles.data_path import data_path
from shoal.roles.evaluator import add_evaluator
from shoal.roles.learner import Learner
from shoal.roles.learner_state import model_layout
from shoal.roles.parts import Parts
from shoal.roles.predictor import Agent, Predictor, prediction_layouts
from shoal.runtime import CONTROL, Program

__all__ = ["Config", "PredictorTrainer"]

PLACE = "model"


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Agents, predictors and trainers; there are as many agents as --actors."""

    envs_per_actor: int = number(8, at_least=1)
    """Environments of one agent: the rows of one request and of one unroll."""
    predictors: int = number(1, at_least=1)
    """Threads that answer agents."""
    trainers: int = number(1, at_least=1)
    """Threads that learn."""
    batch_slots: int = number(1, at_least=1)
    """Unrolls that a trainer joins into a batch; more use the processor better and learn more slowly."""
    queue_slots: int = number(1, at_least=1)
    """Finished unrolls that each agent may have waiting for each trainer: the bound of the lag."""
    prediction_rows: int = number(512, at_least=1)
    """Most environments in one forward pass."""
    adjust_seconds: float = number(0.0, at_least=0)
    """Adjust the numbers of agents, predictors and trainers this often, by trainings per second (paper: 20); 0 never."""
    most_agents: int = number(8, at_least=1)
    """With adjusting: the most agents there may be."""
    most_threads: int = number(4, at_least=1)
    """With adjusting: the most predictors, and the most trainers, there may be."""

    def validate(self) -> None:
        super().validate()
        if self.prediction_rows < self.envs_per_actor:
            raise ConfigError(f"--architecture.prediction-rows {self.prediction_rows} is less than one request of "
                              f"--architecture.envs-per-actor {self.envs_per_actor} rows; raise it")


class PredictorTrainer(Architecture):
    """See the module."""

    name = "predictor_trainer"
    config_class = Config
    batch_slots = True
    process_options = ("predictors", "trainers")
    size_options = ("batch_slots", "envs_per_actor")

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.LAG, "trainers change the model while agents act and unrolls wait, so data are some versions old")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        if parts.learners != 1:
            raise ConfigError(f"--learners {parts.learners}: give --architecture.trainers {parts.learners} instead")
        numbers = {"agent": parts.actors, "predictor": config.predictors, "trainer": config.trainers}
        limits = {role: (number, number) for role, number in numbers.items()}
        if config.adjust_seconds:
            caps = {"agent": config.most_agents, "predictor": config.most_threads, "trainer": config.most_threads}
            limits = {role: (1, max(number, caps[role])) for role, number in numbers.items()}
        replicas = {role: (limits[role][0], number, limits[role][1]) for role, number in numbers.items()}
        intake = Intake(config.batch_slots)
        predictions = program.call("predictions", *prediction_layouts(parts.unroll_record), depth=1)
        path = data_path(program, parts, depth=config.queue_slots)
        weights = program.broadcast("weights", parts.algorithm.published_layout())
        model = program.shared("model", model_layout(parts, limits["trainer"][1]))
        program.add("agent", Agent, parts=parts, predictions=predictions.client, experience=path.producer,
                    replicas=replicas["agent"])
        program.add("predictor", Predictor, parts=parts, predictions=predictions.server, model=model.view, begun=weights.reader,
                    agents=limits["agent"][1], most_rows=config.prediction_rows, replicas=replicas["predictor"], place=PLACE)
        program.add("trainer", Learner, parts=parts, batches=path.consumer, weights=weights.publisher, model=model.view,
                    intake=intake, replicas=replicas["trainer"], place=PLACE, compute_threads=parts.learner_threads,
                    private_bytes=path.private_bytes(intake))
        program.threaded(PLACE)
        if config.adjust_seconds:
            program.add("coordinator", NumberAdjuster, control=CONTROL, model=model.view, numbers=numbers, limits=limits,
                        seconds=config.adjust_seconds)
        add_evaluator(program, parts, weights)
