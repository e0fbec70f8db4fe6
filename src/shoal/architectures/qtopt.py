"""Bellman updaters between two kinds of tables: QT-Opt (Kalashnikov et al. 2018, 1806.10293, figure 4).

      actor 0 ──┐
      actor 1 ──┼─ inserts ──▶ replay_online  ─┐ samples                      inserts
      ...     ──┘                              ├─────────▶ updater 0, 1, ... ─────────▶ replay_train ── samples ──▶ learners
      log_reader ─ inserts ──▶ replay_offline ─┘           targets by CEM               labelled items                │
          ▲                                                   ▲                                                       │
        --demos                   actors, evaluator ◀─────────┴───────── weights (broadcast): two target nets ◀───────┘

With --architecture.record actors also write their episodes to a folder of logs, which a later run may read with --demos.

Transitions wait in `replay_online` and `replay_offline`, one table for what actors (the paper's collectors) do now and one for what
a recording holds. Each updater draws from both, attaches targets and inserts into `replay_train`, from which the learner draws: a
target is as old as its item's stay there. With --offline nobody acts; `shoal resume RUN --online` adds actors, and the share of
online items in the updaters' batches rises from `online_start` to `online_final`. --replay.* is about the tables of transitions
(capacity, min-size, samples-per-insert, insert-batch) and about the learner (batch-size, exponent, publish-updates, prefetch).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.errors import ConfigError
from shoal.learning import Architecture, ArchitectureOptions, Delivery, Relabels, Tolerance
from shoal.options import number
from shoal.roles.actor import Actor
from shoal.roles.data_path import TablePath, table_path
from shoal.roles.evaluator import add_evaluator
from shoal.roles.learner import Learner
from shoal.roles.learner_group import learner_group
from shoal.roles.parts import Parts
from shoal.roles.replay_config import ReplayConfig
from shoal.runtime import Program

__all__ = ["Config", "QTOptGraph"]


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Actors, Bellman updaters and learners."""

    envs_per_actor: int = number(8, at_least=1)
    """Environments that one actor steps together, E."""
    updaters: int = number(1, at_least=1)
    """Processes that attach targets to transitions."""
    updater_batch: int = number(256, at_least=1)
    """Transitions that an updater draws and labels at once."""
    train_capacity: int = number(20_000, at_least=1, at_most=100_000_000)
    """Labelled items that the learner draws from; the oldest leave first. More of them means older targets."""
    train_min_size: int = number(2_000, at_least=1)
    """Labelled items before the first update."""
    train_samples_per_insert: float | None = number(8.0, above=0)
    """How often a labelled item is drawn on average; none lets updaters and learner run as fast as they can."""
    online_start: float = number(0.01, at_least=0, at_most=1)
    """Share of the actors' transitions in the updaters' batches when they begin; the rest is from --demos."""
    online_final: float = number(0.5, at_least=0, at_most=1)
    """The same share in the end."""
    online_updates: int = number(3_000, at_least=0)
    """Updates over which it rises (paper: 1,000,000)."""
    online_after: int = number(0, at_least=0)
    """Updates that were made before actors began; `shoal resume RUN --online` fills it in."""
    record: str | None = None
    """Folder to write the actors' episodes to, a recording for each actor; what is there already is added to."""

    def validate(self) -> None:
        super().validate()
        if self.train_min_size > self.train_capacity:
            raise ConfigError(f"--architecture.train-min-size {self.train_min_size} is above --architecture.train-capacity "
                              f"{self.train_capacity}, so no batch would ever be drawn; lower the one or raise the other")

    def raw(self, replay: ReplayConfig) -> ReplayConfig:
        """The values of a table of transitions: all are drawn alike."""
        return replace(replay, batch_size=self.updater_batch, exponent=0.0, evict_exponent=None, trim_updates=0,
                       prefetch=2)

    def train(self, replay: ReplayConfig) -> ReplayConfig:
        """The values of the table of labelled items."""
        return replace(replay, capacity=self.train_capacity, min_size=self.train_min_size, insert_batch=self.updater_batch,
                       samples_per_insert=self.train_samples_per_insert, tolerance=None)


class QTOptGraph(Architecture):
    """See the module."""

    name = "qtopt"
    config_class = Config
    takes_unrolls = False
    takes_replay = takes_demos = needs_relabel = draws_offline = True
    process_options = ("updaters",)

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.REPLAY, "transitions are drawn from replay tables, and so are their targets")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        from shoal.roles.relabel import Relabel, ShareRamp  # only now: it imports Numba

        algorithm = parts.algorithm
        assert isinstance(algorithm, Relabels)
        self._check(parts, config)
        weights = program.broadcast("weights", algorithm.published_layout())
        offline = self._offline_table(program, parts, config) if parts.demos is not None else None
        online = None
        if not parts.offline:
            actors = parts.of_table("replay_online", config.raw(parts.replay))
            online = table_path(program, actors)
            program.add("actor", Actor, parts=actors, experience=online.producer, weights=weights.reader, record=config.record,
                        replicas=parts.actor_replicas)
            online.add_tables()
        into = parts.of_table("replay_train", config.train(parts.replay), items=algorithm.relabelled, inserters=config.updaters)
        train = table_path(program, into)
        source, second = (offline, online) if offline is not None else (online, None)
        assert source is not None  # --offline needs --demos
        ramp = ShareRamp(config.online_start, config.online_final, config.online_updates, config.online_after)
        program.add("updater", Relabel, parts=source.parts, into=into, source=source.consumer, relabelled=train.producer,
                    weights=weights.reader, second=None if second is None else second.consumer,
                    ramp=None if second is None else ramp, replicas=config.updaters)
        train.add_tables()
        program.add("learner", Learner, parts=into, batches=train.consumer, weights=weights.publisher,
                    group=learner_group(program, parts), replicas=parts.learners, compute_threads=parts.learner_threads)
        add_evaluator(program, parts, weights)

    def _offline_table(self, program: Program, parts: Parts, config: Config) -> TablePath:
        from shoal.roles.log_reader import LogReader

        logs = parts.of_table("replay_offline", config.raw(parts.replay), inserters=1)
        path = table_path(program, logs)
        program.add("log_reader", LogReader, parts=logs, path=parts.demos, inserts=path.producer)
        path.add_tables()
        return path

    def _check(self, parts: Parts, config: Config) -> None:
        if config.record is not None and not parts.offline:
            from shoal.roles.recording_env import check_log

            check_log(config.record, parts.env)
        if parts.replay.shards > 1:
            raise ConfigError(f"--replay.shards {parts.replay.shards} with --architecture qtopt does not fit: each of its tables "
                              "is one process; leave it out")
        if parts.replay.demo_ratio is not None:
            raise ConfigError(f"--replay.demo-ratio {parts.replay.demo_ratio:g} with --architecture qtopt does not fit: updaters "
                              "mix recorded and new transitions; use --architecture.online-start and --architecture.online-final")
