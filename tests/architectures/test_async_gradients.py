"""A3C: one worker is the sequential algorithm; shared RMSProp; Hogwild; the parameter server's rules; real kills. (tests/gpu has
the workers on a GPU.)"""

import numpy as np
import pytest
import torch

import shoal
from shoal.algorithms import a2c, ppo, vtrace
from shoal.algorithms.common.gradients import fetched
from shoal.core import any_of
from shoal.device.placement import GpuConfig, Hardware
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from shoal.roles.learner_state import SharedModel, model_layout
from shoal.roles.parameter_server import ParameterServer
from shoal.roles.parts import EvalPlan, Parts
from shoal.runtime import Program
from shoal.slots import InlineAllocator
from tests.architectures.graphs import Weights, draw, go, train
from tests.architectures.sequential import sequential
from tests.runtime.harness import kill

LSTM = NetConfig(recurrent="lstm", lstm_size=16)
CASES = {
    "a2c rmsprop": (a2c.Config(unroll=5, lambda_=1.0, optimiser="rmsprop", optimiser_epsilon=1e-3), None),
    "a2c lstm": (a2c.Config(unroll=5, normalise_observations=True), LSTM),
    "ppo": (ppo.Config(unroll=8, epochs=2, minibatches=2, normalise_observations=True, normalise_returns=True), None),
    "vtrace": (vtrace.Config(unroll=5), None),
}


@pytest.mark.parametrize("mode", ["hogwild", "master"])
@pytest.mark.parametrize("case", CASES)
def test_one_worker_is_sequential(case, mode, tmp_path):
    """One worker is the sequential algorithm bit for bit."""
    config, net = CASES[case]
    plain = sequential(config, "CartPole-v1", updates=12, net=net)
    run = train(tmp_path, config, "async_gradients", "CartPole-v1", "inline", net=net, updates=12, mode=mode)
    assert run.reason == "counted"
    np.testing.assert_array_equal(run.published["params"], plain.state["params"].numpy())
    if config.normalise_observations:
        np.testing.assert_array_equal(run.published["norm"]["mean"], plain.state["observations.used_mean"].numpy())
    assert np.abs(run.published["params"]).sum() > 0


class OnADevice(Parts):
    """Learns as on a GPU: gradients and metrics are tensors until somebody asks for a number."""

    def learn(self):
        learn = self.new_learn()
        learn.to(Hardware())
        learn.capture()
        return learn


@pytest.mark.parametrize("mode", ["hogwild", "master"])
@pytest.mark.parametrize("case", CASES)
def test_one_worker_on_a_device_is_sequential(case, mode, tmp_path, monkeypatch):
    """A worker that computes elsewhere fetches each gradient; what is shared stays with arrays."""
    config, net = CASES[case]
    fetching = set()
    monkeypatch.setattr("tests.architectures.graphs.Parts", OnADevice)
    monkeypatch.setattr("shoal.roles.worker.fetched", lambda *found: (fetching.add(type(found[0])), fetched(*found))[1])
    plain = sequential(config, "CartPole-v1", updates=12, net=net)
    run = train(tmp_path, config, "async_gradients", "CartPole-v1", "inline", net=net, updates=12, mode=mode)
    assert run.reason == "counted" and fetching == {torch.Tensor}
    np.testing.assert_allclose(run.published["params"], plain.state["params"].numpy(), atol=1e-5)
    assert run.final["worker-0"]["loss"] != 0 and run.final["worker-0"]["grad_norm"] > 0


@pytest.mark.parametrize("mode", ["hogwild", "master"])
def test_a_gradient_that_is_not_finite_on_a_device(mode, tmp_path, monkeypatch):
    """It is left out and counted, as on the CPU."""
    class Broken(OnADevice):
        def learn(self):
            learn = super().learn()
            compute, calls = learn.gradients, []

            def gradients(minibatch, phase):
                gradient, metrics = compute(minibatch, phase)
                calls.append(phase)
                return (gradient * np.nan if len(calls) == 3 else gradient), metrics

            learn.gradients = gradients
            return learn

    monkeypatch.setattr("tests.architectures.graphs.Parts", Broken)
    run = train(tmp_path, a2c.Config(unroll=5), "async_gradients", "CartPole-v1", "inline", updates=8, mode=mode)
    assert sum(page["updates_skipped"] for page in run.final.values()) == 1 and np.isfinite(run.published["params"]).all()


