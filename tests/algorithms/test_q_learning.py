"""dqn and what it shares with r2d2: gradients, targets, exploration, several learners; T13 of specs/value.md."""

import pickle

import numpy as np
import pytest
import torch

from shoal import envs
from shoal.acting import Progress, StepView
from shoal.algorithms import dqn, make, r2d2
from shoal.algorithms.records.moments import moment_fields
from shoal.errors import ConfigError
from shoal.learning import Tolerance
from shoal.nets import NetConfig
from shoal.ops import priorities, schedules, value
from shoal.slots import map_tree
from tests.algorithms.q_learning import LOOKING_BACK, LSTM, SMALL, WINDOW, made, shake
from tests.algorithms.replay_loop import Actor, batch_of, gradient, greedy_return, train
from tests.algorithms.toys import toy_env, toy_spec


# ---------------------------------------------------------------------------------------------- gradients of dqn
def literal_transition(config, learn, item):
    """(loss, |td|) of one transition, by the book."""
    item = map_tree(lambda x: torch.from_numpy(np.asarray(x))[None], item)
    net, target = learn.model.net, learn.target.net
    with torch.no_grad():
        online_q, target_q = net(item["next_observation"])[0], target(item["next_observation"])[0]
    legal = item["next_action_mask"][0] if "next_action_mask" in item else torch.ones(len(online_q), dtype=torch.bool)
    actions = [a for a in range(len(online_q)) if legal[a]]
    judge = online_q if config.double else target_q
    worth = float(target_q[max(actions, key=lambda a: judge[a])])
    h, inverse = (value.rescale, value.unrescale) if config.rescale else (lambda x: x, lambda x: x)
    goal = h(item["reward"] + item["discount"] * inverse(torch.tensor(worth)))
    error = goal - net(item["observation"])[0, item["action"]]
    size = error.abs()
    if config.loss == "squared" or float(size.detach()) <= config.huber_delta:
        return error.square() / 2, float(size.detach())
    return config.huber_delta * (size - config.huber_delta / 2), float(size.detach())


@pytest.mark.parametrize(
    ("config", "toy"),
    [
        (dqn.Config(), {}),
        (dqn.Config(double=False, loss="squared"), {"observations": "dict"}),
        (dqn.Config(double=False), {"masked": True}),
        (dqn.Config(n_step=3, dueling=True, rescale=True, huber_delta=0.1, importance=1.0), {"masked": True}),
    ],
)
def test_gradient_of_the_weighted_mean(config, toy):
    """The gradient is that of the weighted mean."""
    _, learn, items, _ = made(dqn.DQN, config, SMALL, **toy)
    shake(learn)
    count = len(items["reward"])
    probability = np.random.default_rng(0).random(count) + 0.1
    grad, metrics = gradient(learn, batch_of(items, probability / probability.sum(), 500))
    weight = (500 * probability / probability.sum()) ** -config.importance
    weight /= weight.max()
    losses = [literal_transition(config, learn, map_tree(lambda x: x[i], items)) for i in range(count)]  # noqa: B023
    total = sum(w * loss.sum() for w, (loss, _) in zip(weight.tolist(), losses, strict=True)) / count
    want = torch.autograd.grad(total, list(learn.model.net.parameters()))
    flat = learn.model.grad.clone()
    learn.model.grad.zero_()
    for parameter, part in zip(learn.model.net.parameters(), want, strict=True):
        parameter.grad.copy_(part)
    np.testing.assert_allclose(grad, learn.model.grad.numpy(), rtol=1e-4, atol=1e-5)
    assert torch.equal(flat, torch.from_numpy(grad))
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    np.testing.assert_allclose(learn.priorities, [size + priorities.FLOOR for _, size in losses], rtol=1e-3, atol=1e-5)
    assert metrics["importance_min"] == pytest.approx(weight.min(), rel=1e-5)


