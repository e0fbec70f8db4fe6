"""Several phases: each its own slice, optimiser, schedule, clipping and target; whole, and in the pieces of a parameter server.

The example is an algorithm from outside (outside_ddpg.py), which is also an example of items with continuous actions.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.acting import DevicePolicy, Progress
from shoal.algorithms import dqn
from shoal.algorithms.common.phases import Phase, PhasedParameters, TargetSchedule, overlap
from shoal.device.placement import Hardware
from shoal.learning import DeviceLearn, Learn, ReplayLearn, SlicedLearn, Updater
from shoal.nets import NetConfig
from tests.algorithms.outside_ddpg import DDPG, Config
from tests.algorithms.replay_loop import Actor, batch_of, greedy_return, train
from tests.algorithms.toys import toy_env, toy_spec

NET = NetConfig(hidden=(16,))
SPANS = {"actor": slice(0, 40), "critic": slice(40, 100)}


def made(config=None, steps=60):
    algorithm = algorithms.make(config or Config(), toy_spec(actions="box"), NET, 4)
    learn, actor = algorithm.learn(3), Actor(algorithm, toy_env(4, actions="box"), 5)
    actor.policy.load(learn.published(Progress()))
    actor.play(steps)
    return algorithm, learn, batch_of(actor.items()[0])


def update(learn, batch, progress=None):
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), progress or Progress(), np.random.default_rng(0))
    found = {}
    for phase in learn.phases:
        gradient, metrics = learn.gradients(minibatch, phase)
        assert len(gradient) == learn.span(phase).stop - learn.span(phase).start
        assert learn.apply(gradient, phase)
        found.update(metrics)
    return found


# ---------------------------------------------------------------------------------------------- an algorithm from outside
def test_found_by_path_and_by_config():
    """It is found by its place and by its config."""
    assert algorithms.named("tests.algorithms.outside_ddpg:DDPG") is DDPG
    algorithm, learn, _ = made()
    assert type(algorithm) is DDPG
    assert all(isinstance(learn, kind) for kind in (ReplayLearn, DeviceLearn, SlicedLearn))
    assert isinstance(algorithm.policy(), DevicePolicy)
    ppo = algorithms.make("ppo", toy_spec(), NET, 4).learn(0)
    assert isinstance(ppo, DeviceLearn) and not isinstance(ppo, ReplayLearn)


def test_its_updates_lower_the_critics_loss():
    algorithm, learn, batch = made(Config(tau=1e-6, critic_lr=1e-2))  # on a fixed batch, towards targets that stay
    losses = [update(learn, batch)["critic_loss"] for _ in range(80)]
    assert losses[-1] < 0.7 * losses[0]
    assert set(update(learn, batch)) == {metric.name for metric in algorithm.metrics}
    assert learn.priorities.shape == (len(batch["reward"]),) and np.isfinite(learn.priorities).all()


def test_a_phase_touches_its_slice_only():
    _, learn, batch = made()
    update(learn, batch)  # so that the target differs
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0))
    for phase, other in (("critic", "actor"), ("actor", "critic")):
        before = {name: tensor.clone() for name, tensor in learn.state.items()}
        gradient, metrics = learn.gradients(minibatch, phase)
        assert learn.apply(gradient, phase)
        mine, its = learn.span(phase), learn.span(other)
        for name in ("params", "target"):
            assert torch.equal(learn.state[name][its], before[name][its])
            assert not torch.equal(learn.state[name][mine], before[name][mine])
        changed = {name for name in before if not torch.equal(before[name], learn.state[name])}
        assert changed == {"params", "target", *(f"{phase}.{name}" for name in ("adam.m", "adam.v", "adam.count", "updates"))}
        assert all(name.startswith(f"{phase}_") or name in ("td_error", "q_mean") for name in metrics)
    assert {learn.span("actor").stop, learn.span("critic").stop} == {learn.span("critic").start, len(learn.state["params"])}


def test_gradients_of_the_whole_loss():
    """The actor's gradient flows through the critic and leaves it alone."""
    _, learn, batch = made()
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0))
    for phase in learn.phases:
        gradient = learn.gradients(minibatch, phase)[0].copy()
        parts = torch.autograd.grad(learn.loss(minibatch, phase).loss, list(learn.model.net.get_submodule(phase).parameters()))
        np.testing.assert_allclose(gradient, torch.cat([part.flatten() for part in parts]), rtol=1e-5, atol=1e-7)


