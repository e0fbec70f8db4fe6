"""GA3C: nobody gets another's reply, no step is lost, one of each is the sequential algorithm; adjusting; real kills."""

import numpy as np
import pytest

from shoal.algorithms import a2c, vtrace
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from shoal.roles.adjuster import Adjuster
from shoal.roles.learner import Learner
from shoal.roles.parts import EnvSource
from tests.architectures.echo import Collector, Echo
from tests.architectures.graphs import Weights, draw, go, train
from tests.architectures.sequential import sequential, stream_of
from tests.runtime.harness import kill

LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16, prev_action_reward=True)
T, SEATS = 5, 4


@pytest.mark.parametrize("net", [None, NetConfig(recurrent="lstm", lstm_size=16)], ids=["mlp", "lstm"])
def test_one_of_each_is_sequential(net, tmp_path):
    """One of each and a queue of one is the sequential algorithm."""
    config = a2c.Config(unroll=T, normalise_observations=True)
    run = train(tmp_path, config, "predictor_trainer", "CartPole-v1", "inline", net=net)
    plain = sequential(config, "CartPole-v1", updates=12, net=net, env_seed=stream_of(7, "agent", "environments").integers(2**31),
                       action_seed=stream_of(7, "predictor", "actions").integers(2**31))
    assert run.reason == "counted" and run.final["trainer-0"]["policy_lag/max"] == 0
    np.testing.assert_array_equal(run.published["params"], plain.state["params"].numpy())


class Filler(Collector):
    """A collector in a trainer's place: it also fills the model that predictors read."""

    def __init__(self, me, parts, batches, weights, model, **options):
        super().__init__(me, parts, batches, weights, **options)
        from shoal.roles.learner_state import SharedModel

        self.model = SharedModel(me, parts, model)

    async def step(self):
        self.model.fill()
        await super().step()


def collect(tmp_path, kind, net=None, length=7):
    program, _ = draw(vtrace.Config(unroll=T), "predictor_trainer", EnvSource(Echo, kwargs={"length": length}), actors=3, net=net,
                      predictors=2)
    for node in program.nodes.values():
        if node.role is Learner:
            node.role = Filler
            node.arguments["enough"] = 90
    return go(program, kind, tmp_path)


@pytest.mark.parametrize("kind", ["inline", "local"])
@pytest.mark.parametrize("net", [None, LSTM], ids=["mlp", "lstm"])
def test_replies_never_cross(net, kind, tmp_path):
    """The collector fails the run if an executed action is not the recorded one, or a step is missing or double."""
    run = collect(tmp_path, kind, net)
    assert run.reason == "enough" and run.unbalanced == 0
    asked = run.wires["predictions"]
    assert asked["asked"] >= asked["answered"]
    if kind == "inline":  # else others ask while these are read
        assert asked["asked"] - asked["answered"] <= 3, "each agent has at most one question open"


def test_no_step_is_lost(tmp_path):
    """Conservation, with environments whose every row is a decision."""
    run = collect(tmp_path, "inline", length=10**6)
    agents = [run.final[f"agent-{i}"] for i in range(3)]
    unrolls, rows = run.wires["unrolls"], T * SEATS
    assert unrolls["written"] == unrolls["consumed"] + unrolls["occupied"] == sum(agent["steps"] for agent in agents)
    assert run.final["trainer-0"]["samples_consumed"] == rows * unrolls["consumed"] == rows * 90
    under_way = [agent["env_steps"] - rows * agent["steps"] for agent in agents]
    assert all(0 <= decisions <= rows for decisions in under_way)
    assert sum(agent["env_steps"] for agent in agents) == rows * (unrolls["consumed"] + unrolls["occupied"]) + sum(under_way)


def test_pending_requests_in_one_batch(tmp_path):
    """Every request that is pending is answered together."""
    run = train(tmp_path, a2c.Config(unroll=T), "predictor_trainer", "CartPole-v1", "inline", actors=4)
    assert run.final["predictor-0"]["inference_batch/max"] == 4 * SEATS