def test_T13_weights_multiply_the_loss():
    config = dqn.Config(loss="squared", importance=1.0)
    _, learn, items, _ = made(dqn.DQN, config, SMALL)
    two = map_tree(lambda x: x[:2].copy(), items)
    with torch.no_grad():
        q = value.chosen(learn.model.net(torch.from_numpy(two["observation"])), torch.from_numpy(two["action"])).numpy()
    two["discount"][:] = 0
    two["reward"][:] = q + np.float32([1, -2])  # errors of 1 and -2, weights of 1 and 0.5
    _, metrics = gradient(learn, batch_of(two, np.array([0.1, 0.2])))
    assert metrics["loss"] == pytest.approx(0.75, rel=1e-4)
    np.testing.assert_allclose(learn.priorities, [1, 2], rtol=1e-4)


@pytest.mark.parametrize("config", [dqn.Config(), dqn.Config(n_step=3, dueling=True, rescale=True, reward_clip=1.0)])
def test_actors_priority_is_the_learners(config):
    """The actor's priority is the learner's first of transitions."""
    _, learn, items, found = made(dqn.DQN, config, SMALL, masked=True)
    gradient(learn, batch_of(items))
    ended = truncated(items)
    np.testing.assert_allclose(learn.priorities[~ended], found[~ended], rtol=1e-3, atol=1e-4)
    assert 0 < ended.sum() < len(ended) / 2


def truncated(items):
    """Transitions that end in a true last observation, or in one that was not acted on yet: the actor had to guess its values."""
    acted_on = {row.tobytes() for row in items["observation"]}
    return np.array([row.tobytes() not in acted_on for row in items["next_observation"]]) & (items["discount"] > 0)


def test_last_observation_keeps_its_mask():
    """Nobody acts there, but the learner bootstraps from its legal actions only."""
    _, _, items, _ = made(dqn.DQN, dqn.Config(), SMALL, seats=8, masked=True)
    transitions = items["next_action_mask"][truncated(items)]
    _, _, items, _ = made(r2d2.R2D2, r2d2.Config(burn_in=0, length=6, stride=6), LSTM, seats=8, masked=True)
    windows = items["action_mask"][items["discount"][:, -1] > 0, -1]  # episodes are truncated after six steps
    for masks in (transitions, windows):
        assert len(masks) > 20 and masks[:, 0].all() and masks.all(1).mean() < 0.5


# ---------------------------------------------------------------------------------------------- updates
def updated(config, count=5):
    _, learn, items, _ = made(dqn.DQN, config, SMALL)
    targets = [learn.target.params.clone()]
    params = [learn.model.params.clone()]
    for _ in range(count):
        assert learn.apply(gradient(learn, batch_of(items))[0], "all")
        targets.append(learn.target.params.clone())
        params.append(learn.model.params.clone())
    return learn, params, targets


def test_target_is_copied():
    """The target is copied after a number of updates."""
    _, params, targets = updated(dqn.Config(target_period_updates=2))
    for k in range(6):
        assert torch.equal(targets[k], params[k - k % 2])


def test_the_target_moves_softly():
    _, params, targets = updated(dqn.Config(target_tau=0.1))
    want = params[0]
    for k in range(1, 6):
        want = 0.9 * want + 0.1 * params[k]
        torch.testing.assert_close(targets[k], want)


def test_target_stays_or_is_the_net_itself():
    _, params, targets = updated(dqn.Config(target_period_updates=0))
    assert torch.equal(targets[5], params[0])
    learn, params, targets = updated(dqn.Config(target_period_updates=1))
    assert torch.equal(targets[5], params[5])
    learn.model.params.add_(1)
    learn.target.params.copy_(learn.model.params)
    assert torch.equal(learn.target.params, learn.model.params)


def test_a_bad_gradient_changes_nothing():
    _, learn, items, _ = made(dqn.DQN, dqn.Config(target_period_updates=1), SMALL)
    before = {name: tensor.clone() for name, tensor in learn.state.items()}
    items["reward"][0] = np.nan
    grad, _ = gradient(learn, batch_of(items))
    assert np.isnan(grad).all()
    assert not learn.apply(grad, "all")
    assert all(torch.equal(before[name], learn.state[name]) for name in before)


