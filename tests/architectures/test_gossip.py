"""GALA: the mixing table, rows that sum to 1, contraction; one learner alone is sequential; bounded solitude; real kills."""

import math

import numpy as np
import pytest
import torch

from shoal.algorithms import a2c, ppo
from shoal.architectures.gossip import in_peers
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from shoal.roles.gossip_link import mix
from shoal.slots import map_tree
from tests.architectures.graphs import Weights, draw, go, train
from tests.architectures.sequential import sequential
from tests.runtime.harness import kill

RING = [[2, 0, 0, 2], [2, 1, 0, 1], [1.5, 1.5, 0.5, 0.5], [1, 1.5, 1, 0.5], [0.75, 1.25, 1.25, 0.75], [0.75, 1, 1.25, 1]]


def round_of(x, listens, skip=()):
    """Everybody sends, then everybody who does not skip receives."""
    sent = x.clone()
    for i, peers in enumerate(listens):
        if i not in skip:
            mix(x[i : i + 1], [sent[j : j + 1] for j in peers])
    return x


def test_the_ring_table():
    """specs/policy.md 8e."""
    x, listens = torch.tensor([0.0, 0, 0, 4]), in_peers(4, "ring", 1, 0)
    for row in RING:
        torch.testing.assert_close(round_of(x, listens), torch.tensor(row, dtype=torch.float32))
        assert float(x.mean()) == 1


def test_skipped_receive():
    """A skipped receive keeps rows but not columns."""
    listens = in_peers(4, "ring", 1, 0)
    torch.testing.assert_close(round_of(torch.tensor([0.0, 0, 0, 4]), listens, skip=(0,)), torch.tensor([0.0, 0, 0, 2]))
    P = torch.stack([round_of(column.clone(), listens, skip=(0,)) for column in torch.eye(4)], 1)
    torch.testing.assert_close(P.sum(1), torch.ones(4))
    torch.testing.assert_close(P.sum(0), torch.tensor([1.5, 1, 1, 0.5]))


@pytest.mark.parametrize("graph", ["ring", "random"])
@pytest.mark.parametrize("count, peers", [(2, 1), (3, 1), (8, 1), (8, 3), (16, 2)])
def test_rows_sum_to_one(graph, count, peers):
    listens = in_peers(count, graph, peers, seed=5)
    assert all(i not in one and 1 <= len(one) <= peers for i, one in enumerate(listens))
    P = torch.stack([round_of(column.clone(), listens) for column in torch.eye(count, dtype=torch.float64)], 1)
    torch.testing.assert_close(P.sum(1), torch.ones(count, dtype=torch.float64))
    assert float(torch.linalg.matrix_power(P, 40 * count).std(0).max()) < 1e-3  # connected: all agree in the end
    if graph == "ring" and peers == 1:
        beta = float(torch.linalg.matrix_norm(P - torch.ones_like(P) / count, 2))
        assert beta == pytest.approx(math.cos(math.pi / count), abs=1e-6)
        x = torch.randn(count, dtype=torch.float64)
        before = (x - x.mean()).norm()
        round_of(x, listens)
        assert float((x - x.mean()).norm()) <= beta * float(before) + 1e-12


@pytest.mark.parametrize("config, net", [
    (a2c.Config(unroll=5, normalise_observations=True), NetConfig(recurrent="lstm", lstm_size=16)),
    (ppo.Config(unroll=8, epochs=2, minibatches=2, normalise_returns=True), None),
], ids=["a2c lstm", "ppo"])
def test_one_learner_is_sequential(config, net, tmp_path):
    """One learner alone is the sequential algorithm."""
    run = train(tmp_path, config, "gossip", "CartPole-v1", "inline", net=net)
    plain = sequential(config, "CartPole-v1", updates=12, role="learner_0", net=net)
    np.testing.assert_array_equal(run.published["params"], plain.state["params"].numpy())


class Everybody(Weights):
    """Keeps what every learner last sent."""

    def end(self, control, reason, error):
        super().end(control, reason, error)
        self.params = []
        for name, wire in sorted(control.program.wires.items()):
            if name.startswith("params_"):
                into = wire.layout.empty()
                wire.attach("reader", 0, 0).pull(into)
                self.params.append(map_tree(np.copy, into)["params"])

    @property
    def deviation(self):
        x = np.stack(self.params)
        return float(np.linalg.norm(x - x.mean(0)))


def test_gossip_keeps_learners_together(tmp_path):
    """Learners stay together only if they gossip."""
    config = a2c.Config(unroll=5, optimiser="sgd", lr=0.05)
    run = train(tmp_path, config, "gossip", "CartPole-v1", "inline", actors=3, updates=30, tau=0, watch=Everybody())
    alone = [sequential(config, "CartPole-v1", updates=30, role=f"learner_{i}").state["params"].detach().numpy() for i in range(3)]
    assert run.deviation < 0.5 * float(np.linalg.norm(np.stack(alone) - np.mean(alone, 0)))
    assert len({params.tobytes() for params in run.params}) == 3  # together, but not the same


def test_no_wait_before_tau(tmp_path):
    """learner_1 never speaks after its first message: learner_0 goes on tau times, then waits for it."""
    program, _ = draw(a2c.Config(unroll=5), "gossip", "CartPole-v1", actors=2, tau=3)
    node = program.nodes["learner_1"]
    make = node.role

    def silent(me, **arguments):
        role = make(me, **arguments)
        role.link._send = lambda: role.link.params.publish(role.link._message()) if role.link.version == 1 else None
        return role

    node.role = silent
    still = [0.0, 0.0]  # learner_0's steps, and since when

    def quiet(control):
        steps = control.snapshot()["learner_0-0"]["learner_steps"]
        if steps != still[0]:
            still[:] = steps, watch.age
        return steps and watch.age > still[1] + 1.0

    watch = Weights(until=quiet, seconds=20)
    run = go(program, "local", tmp_path, watch)
    assert run.reason == "until"
    # It may hear the only message in its first steps, or (at the wait itself) later: tau + 1 steps up to a wait, at most twice.
    assert 4 <= run.final["learner_0-0"]["learner_steps"] <= 8


def test_killed_learner(tmp_path):
    """A killed learner comes back with its neighbour's parameters."""
    left, mark = ["learner_1-0", "learner_0-0"], [100.0]

    def act(control):
        if left and control.total("learner_steps") > mark[0]:
            kill(control, left.pop(0))
            mark[0] = control.total("learner_steps") + 200

    watch = Everybody(until=lambda c: not left and c.total("restarts") >= 2 and c.total("learner_steps") > mark[0], act=act,
                      seconds=25)
    run = train(tmp_path, a2c.Config(unroll=5, lr=1e-3), "gossip", "CartPole-v1", "local", actors=3, updates=None, watch=watch)
    assert run.reason == "until"
    start = draw(a2c.Config(), "gossip", "CartPole-v1")[1].algorithm.learn(7).state["params"].detach().numpy()
    assert all(np.linalg.norm(params - start) > run.deviation for params in run.params)  # nobody is back at the start


def test_bad_values_are_refused():
    with pytest.raises(ConfigError, match="at most 1 peers"):
        draw(a2c.Config(), "gossip", "CartPole-v1", actors=2, peers=2)
    with pytest.raises(ConfigError, match="use --actors 2"):
        draw(a2c.Config(), "gossip", "CartPole-v1", learners=2)
    with pytest.raises(ConfigError, match="tau"):
        draw(a2c.Config(), "gossip", "CartPole-v1", tau=-1)