def test_workers_take_the_gpus_in_turns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("tests.architectures.graphs.Parts", lambda *a, **k: Parts(*a, **k, hardware=Hardware("cuda", GpuConfig())))
    for mode in ("hogwild", "master"):
        program, _ = draw(a2c.Config(), "async_gradients", "CartPole-v1", actors=3, mode=mode)
        parts = program.nodes["worker"].arguments["parts"]
        assert [str(parts.on(index).hardware.device) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.parametrize("mode", ["hogwild", "master"])
@pytest.mark.parametrize("kind", ["inline", "local"])
def test_one_worker_is_synchronous(kind, mode, tmp_path):
    """One worker is synchronous with one actor bit for bit."""
    config = a2c.Config(unroll=5, normalise_observations=True)
    alone = train(tmp_path, config, "async_gradients", "CartPole-v1", kind, mode=mode)
    taken_turns = train(tmp_path, config, "synchronous", "CartPole-v1", "inline")
    assert alone.hash == taken_turns.hash


def test_all_together_are_synchronous_a2c(tmp_path):
    config = a2c.Config(unroll=5, optimiser="sgd", lr=0.05)
    barrier = train(tmp_path, config, "async_gradients", "CartPole-v1", "inline", actors=2, updates=6, mode="master", aggregate=2)
    joined = train(tmp_path, config, "synchronous", "CartPole-v1", "inline", actors=2, updates=6)
    np.testing.assert_allclose(barrier.published["params"], joined.published["params"], atol=1e-6)
    start = train(tmp_path, config, "synchronous", "CartPole-v1", "inline", actors=2, updates=0)
    assert np.abs(barrier.published["params"] - start.published["params"]).max() > 1e-3


def models(config, count):
    """Several hands on one model, as workers have them."""
    _, parts = draw(config, "async_gradients", "CartPole-v1", actors=count)
    program = Program("shared")
    wire = program.shared("model", model_layout(parts, count))

    class Holder:
        """Holds the wire's end."""

    program.add("holder", Holder, model=wire.view)
    program.build(InlineAllocator())

    class Me:
        def __init__(self, index):
            self.index = index

    made = [SharedModel(Me(i), parts, wire.attach("view", 0, 0)) for i in range(count)]
    made[0].fill()
    return made


def test_shared_rmsprop():
    """specs/policy.md 1e: g = 0.04 and a step of 0.00374166; a second worker goes on from that g."""
    config = a2c.Config(optimiser="rmsprop", lr=7e-4, optimiser_epsilon=0.1, grad_norm=0.0)
    first, second = models(config, 2)
    start = first.learn.state["params"].detach().clone()
    gradient = np.full(len(start), 2.0, np.float32)
    for model in (first, second):
        model.learn.anneal(model.progress)
    first.apply(gradient, "all")
    torch.testing.assert_close(second.learn.state["rmsprop.square"], torch.full_like(start, 0.04))
    torch.testing.assert_close(start - second.learn.state["params"].detach(), torch.full_like(start, 0.00374166), rtol=0, atol=1e-7)
    second.apply(gradient, "all")
    step = 7e-4 * 2 / (0.99 * 0.04 + 0.01 * 4 + 0.1) ** 0.5
    moved = start - first.learn.state["params"].detach()
    torch.testing.assert_close(moved, torch.full_like(start, 0.00374166 + step), rtol=0, atol=2e-7)


def test_the_adam_count_is_shared_too():
    first, second = models(a2c.Config(), 2)
    for model in (first, second, first):
        model.learn.anneal(model.progress)
        model.apply(np.ones(len(model.learn.state["params"]), np.float32), "all")
        model.count(20, 1)
    assert float(second.learn.state["adam.count"]) == 3 == second.version
    assert second.progress.env_steps == 60


class Once:
    """Applies one gradient of ones, at about the same time as everybody else."""

    def __init__(self, me, parts, model):
        self.me, self.model, self.done = me, SharedModel(me, parts, model), False

    async def step(self):
        if self.me.index == 0:
            self.model.fill()
        while not self.model.filled:
            await any_of(timeout=0.001)
        if not self.done:
            self.model.learn.anneal(self.model.progress)
            self.model.apply(np.ones(len(self.model.learn.state["params"]), np.float32), "all")
            self.model.count(1, 1)
            self.done = True
        if self.model.version == self.me.replicas:
            self.me.finish("all")
        await any_of(timeout=0.01)


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_hogwild_loses_no_count(kind, tmp_path):
    """specs/policy.md 1e: with SGD and lr 1 every parameter moves by between 1 and W; the count is exactly W."""
    W = 4
    config = a2c.Config(optimiser="sgd", lr=1.0, grad_norm=0.0)
    _, parts = draw(config, "async_gradients", "CartPole-v1", actors=W)
    program = Program("hogwild")
    wire = program.shared("model", model_layout(parts, W))
    program.add("once", Once, parts=parts, model=wire.view, replicas=W)
    seen = {}

    class Look(Weights):
        def end(self, control, reason, error):
            seen.update(wire.attach("view", 0, 0).data)
            seen["params"] = seen["learn"]["params"].copy()
            seen["counts"] = seen["counts"].copy()

    watch = go(program, kind, tmp_path, Look())
    assert watch.reason == "all" and seen["counts"][:, 1].sum() == W
    moved = parts.algorithm.learn(parts.seed).state["params"].detach().numpy() - seen["params"]
    assert moved.min() > 1 - 1e-4 and moved.max() < W + 1e-4


def test_gradients_that_are_too_old(tmp_path):
    """Two workers in turn: the second one's gradient is always one step old."""
    config = a2c.Config(unroll=5)
    taken = train(tmp_path, config, "async_gradients", "CartPole-v1", "inline", actors=2, mode="master", updates=10)
    lag = taken.final["server-0"]
    assert lag["policy_lag/max"] == 1 and lag["samples_masked"] == 0
    strict = train(tmp_path, config, "async_gradients", "CartPole-v1", "inline", actors=2, mode="master", updates=10,
                   max_staleness=0)
    server = strict.final["server-0"]
    assert server["samples_masked"] >= 9 * 5 * 4  # of each round the second
    consumed = sum(strict.final[f"worker-{i}"]["env_steps"] for i in range(2))
    assert strict.published["progress"][0] <= consumed


def test_gradient_of_unknown_parameters():
    """After its restart a server may be behind its workers; they get its parameters and go on from there. A version of its
    predecessor stays refused when it has counted as far itself: those parameters were others."""
    _, parts = draw(a2c.Config(), "async_gradients", "CartPole-v1", mode="master")

    class Nobody:
        incarnation = 1
        stats = type("S", (), {"observe": lambda *_: None, "add": lambda *_: None})()

    server = ParameterServer(Nobody(), parts, None, None, 1)
    dead, own = (type("R", (), {"data": {"version": np.array([7]), "life": np.array([life])}})() for life in (0, 1))
    assert not server._young(dead)
    server.learner_state.count(0, 7)
    assert server._young(own) and not server._young(dead)


def growing(control, more):
    return control.total("learner_steps") > more


@pytest.mark.parametrize("mode, victims", [("hogwild", ["worker-0", "worker-1"]), ("master", ["worker-1", "server-0"])])
def test_killed_worker_or_server(mode, victims, tmp_path):
    """A killed worker or server comes back and training goes on."""
    left, mark, versions = list(victims), [200.0], []

    def act(control):
        versions.append(max(page["weights_version"] for page in control.snapshot().values()))
        if left and control.total("learner_steps") > mark[0]:
            kill(control, left.pop(0))
            mark[0] = control.total("learner_steps") + 300

    watch = Weights(until=lambda control: not left and control.total("restarts") >= len(victims)
                    and control.total("learner_steps") > mark[0], act=act, seconds=60)
    run = train(tmp_path, a2c.Config(unroll=5), "async_gradients", "CartPole-v1", "local", actors=2, mode=mode, updates=None,
                watch=watch)
    assert run.reason == "until"
    assert all(run.final[victim]["restarts"] == 1 for victim in victims)
    assert versions == sorted(versions), "weights_version ran backwards"
    assert np.isfinite(run.published["params"]).all()


def test_bad_values_are_refused():
    for words, config in {"mode master": {"max_staleness": 1}, "at least 0, or none": {"max_staleness": -1, "mode": "master"},
                          "more gradients than": {"aggregate": 2, "mode": "master"}}.items():
        with pytest.raises(ConfigError, match=words):
            draw(a2c.Config(), "async_gradients", "CartPole-v1", eval=EvalPlan(), **config)
    with pytest.raises(ConfigError, match="use --actors"):
        draw(a2c.Config(), "async_gradients", "CartPole-v1", learners=2)


def test_saved_while_a_gradient_waits(tmp_path):
    """At the end of the budget one worker may have sent its gradient, and the other none left to send."""
    run = shoal.train("a3c", "CartPole-v1", runtime="inline", actors=2, max_env_steps=1000, run_dir=str(tmp_path / "run"), seed=0,
                      architecture={"mode": "master", "aggregate": 2}, console={"mode": "none"}, tensorboard=False,
                      eval={"episodes": 1})
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert int(newest.name) == run.summary["env_steps"] > 0 and run.summary["eval_episodes"] == 1