@pytest.mark.parametrize("optimiser", ["adam", "rmsprop", "rmsprop_centred", "adagrad", "sgd"])
def test_the_whole_state_can_live_elsewhere(optimiser):
    """A learner that is bound to a copy of another's state goes on exactly like it."""
    config = dqn.Config(optimiser=optimiser, target_period_updates=3, optimiser_epsilon=0.01)
    algorithm, learn, items, _ = made(dqn.DQN, config, SMALL)
    for _ in range(4):
        learn.apply(gradient(learn, batch_of(items))[0], "all")
    other = algorithm.learn(99)
    arrays = {name: tensor.numpy().copy() for name, tensor in learn.state.items()}
    other.bind(arrays)
    for _ in range(4):
        for one in (learn, other):
            assert one.apply(gradient(one, batch_of(items))[0], "all")
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, learn.state[name].numpy(), err_msg=name)
    assert set(learn.weights) == {"params", "target"}
    assert int(learn.state["updates"]) == 8


@pytest.mark.parametrize("seed", range(3))
def test_two_learners_equal_one(seed):
    """Also where their batches were drawn with other probabilities: the largest weight is that of both."""
    _, learn, items, _ = made(dqn.DQN, dqn.Config(importance=0.4, importance_final=0.8), SMALL)
    count, progress = len(items["reward"]) // 2 * 2, Progress(fraction=0.5)
    whole = map_tree(lambda x: x[:count], items)
    probability = np.random.default_rng(seed).random(count) * 0.01 + 1e-4
    rows = slice(0, count // 4), slice(count // 4, count)
    parts = [batch_of(map_tree(lambda x: x[row], whole), probability[row]) for row in rows]  # noqa: B023
    sums = sum(learn.sums(part, index, 3) for index, part in enumerate(parts))  # a third learner has died
    grads, weights = [], []
    for part in parts:
        (minibatch,) = learn.minibatches(part, sums, progress, np.random.default_rng(0))
        grads.append(learn.gradients(minibatch, "all")[0].copy())
        weights.append(minibatch.weight)
    joined = batch_of(whole, probability)
    (alone,) = learn.minibatches(joined, learn.sums(joined), progress, np.random.default_rng(0))
    torch.testing.assert_close(torch.cat(weights), alone.weight, rtol=1e-6, atol=0)
    assert float(alone.weight.max()) == 1.0 and min(float(weight.max()) for weight in weights) < 1.0
    np.testing.assert_allclose(sum(grads) / 2, learn.gradients(alone, "all")[0], rtol=1e-4, atol=1e-6)


def test_learners_without_a_number():
    """Learners that do not give their number are refused."""
    _, learn, items, _ = made(dqn.DQN, dqn.Config(), SMALL)
    batch = batch_of(items)
    with pytest.raises(ValueError, match="the sums of 2 learners were made for 1"):
        next(learn.minibatches(batch, learn.sums(batch) + learn.sums(batch), Progress(), np.random.default_rng(0)))


def test_beta_is_annealed():
    _, learn, items, _ = made(dqn.DQN, dqn.Config(importance=0.4, importance_final=1.0), SMALL)
    probability = np.full(len(items["reward"]), 0.001)
    probability[0] = 0.004
    for fraction, beta in ((0.0, 0.4), (0.5, 0.7), (1.0, 1.0)):
        _, metrics = gradient(learn, batch_of(items, probability), Progress(fraction=fraction))
        assert metrics["importance_min"] == pytest.approx(4**-beta, rel=1e-5)


# ---------------------------------------------------------------------------------------------- normalised observations
def with_moments(actor, batch):
    into = {name: np.zeros(field.shape) for name, field in moment_fields(actor.record.observation_moments).items()}
    actor.recorder.take_moments(into)
    return {**batch, "observation_moments": into}


@pytest.mark.parametrize("cls, config, net", [(dqn.DQN, dqn.Config(normalise_observations=True), SMALL),
                                              (r2d2.R2D2, r2d2.Config(**WINDOW, normalise_observations=True), LOOKING_BACK)])
def test_normalised_observations(cls, config, net):
    """Observations are normalised as they were seen."""
    algorithm = cls(config, toy_spec(observations="dict"), net, 4)
    learn, other = algorithm.learn(3), algorithm.learn(3)
    actor = Actor(algorithm, toy_env(4, observations="dict"), 5)
    for _ in range(4):
        actor.policy.load(learn.published(Progress()))
        actor.play(60)
        batch = with_moments(actor, batch_of(actor.items()[0]))
        grad, _ = gradient(learn, batch)
        learn.apply(grad, "all")
        learn.absorb(learn.moments(batch))
    assert abs(learn.state["observations.used_mean"] - 3).max() < 1
    assert abs(1 / learn.state["observations.used_scale"] - 5).max() < 1
    assert set(learn.weights) == {"params", "target", *(f"observations.{name}" for name in
                                                        ("count", "mean", "m2", "used_mean", "used_scale"))}
    layout = algorithm.published_layout()
    wire = layout.empty()
    layout.copy(wire, learn.published(Progress()))
    actor.policy.load(wire)
    for model in (learn.model, learn.target, actor.policy.model):  # all see the same
        assert torch.equal(model.mean, learn.state["observations.used_mean"])
        assert torch.equal(model.scale, learn.state["observations.used_scale"])
    other.bind({name: tensor.numpy().copy() for name, tensor in learn.state.items()})
    np.testing.assert_array_equal(gradient(other, batch)[0], gradient(learn, batch)[0])
    other.absorb(other.moments(batch))
    assert torch.equal(other.target.mean, other.state["observations.used_mean"])
    assert not torch.equal(other.model.mean, learn.model.mean)


def test_priority_of_normalised_observations():
    """The actor's priority is the learner's with normalised observations."""
    config = dqn.Config(normalise_observations=True)
    algorithm = dqn.DQN(config, toy_spec(), SMALL, 4)
    learn, actor = algorithm.learn(3), Actor(algorithm, toy_env(4), 5)
    actor.play(30)
    actor.items()
    learn.absorb(learn.moments(with_moments(actor, {})))
    actor.policy.load(learn.published(Progress()))
    actor.play(60)
    items, found = actor.items()
    fresh = slice(4, None)  # the first were judged by the weights before
    gradient(learn, batch_of(items))
    known = ~truncated(items)
    np.testing.assert_allclose(learn.priorities[fresh][known[fresh]], found[fresh][known[fresh]], rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------- acting
def test_epsilon_greedy_and_its_extras():
    algorithm = dqn.DQN(dqn.Config(), toy_spec(masked=True), SMALL, 4)
    policy, rng = algorithm.policy(), torch.Generator().manual_seed(0)
    seats = 40_000
    view = StepView(np.zeros((seats, 3), np.float32), np.zeros(seats, bool), np.tile([True, True, True, False], (seats, 1)))
    greedy, _, extras = policy.act(view, {}, None, rng)
    assert (extras["q"][:, 3] == -np.inf).all() and (greedy == extras["q"].argmax(1)).all()
    action, _, _ = policy.act(view, {}, np.full(seats, 0.3, np.float32), rng)
    share = np.bincount(action, minlength=4) / seats
    want = np.array([0.1, 0.1, 0.1, 0.0])
    want[greedy[0]] = 0.8
    assert (np.abs(share - want) <= 4 * np.sqrt(want * (1 - want) / seats)).all()


def test_zero_heads_take_the_first_action():
    for config, net, algorithm in ((dqn.Config(zero_head=True), SMALL, dqn.DQN), (r2d2.Config(zero_head=True), LSTM, r2d2.R2D2)):
        policy = algorithm(config, toy_spec(), net, 2).policy()
        view = StepView(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32), np.ones(5, bool))
        action, _, extras = policy.act(view, policy.initial_state(5), None, torch.Generator())
        assert (extras["q"] == 0).all() and (action == 0).all()


def test_exploration_schedule_and_ladder():
    schedule = dqn.DQN(dqn.Config(epsilon=1.0, epsilon_final=0.1, epsilon_steps=100), toy_spec(), SMALL, 3)
    for steps, epsilon in ((0, 1.0), (50, 0.55), (100, 0.1), (1000, 0.1)):
        np.testing.assert_allclose(schedule.explore(1, 2, 3, Progress(steps)), [epsilon] * 3, rtol=1e-6)
    ladder = r2d2.R2D2(r2d2.Config(), toy_spec(), LSTM, 4)
    rungs = np.concatenate([ladder.explore(index, 2, 4, Progress()) for index in range(2)])
    np.testing.assert_allclose(rungs, schedules.actor_epsilons(8), rtol=1e-6)
    np.testing.assert_allclose(ladder.explore(0, 1, 1, Progress()), [0.4], rtol=1e-6)


# ---------------------------------------------------------------------------------------------- descriptions
def test_algorithms_pickle():
    for name, net in (("dqn", SMALL), ("r2d2", LSTM)):
        algorithm = pickle.loads(pickle.dumps(make(name, toy_spec(), net, 2)))
        assert algorithm.name == name and algorithm.tolerates == Tolerance.REPLAY
        learn = algorithm.learn(4)
        assert torch.equal(learn.model.params, algorithm.learn(4).model.params)
        assert not torch.equal(learn.model.params, algorithm.learn(5).model.params)
        published = learn.published(Progress(3, 2, 0.5))
        layout = algorithm.published_layout()
        layout.copy(layout.empty(), published)
        assert published["progress"].tolist() == [3, 2, 0.5]


@pytest.mark.parametrize(
    ("cls", "config", "net", "toy", "words"),
    [
        (dqn.DQN, {}, LSTM, {}, "use r2d2"),
        (dqn.DQN, {}, NetConfig(prev_action_reward=True), {}, "have no past"),
        (dqn.DQN, {}, SMALL, {"actions": "box"}, "one value for each action"),
        (dqn.DQN, {}, NetConfig(separate_value=True), {}, "separate_value"),
        (dqn.DQN, {"n_step": 0}, SMALL, {}, "n-step is 0; it must be at least 1"),
        (dqn.DQN, {"epsilon": 1.5}, SMALL, {}, "epsilon is 1.5"),
        (dqn.DQN, {"target_tau": -0.1}, SMALL, {}, "target-tau is -0.1"),
        (r2d2.R2D2, {}, SMALL, {}, "set it to lstm, or use dqn"),
        (r2d2.R2D2, {"stride": 90}, LSTM, {}, "set stride=80 or less"),
        (r2d2.R2D2, {"eta": 2.0}, LSTM, {}, "eta is 2.0; it must be at least 0 and at most 1"),
    ],
)
def test_what_cannot_work_is_refused(cls, config, net, toy, words):
    module = dqn if cls is dqn.DQN else r2d2
    with pytest.raises(ConfigError, match=words):
        cls(module.Config(**config), toy_spec(**toy), net, 2)


# ---------------------------------------------------------------------------------------------- learning
LURE = dqn.Config(zero_head=True, epsilon=0.5, epsilon_final=0.5, n_step=3, lr=2e-3, target_period_updates=20)


@pytest.mark.parametrize("flip", [False, True])
def test_dqn_leaves_the_lure(flip):
    """The greedy policy begins with the lure; it must end with the reward at the end, and not if gradients are turned around."""
    algorithm = dqn.DQN(LURE, envs.describe("shoal/LureChain-v0", length=3), SMALL, 8)
    learn = train(algorithm, "shoal/LureChain-v0", 40 if flip else 250, length=3, flip=flip)
    got = greedy_return(algorithm, learn, "shoal/LureChain-v0", length=3)
    assert (got < 0.5) if flip else (got == pytest.approx(1.0))
