"""What a peer's driver is told is checked before anything is run, against what the driver reads."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.peers import cases
from benchmarks.peers.driver_options import driver_of, takes
from benchmarks.peers.install import PEERS
from shoal.bench.jobs import run_job
from shoal.bench.suite import Job, SuiteCase, load_suite, parse_suite
from shoal.errors import ConfigError

RUN = {"env": "CartPole-v1", "max_seconds": 3.0}
PONG = {**RUN, "env": "ALE/Pong-v5"}
RLLIB = {"peer": "rllib", "order": {"algorithm": "impala"}}


@pytest.mark.parametrize(("case", "words"), [
    ({"peer": "cleanrl", "order": {"nonsense": 7}}, "order has 'nonsense', which changes nothing here"),
    ({"peer": "cleanrl", "order": {"xyz": 7}}, "order has 'xyz', which changes nothing here; the driver of cleanrl takes: epochs"),
    ({"peer": "sb3", "order": {"epoch": 1}}, "did you mean epochs?"),
    ({"peer": "sb3"}, "sb3 needs to know the epochs; write order = { epochs = 1 }"),
    ({"peer": "sb3", "until_return": 475.0}, "sb3 needs to know the race; write order = { race"),
    ({"peer": "sb3", "until_return": 475.0, "order": {"race": "slow"}}, "order.race='slow' is not possible"),
    ({"peer": "sb3", "until_return": 475.0, "order": {"race": "tuned", "epochs": 1}}, "order has 'epochs', which changes nothing"),
    ({"peer": "sb3", "order": {"epochs": 1, "race": "tuned"}}, "order has 'race', which changes nothing"),
    ({**PONG, "peer": "sb3", "until_return": 5.0, "order": {"race": "tuned"}}, "peers are judged on CartPole-v1 only"),
    ({"peer": "sample_factory", "until_return": 5.0}, "does not apply to sample_factory: its driver cannot train to a threshold"),
    ({**RLLIB, "until_return": 5.0}, "does not apply to rllib"),
    ({"peer": "rllib"}, "rllib needs to know the algorithm; write order = { algorithm = \"...\" } with one of appo, dqn, impala, "
     "ppo"),
    ({"peer": "rllib", "order": {"algorithm": "sac"}}, "order.algorithm='sac' is not possible"),
    ({"peer": "rllib", "order": {"algorithm": "dqn", "epochs": 4}}, "order has 'epochs', which changes nothing"),
    ({"peer": "rllib", "order": {"algorithm": "impala", "epochs": 4}}, "order has 'epochs', which changes nothing"),
    ({"peer": "rllib", "order": {"algorithm": "impala", "settings": {"minibatch": 64}}}, "order.settings has 'minibatch'"),
    ({**PONG, "peer": "rllib", "order": {"algorithm": "impala", "settings": {"vector": True}}}, "vectorised CartPole-v1"),
    ({"peer": "torchrl", "order": {"threads": 0}}, "order.threads=0 is not possible: give a whole number from 1 on"),
    ({"peer": "torchrl", "order": {"epochs": True}}, "order.epochs=True is not possible"),
    ({"peer": "torchrl", "order": {"seed": 3}}, "order has 'seed', which the case gives itself; write seeds = ..."),
    ({"peer": "torchrl", "order": {"settings": 3}}, "order.settings=3 is not possible"),
    ({"peer": "torchrl", "order": {"settings": {"stepps": 3}}}, "order.settings has 'stepps'; did you mean steps?"),
    ({"peer": "torchrl", "order": {"settings": {"steps": "many"}}}, "order.settings.steps='many' is not possible"),
])
def test_wrong_orders_are_refused(case, words):
    with pytest.raises(ConfigError) as error:
        parse_suite("t", {"case": [{**RUN, **case, "name": "the bad one"}]})
    assert words in str(error.value) and str(error.value).startswith("suite t, case 1 (the bad one): ")


@pytest.mark.parametrize("case", [
    {"peer": "sb3", "order": {"epochs": 4, "threads": 2, "settings": {"batch_size": 1024, "vf_coef": 0.25}}},
    {"peer": "sb3", "until_return": 475.0, "order": {"race": "4 epochs", "settings": {"gamma": 0.98}}},
    {"peer": "rllib", "order": {"algorithm": "ppo", "epochs": 4, "settings": {"fragment": 32, "learners": 1}}},
    {"peer": "sample_factory", "order": {"settings": {"num_epochs": 2, "learning_rate": 1e-3}}},
    {"peer": "cleanrl", "order": {"settings": {"lr": 1}}},
])
def test_an_order_that_makes_sense_is_taken(case):
    assert parse_suite("t", {"case": [{**RUN, **case}]}).cases[0].order == case["order"]


def test_every_driver_can_be_read():
    for peer in PEERS:
        driver = driver_of(peer.name)
        assert {"scene", "seconds", "seed", "settings"} <= driver.keys and "SETTINGS" in driver.tables
        assert ("goal" in driver.keys) == any(name in driver.tables for name in ("RACE", "RACES"))
    assert takes("sb3", race=False) == {"epochs", "threads", "settings"}
    assert takes("sb3", race=True) == takes("sb3_dqn", race=True) == {"race", "threads", "settings"}
    assert takes("sb3_dqn", race=False) == {"threads", "settings"}


def test_defaults_of_the_suites():
    """The suites give a default only to the drivers that take it."""
    table = {"defaults": {"order": {"threads": 2, "race": "tuned", "epochs": 1}}, "quick": {"order": {"threads": 1}},
             "case": [{**RUN, "peer": "sb3"}, {**RUN, **RLLIB}]}
    assert [case.order for case in parse_suite("t", table).cases] == [{"threads": 2, "epochs": 1}, {"algorithm": "impala"}]
    assert parse_suite("t", table, "quick").cases[0].order == {"threads": 1, "epochs": 1}
    assert any(case.order for case in load_suite("throughput").cases)


def test_row_says_what_was_used(monkeypatch):
    told = {"marks": [[0.0, 0], [1.0, 10], [2.0, 20]], "began_at": 0.0, "settings": {"epochs": 1, "envs": 8}, "threads": 2,
            "version": "9", "torch": "2.13.0"}

    class Ran:
        def run(self, words, seconds, beside=None, cwd=None, env=None):
            return subprocess.CompletedProcess(words, 0, "noise\n" + json.dumps(told), "")

    monkeypatch.setattr(cases, "installed", lambda peer: (True, "torchrl 9, torch 2.13.0"))
    case = SuiteCase("c", peer="torchrl", **RUN, order={"epochs": 1, "threads": 2})
    row = run_job(Job(case, 3), Ran())
    assert row["used"] == {"order": {"scene": "cartpole", "seconds": 3.0, "seed": 3, "epochs": 1, "threads": 2}, "threads": 2,
                           "settings": {"epochs": 1, "envs": 8}, "packages": "torchrl 9, torch 2.13.0"}
