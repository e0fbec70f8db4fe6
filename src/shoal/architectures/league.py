"""The league of AlphaStar (Vinyals et al. 2019): players that learn, their snapshots, and a coordinator that says who plays whom.

      actor 0 ─┐                               ┌─ P.learner ──── P.weights (broadcast) ──▶ actors, coordinator, main.evaluator
      actor 1 ─┼── P.unrolls (stream) ─────────┤
      ...     ─┘                               └─ ...            for each player P: main, main_exploiter, league_exploiter_0, ...
         │
         ├── matches (call) ─────▶ coordinator: payoff table, matchmaking      a result, and whom to play next
         ├── snapshots (call) ───▶              vault on disk                  weights of a snapshot
         ◀── line_up (broadcast) ─              who plays now
                                        └── control: learners start and stop; an exploiter's begins anew after its snapshot
"""

from __future__ import annotations

from shoal.errors import ConfigError
from shoal.roles.batches import Intake
from shoal.roles.coordinator import Coordinator, line_up_layout, match_layouts, snapshot_layout
from shoal.roles.evaluator import add_evaluator
from shoal.roles.league_actor import LeagueActor
from shoal.roles.learner import Learner
from shoal.roles.learner_group import learner_group
from shoal.roles.parts import Parts
from shoal.roles.policy_actor import episode_return_of
from shoal.runtime import Program
from shoal.runtime.program import CONTROL
from shoal.telemetry import Metric

__all__ = ["draw_league"]


def draw_league(program: Program, parts: Parts, *, depth: int, intake: Intake) -> None:
    """Draw the graph of a league. A stream has `depth` slots for each actor and learner."""
    assert parts.policies is not None and parts.league is not None
    players = parts.policies.learning
    if parts.algorithm.from_replay:
        raise ConfigError(f"a league with --algorithm {parts.algorithm.name} does not fit: it learns from replay tables; use an "
                          "algorithm that learns from unrolls (vtrace, appo)")
    if parts.actors * parts.envs_per_actor < len(players):
        raise ConfigError(f"a league of {len(players)} players needs an environment for each, and {parts.actors} actors x "
                          f"--architecture.envs-per-actor {parts.envs_per_actor} is less; raise it")
    streams, weights = {}, {}
    for name, own in players.items():
        with program.scoped(name):
            streams[name] = program.stream("unrolls", own.algorithm.record.layout, depth=depth)
            weights[name] = program.broadcast("weights", own.algorithm.published_layout())
    readers = {name: wire.reader for name, wire in weights.items()}
    matches = program.call("matches", *match_layouts(parts.envs_per_actor), depth=1)
    snapshots = program.call("snapshots", snapshot_layout(), parts.algorithm.published_layout(), depth=1)
    line_up = program.broadcast("line_up", line_up_layout(len(players)))
    program.metrics += tuple(Metric(episode_return_of(name), "mean", "reward", f"Undiscounted return of {name} in training.")
                             for name in players)
    program.add("actor", LeagueActor, parts=parts, experience={name: stream.sink for name, stream in streams.items()},
                weights=readers, plan=parts.league, matches=matches.client, snapshots=snapshots.client,
                line_up=line_up.reader, replicas=(1, parts.actors, parts.actors))
    first, started = next(iter(players)), parts.league.started()
    for name, own in players.items():
        least, start = own.learners if name == first else 0, own.learners if name in started else 0
        with program.scoped(name):
            program.add("learner", Learner, parts=own, batches=streams[name].source, weights=weights[name].publisher,
                        group=learner_group(program, own), intake=intake, replicas=(least, start, own.learners),
                        compute_threads=own.learner_threads, private_bytes=intake.slots * streams[name].layout.nbytes)
    program.add("coordinator", Coordinator, plan=parts.league, algorithm=parts.algorithm, matches=matches.server,
                snapshots=snapshots.server, weights=readers, line_up=line_up.publisher, control=CONTROL, started=started,
                learners=parts.learners)
    with program.scoped(first):
        add_evaluator(program, players[first], weights[first])