def test_bad_gradient_stops_its_phase():
    _, learn, batch = made()
    batch["reward"][0] = np.nan
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0))
    before = {name: tensor.clone() for name, tensor in learn.state.items()}
    gradient, _ = learn.gradients(minibatch, "critic")
    assert np.isnan(gradient).all() and not learn.apply(gradient, "critic")
    assert all(torch.equal(before[name], tensor) for name, tensor in learn.state.items())
    assert learn.apply(learn.gradients(minibatch, "actor")[0], "actor")


def test_only_the_actor_is_published():
    algorithm, learn, _ = made()
    published, layout = learn.published(Progress(1, 2, 0.5)), algorithm.published_layout()
    layout.copy(layout.empty(), published)
    np.testing.assert_array_equal(published["params"], learn.state["params"][learn.span("actor")])
    np.testing.assert_array_equal(learn.snapshot(Progress())()["params"], published["params"])
    assert published["progress"].tolist() == [1, 2, 0.5]


@pytest.mark.parametrize("captures", [False, True])
def test_same_updates_in_tensors(captures):
    algorithm, here, batch = made(Config(normalise_observations=True))
    there = algorithm.learn(3)
    there.to(Hardware())
    if captures:
        there.capture()
    for number in range(6):
        found = [update(learn, batch, Progress(fraction=number / 6)) for learn in (here, there)]
        assert dict(found[1].items()) == pytest.approx(found[0], rel=1e-3, abs=1e-5)
        for name, tensor in here.state.items():
            np.testing.assert_allclose(there.state[name], tensor, rtol=1e-3, atol=1e-5, err_msg=name)
    there.release()


def test_its_state_can_live_elsewhere():
    algorithm, learn, batch = made()
    for _ in range(3):
        update(learn, batch)
    other, arrays = algorithm.learn(99), {name: tensor.numpy().copy() for name, tensor in learn.state.items()}
    other.bind(arrays)
    for _ in range(3):
        update(learn, batch)
        update(other, batch)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, learn.state[name], err_msg=name)


# ---------------------------------------------------------------------------------------------- a parameter server in pieces
@pytest.mark.parametrize("cuts", [[0, 64, 128, None], [0, None], [0, 64, None]])
def test_pieces_have_the_bits_of_the_whole(cuts):
    """Wherever they are cut: inside a phase, across two, or where a piece has nothing of a phase."""
    _, learn, batch = made()
    size = len(learn.state["params"])
    edges = [size if edge is None else edge for edge in cuts]
    wheres = [slice(a, b) for a, b in pairwise(edges)]
    pieces: list[Updater] = [learn.cut(where) for where in wheres]
    whole: Learn = learn
    for number in range(5):
        progress = Progress(fraction=number / 5)
        (minibatch,) = learn.minibatches(batch, learn.sums(batch), progress, np.random.default_rng(0))
        for phase in learn.phases:
            gradient = learn.gradients(minibatch, phase)[0].copy()
            span, clipped = learn.span(phase), learn.clipped(gradient.copy(), phase)
            for where, piece in zip(wheres, pieces, strict=True):
                inside = overlap(span, where)
                piece.anneal(progress)
                assert piece.apply(clipped[inside.start - span.start : inside.stop - span.start].copy(), phase)
                assert piece.span(phase) == slice(inside.start - where.start, inside.stop - where.start)
            assert whole.apply(gradient, phase)
    for name in ("params", "target"):
        joined = torch.cat([piece.weights[name] for piece in pieces])
        assert torch.equal(joined, learn.state[name]), name
    published = np.concatenate([piece.published(Progress())["params"] for piece in pieces])
    np.testing.assert_array_equal(published, learn.published(Progress())["params"])


