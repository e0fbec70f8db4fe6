"""Several policies in one graph: one of them alone is the plain program, and scopes name the parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal import algorithms
from shoal.architectures import named
from shoal.errors import RoleFailed
from shoal.nets import NetConfig
from shoal.roles.learner import Learner
from shoal.roles.parts import EnvSource, EvalPlan, Parts
from shoal.roles.policies import NamedPolicies, NamedPolicy
from shoal.runtime import Program, run
from tests.runtime.harness import RUNTIMES, Farm, Watch

ENV = EnvSource("shoal/TicTacToe-v0")


def parts_of(seats=8, unroll=8, actors=2):
    kind = algorithms.named("vtrace")
    algorithm = kind(kind.config_class(unroll=unroll), ENV.describe(), NetConfig(hidden=(8,)), seats)
    return Parts(algorithm, ENV, 4, actors=actors, eval=EvalPlan(enabled=False))


def drawn(parts, lockstep=True):
    program, architecture = Program("test", seed=5), named("actor_learner")
    config = architecture.config_class(envs_per_actor=4, batch_slots=2, lockstep=lockstep)
    program.metrics = parts.algorithm.metrics
    architecture.draw(program, parts, config)
    return program


def weights_after(program, updates):
    """The parameters of every learner when the first one has made this many updates."""
    learners = {}

    def kept(me, **arguments):
        learners[me.name] = Learner(me, **arguments)
        return learners[me.name]

    for node in program.nodes.values():
        node.role = kept if node.role is Learner else node.role
    run(program, Watch(lambda control: control.total("learner_steps") >= updates), "inline", Path())
    return {name: learner.learn.state["params"].numpy().copy() for name, learner in learners.items()}


@pytest.mark.parametrize("lockstep", [True, False])
def test_one_policy_is_the_plain_program(lockstep):
    """One policy among several is the plain program."""
    parts = parts_of()
    several = Parts(parts.algorithm, ENV, 4, actors=2, eval=parts.eval, policies=NamedPolicies(
        (NamedPolicy("solo", 0, parts),), lambda agent, episode: "solo"))
    plain, solo = weights_after(drawn(parts, lockstep), 5), weights_after(drawn(several, lockstep), 5)
    assert np.array_equal(plain["learner"], solo["solo.learner"])


def test_policies_learn_from_own_seats():
    """Both learn, though one of them plays only one game in four; what a fixed policy decides is learned from by nobody."""
    parts = parts_of(seats=2)
    program = drawn(Parts(parts.algorithm, ENV, 4, actors=2, eval=parts.eval, policies=NamedPolicies(
        (NamedPolicy("often", 0, parts), NamedPolicy("seldom", 0, parts), NamedPolicy("random", 0, fixed=_first_legal)),
        lambda agent, episode: "random" if agent == "player_1" else "seldom" if episode % 4 == 0 else "often")), lockstep=False)
    assert {"often.learner", "seldom.learner", "actor"} == set(program.nodes)
    watch = Watch(lambda control: control.total("learner_steps") >= 8)
    run(program, watch, "inline", Path())
    updates = {name: page["learner_steps"] for name, page in watch.final.items() if page["learner_steps"]}
    assert updates["often.learner-0"] > updates["seldom.learner-0"] > 0
    consumed = sum(page["samples_consumed"] for page in watch.final.values())
    assert 0 < consumed <= watch.final["actor-0"]["env_steps"] + watch.final["actor-1"]["env_steps"]


@pytest.mark.parametrize("kind", RUNTIMES)
def test_policy_without_seats(kind, tmp_path):
    """In lock step all would wait for ever for a policy that plays no more: the run ends with a sentence."""
    parts, program, architecture = parts_of(seats=2, actors=1), Program("test", seed=5), named("synchronous")
    program.metrics = parts.algorithm.metrics
    several = replace(parts, policies=NamedPolicies((NamedPolicy("always", 0, parts), NamedPolicy("early", 0, parts)), early))
    architecture.draw(program, several, architecture.config_class(envs_per_actor=4))
    with pytest.raises(RoleFailed, match=r"all policies wait for early with 0 of the last [0-9,]+ decisions: the mapping seats it"):
        run(program, Watch(lambda control: False, seconds=60), kind, tmp_path, fork_server=Farm.get() if kind == "local" else None)


def early(agent, episode):
    return "early" if episode < 2 else "always"


def _first_legal(seats, seed):
    return lambda step, rows: step.action_mask.argmax(1)
