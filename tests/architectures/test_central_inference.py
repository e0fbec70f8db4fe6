"""SEED: the server's unrolls are what the client would have written down, state included; nothing crosses; real kills."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.algorithms import vtrace
from shoal.device.batched_inference import BatchedInference
from shoal.device.placement import Hardware
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from shoal.roles.env_actor import read_step, step_layouts, write_step
from shoal.roles.inference import InferenceServer
from shoal.roles.learner import Learner
from shoal.roles.parts import EnvSource
from tests.architectures.echo import Collector, Echo
from tests.architectures.graphs import Weights, draw, go, train
from tests.envs.test_final_masks import ACTIONS, LENGTH, Masked, mask_at
from tests.runtime.harness import Killer, kill

NETS = {"mlp": NetConfig(hidden=(16,)), "lstm": NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16, prev_action_reward=True)}
T, SEATS = 5, 3


class Log:
    """Passes everything on to an environment and writes it down."""

    books: ClassVar[list] = []

    def __init__(self, env):
        self.env, self.steps, self.actions = env, [], []
        Log.learner_state.append(self)

    def __getattr__(self, name):
        return getattr(self.env, name)

    def note(self, step):
        names = ("observation", "first", "reward", "discount", "last", "valid")
        self.steps.append({name: np.copy(getattr(step, name)) for name in names})
        return step

    def reset(self, seed):
        return self.note(self.env.reset(seed))

    def step(self, action):
        self.actions.append(np.copy(action))
        return self.note(self.env.step(action))


class LoggedSource(EnvSource):
    def make(self, num_envs):
        return Log(super().make(num_envs))


def test_step_through_a_slot():
    """Masks at true ends and executed actions reach the server as the environment reported them."""
    env = envs.make(Masked, 2)
    record = algorithms.make(vtrace.Config(unroll=T), envs.describe(Masked), NetConfig(hidden=(4,)), 2).record
    slot, step, ends = step_layouts(record)[0].empty(), env.reset(seed=0), 0
    for t in range(2 * LENGTH):
        step = env.step(np.full(2, ACTIONS - 1))
        step.executed_action = np.array([t % ACTIONS, 1])
        write_step(slot, 0, 0, step)
        read = read_step(slot)
        np.testing.assert_array_equal(read.executed_action, step.executed_action)
        np.testing.assert_array_equal(read.action_mask, step.action_mask)
        np.testing.assert_array_equal(read.final_rows, step.final_rows)
        if len(step.final_rows):
            ends += 1
            np.testing.assert_array_equal(read.final_action_mask, [mask_at(LENGTH)] * 2)
            np.testing.assert_array_equal(read.final_observation, step.final_observation)
    assert ends == 2


def collect(tmp_path, kind, net, *, env=None, enough=40, watch=None, actors=2, gaps=False, **config):
    program, parts = draw(vtrace.Config(unroll=T), "central_inference", env or EnvSource(Echo), actors=actors, net=net,
                          envs_per_actor=SEATS, **config)
    for node in program.nodes.values():
        if node.role is Learner:
            node.role = Collector
            node.arguments.update(enough=enough, gaps=gaps)
    return parts, go(program, kind, tmp_path, watch)


@pytest.fixture
def kept():
    Log.learner_state, Collector.kept = [], []
    yield Collector.kept
    Log.learner_state, Collector.kept = [], None


@pytest.fixture(params=["policy", "inference"])
def served(request, monkeypatch):
    """As on a CPU, and as on a GPU: in padded tables, asked before steps are written down where that is possible."""
    made = InferenceServer.__init__

    def init(self, *arguments, **more):
        made(self, *arguments, **more)
        self.inference = BatchedInference(self.policy, Hardware(), self.rng)
        self.ahead = not self.record.previous

    if request.param == "inference":
        monkeypatch.setattr(InferenceServer, "__init__", init)


@pytest.mark.parametrize("net", NETS)
def test_unrolls_are_what_clients_would_log(net, kept, served, tmp_path):
    _, run = collect(tmp_path, "inline", NETS[net], env=LoggedSource(Echo))
    assert run.reason == "enough" and len(kept) == 40
    logs = {float(book.steps[0]["observation"][0, 0]): book for book in Log.learner_state}
    assert len(logs) == 4  # two actors, two groups each
    begun: dict[float, int] = {}
    for unroll in kept:
        book = logs[float(unroll["observation"][0, 0, 0])]
        start = begun.setdefault(id(book), 0)
        begun[id(book)] += T  # the last observation is the next one's first
        for t in range(T):
            now, then = book.steps[start + t], book.steps[start + t + 1]
            for name in ("observation", "first"):
                np.testing.assert_array_equal(unroll[name][t], now[name])
                np.testing.assert_array_equal(unroll[name][t + 1], then[name])
            for name in ("reward", "discount", "last", "valid"):
                np.testing.assert_array_equal(unroll[name][t], then[name])
            np.testing.assert_array_equal(unroll["action"][t], book.actions[start + t])


@pytest.mark.parametrize("net", NETS)
def test_replayed_log_probabilities(net, kept, served, tmp_path):
    """Replaying an unroll from its stored state gives the stored log probabilities."""
    parts, _ = collect(tmp_path, "inline", NETS[net])
    learn = parts.algorithm.learn(parts.seed)
    states = 0.0
    for unroll in kept:
        batch = learn.batch(unroll)
        with torch.no_grad():
            log_prob, _ = learn.model.judge(learn.model.unroll(batch), batch)
        assert (log_prob - batch.log_prob)[torch.from_numpy(unroll["valid"])].abs().max() < 1e-5
        states = max(states, *(float(np.abs(x).max()) for x in unroll["state"].values()), 0.0)
    assert (states > 0.01) == (net == "lstm")  # the stored states are not trivial


@pytest.mark.parametrize("net", NETS)
def test_replies_never_cross_processes(net, tmp_path):
    """Collector fails the run if an executed action is not the recorded one."""
    _, run = collect(tmp_path, "local", NETS[net], enough=150, actors=3)
    assert run.reason == "enough"
    assert run.final["inference-0"]["inference_batch/max"] > SEATS  # requests were answered together


def test_actor_killed_within_an_unroll(tmp_path):
    """An actor killed within an unroll leaves no mixed one."""
    killer = Killer(("actor-0",), 3, "samples_consumed", 80 * T * SEATS)
    watch = Weights(until=killer.done, act=killer)
    _, run = collect(tmp_path, "local", NETS["lstm"], enough=10**9, watch=watch)
    assert run.reason == "until" and run.final["actor-0"]["restarts"] == 3


def test_killed_server(tmp_path):
    """A killed server comes back and its actors go on."""
    deaths = [60]

    def act(control):
        if deaths and control.total("samples_consumed") > deaths[0] * T * SEATS:
            deaths.pop(0)
            kill(control, "inference-0")

    watch = Weights(act=act, until=lambda c: not deaths and c.total("restarts") and c.total("samples_consumed") > 300 * T * SEATS,
                    seconds=25)
    _, run = collect(tmp_path, "local", NETS["mlp"], enough=10**9, watch=watch, gaps=True)  # half an unroll dies with it
    assert run.reason == "until" and run.final["inference-0"]["restarts"] == 1


def test_each_actor_explores_like_itself(kept, tmp_path, monkeypatch):
    asked = set()

    def explore(self, index, count, seats, progress):
        asked.add((index, count, seats))
        return np.zeros(seats, np.float32)

    monkeypatch.setattr(vtrace.VTrace, "explore", explore)
    collect(tmp_path, "inline", NETS["mlp"], actors=3)
    assert asked == {(index, 3, SEATS) for index in range(3)}


def test_one_group_and_many(kept, tmp_path):
    for groups in (1, 3):
        _, run = collect(tmp_path, "inline", NETS["mlp"], groups=groups)
        assert run.reason == "enough"


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_server_beside_every_learner(kind, tmp_path):
    """Two processes, each with an actor, a server and a learner; only gradients and weights cross."""
    run = train(tmp_path, vtrace.Config(unroll=4), "central_inference", "shoal/Catch-v0", kind, actors=2, learners=2,
                one_place=True, batch_slots=2, updates=8)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()
    shares = [run.final[f"learner-{k}"]["samples_consumed"] for k in range(2)]
    assert min(shares) > 0 and shares == [run.final["learner-0"]["samples_consumed"]] * 2  # in step, and nobody takes another's


def test_place_of_the_replay_table(tmp_path):
    """A replay table is not in a learner's process."""
    with pytest.raises(ConfigError, match="one-place with --algorithm dqn does not fit here"):
        train(tmp_path, "dqn", "central_inference", "shoal/Catch-v0", "inline", one_place=True)
