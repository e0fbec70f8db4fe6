"""Coordinator, learner and actor of a league are killed: results count once, and no snapshot is lost."""

from __future__ import annotations

import json

import pytest

from shoal import algorithms
from shoal.architectures import named
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.live_settings import LiveValues
from shoal.league.matchmaking import LeagueOptions, LeaguePlan
from shoal.league.payoff import PayoffTable
from shoal.league.vault import Vault
from shoal.nets import NetConfig
from shoal.roles.coordinator import MOST_MATCHES
from shoal.roles.parts import EnvSource, EvalPlan, Parts
from shoal.roles.policies import NamedPolicies, NamedPolicy
from shoal.runtime import Program, run
from tests.runtime.harness import Farm, Killer, Saver, Watch

ENV = EnvSource("shoal/RockPaperScissors-v0")
VICTIMS = ("coordinator-0", "main.learner-0", "actor-0")


def drawn(folder, periods=()):
    kind = algorithms.named("vtrace")
    algorithm = kind(kind.config_class(unroll=4), ENV.describe(), NetConfig(hidden=(8,)), 2)
    plan = LeaguePlan.of(LeagueOptions(league_exploiters=0, least_steps=50, most_steps=100, periods=periods))
    parts = Parts(algorithm, ENV, 4, eval=EvalPlan(enabled=False), league=plan)
    players = NamedPolicies(tuple(NamedPolicy(name, 0, parts) for name in plan.players))
    program, architecture = Program("league", seed=2, store=TensorFiles(), work_counters=("env_steps",)), named("actor_learner")
    program.folder, program.metrics, program.settings = folder, algorithm.metrics, LiveValues(league=plan.options)
    architecture.draw(program, Parts(algorithm, ENV, 4, eval=parts.eval, policies=players, league=plan),
                      architecture.config_class(envs_per_actor=4))
    return program


def league_of(folder):
    return json.loads(bytes(TensorFiles().load(folder / "coordinator-0.safetensors")["league"]))["league"]


def test_kills(tmp_path):
    killer, saver = Killer(VICTIMS, 3, "league_reports", every=60), Saver(tmp_path / "saved", 20, "league_reports")

    def act(control):
        saver(control)
        killer(control)

    (tmp_path / "saved").mkdir()
    watch = Watch(lambda control: killer.done(control) and watch.folder is not None, act)
    assert run(drawn(tmp_path), watch, "local", tmp_path / "logs", fork_server=Farm.get()) == "until"
    assert killer.kills == 3 and watch.folder is not None
    league = league_of(watch.folder)
    table, vault = PayoffTable.from_state(league["payoff"]), Vault(tmp_path / "vault")
    assert 0 < table.played == table.reports <= sum(page["league_reports"] for page in watch.final.values())
    assert set(league["parent"]) <= set(vault.names()) and len(vault.names()) > 1
    assert all(vault.weights(name)["params"].size for name in vault.names())
    assert table.rate("main", "main-0000") + table.rate("main-0000", "main") == pytest.approx(1)


def test_a_killed_coordinator_lets_players_begin_anew(tmp_path):
    """There is no checkpoint from which its successor knows how often the main exploiter has begun anew, and it still does so after
    each of its snapshots; and the successor gives matches numbers that its predecessor has not given."""
    (tmp_path / "saved").mkdir()
    killer, saver = Killer(("coordinator-0",), 1, "league_reports", every=1500), Saver(tmp_path / "saved", 100, "league_reports")

    def act(control):
        killer(control)
        if killer.done(control):
            saver(control)

    watch = Watch(lambda control: watch.folder is not None, act)
    assert run(drawn(tmp_path), watch, "local", tmp_path / "logs", fork_server=Farm.get()) == "until" and killer.kills == 1
    league = league_of(watch.folder)
    learner = TensorFiles().load(watch.folder / "main_exploiter.learner-0.safetensors")
    snapshots = league["players"]["main_exploiter"][2]
    assert len(snapshots) > 10 and int(learner["resets"][0]) >= len(snapshots) - 2
    assert league["matches"] > MOST_MATCHES