def test_first_piece_keeps_the_statistics():
    learn = algorithms.make(dqn.Config(normalise_observations=True), toy_spec(), NET, 4).learn(0)
    first, second = learn.cut(slice(0, 64)), learn.cut(slice(64, len(learn.state["params"])))
    values = np.random.default_rng(0).normal(3, 5, (100, 3))
    batch = {"observation_moments": {"count": np.full((1, 1), 100.0), "shift": np.zeros((1, 3)), "sum": values.sum(0)[None],
                                     "square": (values**2).sum(0)[None]}}
    for piece, size in ((first, 7), (second, 0)):
        moments = piece.moments(batch)
        assert len(moments) == size
        piece.absorb(moments)
    np.testing.assert_allclose(first.published(Progress())["norm"]["mean"], values.mean(0), rtol=1e-6)
    assert second.published(Progress())["norm"] == {} and set(second.weights) == {"params", "target"}


# ---------------------------------------------------------------------------------------------- parameters by themselves
def parameters(**more):
    torch.manual_seed(0)
    phases = (Phase("critic", "adam", 1.0, 0.0, grad_norm=1.0, target=TargetSchedule(period_updates=2)),
              Phase("actor", "sgd", 0.5, **more))
    params = torch.randn(100)
    return PhasedParameters(phases, SPANS, params, params.clone())


def test_names_are_those_of_a_checkpoint():
    assert set(parameters().state) == {"params", "target", "critic.adam.m", "critic.adam.v", "critic.adam.count", "critic.updates"}
    alone = PhasedParameters((Phase("all", "rmsprop", 0.1),), {"all": slice(0, 5)}, torch.zeros(5))
    assert set(alone.state) == {"params", "rmsprop.square"}
    one = algorithms.make(replace(dqn.Config(), optimiser="adagrad"), toy_spec(), NET, 4).learn(0)
    assert set(one.state) == {"params", "target", "updates", "adagrad.square"}


def test_annealing_and_clipping_by_phase():
    """Each phase is annealed and clipped by itself."""
    both = parameters(grad_norm=0.0)
    both.anneal(Progress(fraction=0.25))
    assert both.optimiser("critic").lr == 0.75 and both.optimiser("actor").lr == 0.5
    long = np.full(60, 10.0, np.float32)
    assert np.linalg.norm(both.clipped(long, "critic")) == pytest.approx(1.0)
    before = both.params.clone()
    assert both.apply(np.ones(40, np.float32), "actor")
    torch.testing.assert_close(both.params[:40], before[:40] - 0.5)
    assert torch.equal(both.params[40:], before[40:])


@pytest.mark.parametrize("tensors", [False, True])
def test_targets_follow_their_phase(tensors):
    both = parameters()
    both.anneal(Progress())
    first = both.params.clone()
    gradient = np.ones(60, np.float32)
    for count in range(1, 5):
        both.apply(torch.from_numpy(gradient.copy()) if tensors else gradient.copy(), "critic")
        both.apply(torch.ones(40) if tensors else np.ones(40, np.float32), "actor")
        if count % 2 == 0:
            assert torch.equal(both.target[40:], both.params[40:])
        assert torch.equal(both.target[:40], first[:40])  # the actor has none that follows
    assert int(both.state["critic.updates"]) == 4


def test_slices_that_do_not_meet():
    assert overlap(slice(0, 10), slice(5, 20)) == slice(5, 10)
    assert overlap(slice(0, 10), slice(10, 20)) == slice(10, 10)
    assert overlap(slice(30, 40), slice(10, 20)) == slice(30, 30)


@pytest.mark.slow
def test_it_learns_to_swing_a_pendulum():
    algorithm = DDPG(Config(), envs.describe("Pendulum-v1"), NetConfig(hidden=(64, 64), activation="relu"), 8)
    learn = train(algorithm, "Pendulum-v1", 5000, exponent=0.0, batch_size=128, size=50_000, start=1000)
    assert greedy_return(algorithm, learn, "Pendulum-v1", 50) > -300