def test_a_short_queue_bounds_the_lag(tmp_path):
    """Four agents, one trainer: what waits is at most one unroll of each, and what is being written."""
    run = train(tmp_path, a2c.Config(unroll=T), "predictor_trainer", "CartPole-v1", "inline", actors=4, updates=40)
    assert 0 < run.final["trainer-0"]["policy_lag/max"] <= 2 * 4


def test_two_trainers_lose_no_count(tmp_path):
    watch = Weights(until=lambda control: control.total("learner_steps") > 100, seconds=20)
    run = train(tmp_path, a2c.Config(unroll=T), "predictor_trainer", "CartPole-v1", "local", actors=2, trainers=2, updates=None,
                watch=watch)
    assert run.reason == "until"
    assert all(run.final[f"trainer-{i}"]["learner_steps"] > 0 for i in range(2))
    assert np.isfinite(run.published["params"]).all()


class Plant:
    """Trainings per second that depend on the numbers, best at 5 agents, 2 predictors, 3 trainers."""

    def rate(self, numbers):
        return 100 - (numbers["agent"] - 5) ** 2 - 3 * (numbers["predictor"] - 2) ** 2 - 2 * (numbers["trainer"] - 3) ** 2


def test_adjuster_climbs():
    """The adjuster climbs from one of each and keeps what is better."""
    limits = {"agent": (1, 8), "predictor": (1, 4), "trainer": (1, 4)}
    adjuster, plant = Adjuster({"agent": 1, "predictor": 1, "trainer": 1}, limits, np.random.default_rng(0)), Plant()
    numbers = adjuster.kept
    before = plant.rate(numbers)
    for _ in range(200):
        numbers = adjuster.hear(plant.rate(numbers))
        assert plant.rate(adjuster.kept) >= before  # never worse than before
        before = plant.rate(adjuster.kept)
        assert all(limits[role][0] <= number <= limits[role][1] for role, number in numbers.items())
    assert before >= 0.95 * 100


def test_slower_change_is_taken_back():
    """What trains slower is taken back and measured again."""
    adjuster = Adjuster({"agent": 3}, {"agent": (1, 8)}, np.random.default_rng(1))
    tried = adjuster.hear(10.0)
    assert adjuster.kept == {"agent": 3}
    assert adjuster.hear(9.0) == {"agent": 3} and adjuster.tried is None  # taken back
    again = adjuster.hear(8.0)  # the same numbers measure lower now: that is what the next change is compared with
    assert adjuster.rate == 8.0 and adjuster.hear(8.5) is adjuster.tried and adjuster.kept == again
    assert tried is not again


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_numbers_of_a_running_program(kind, tmp_path):
    """The coordinator changes the numbers of a running program."""
    watch = Weights(until=lambda control: len(watch.texts("scale")) >= 5, seconds=20)
    run = train(tmp_path, a2c.Config(unroll=T), "predictor_trainer", "CartPole-v1", kind, actors=2, updates=None, watch=watch,
                adjust_seconds=0.5, most_agents=3, most_threads=2)
    assert run.reason == "until", run.events
    assert any("trainings/s" in text for text in run.texts("note"))
    assert run.final["trainer-0"]["learner_steps"] > 0


@pytest.mark.parametrize("victim", ["agent-1", "model"])
def test_killed_agent_or_model(victim, tmp_path):
    """A killed agent or model comes back and training goes on."""
    left, mark = [victim], [100.0]

    def act(control):
        if left and control.total("learner_steps") > mark[0]:
            kill(control, left.pop())
            mark[0] = control.total("learner_steps") + 200

    watch = Weights(until=lambda c: not left and c.total("restarts") and c.total("learner_steps") > mark[0], act=act, seconds=25)
    run = train(tmp_path, a2c.Config(unroll=T), "predictor_trainer", "CartPole-v1", "local", actors=2, updates=None, watch=watch)
    assert run.reason == "until"
    if victim == "model":  # its memory outlives it
        assert run.published["progress"][1] > 200


def test_bad_values_are_refused():
    with pytest.raises(ConfigError, match="prediction-rows"):
        draw(a2c.Config(), "predictor_trainer", "CartPole-v1", prediction_rows=2)
    with pytest.raises(ConfigError, match="trainers 2 instead"):
        draw(a2c.Config(), "predictor_trainer", "CartPole-v1", learners=2)
