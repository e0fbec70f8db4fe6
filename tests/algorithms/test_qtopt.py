"""QT-Opt: hand-worked targets and losses, the lagged copy, one target wherever it is computed, and what it refuses."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.acting import Progress, StepView
from shoal.algorithms import qtopt
from shoal.algorithms.common.lagged_copy import Lag, LaggedCopy
from shoal.envs import EnvSpec
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from shoal.slots import map_tree

NET = NetConfig(hidden=(16, 16), activation="relu")
GRASP = "shoal/PointGrasp-v0"
SMALL = {"cem_samples": 8, "cem_elites": 2}


def made(config=None, seats=4, **options):
    return algorithms.make(config or qtopt.Config(**{**SMALL, **options}), envs.describe(GRASP), NET, seats)


def transitions(count, seed=0, terminal=None):
    rng = np.random.default_rng(seed)
    seen = lambda: rng.uniform(-1, 1, (count, 5)).astype(np.float32)  # noqa: E731
    discount = np.full(count, 0.9, np.float32)
    if terminal is not None:
        discount[terminal] = 0.0
    return {"observation": seen(), "action": rng.uniform(-1, 1, (count, 3)).astype(np.float32), "next_observation": seen(),
            "reward": rng.uniform(-0.05, 0.5, count).astype(np.float32), "discount": discount}


def batch_of(items):
    count = len(items["action"])
    return {**items, "weights_version": np.zeros(count, np.int32), "time": np.zeros(count), "probability": np.full(count, 1 / 1000),
            "table_size": np.full(count, 1000)}


# ---------------------------------------------------------------------------------------------- hand-worked numbers
class ThreeActions:
    """Stands for a target net that knows three actions: their values, given as logits."""

    def __init__(self, *values):
        self.table = torch.logit(torch.tensor([values]))

    def encode(self, observation):
        return observation

    def best(self, encoded, rng):
        value, at = self.table.max(1)
        return at.view(1, 1).float(), value

    def logits(self, encoded, unit):
        return self.table[:, unit.long().flatten()]

    def values(self, logits):
        return torch.sigmoid(logits)


def target_of(clipped, reward=-0.05, discount=0.9):
    judges = ThreeActions(0.2, 0.6, 0.4), ThreeActions(0.5, 0.45, 0.55)
    item = {"next_observation": torch.zeros(1, 1), "reward": torch.tensor([reward]), "discount": torch.tensor([discount])}
    return qtopt.BellmanTargets(qtopt.Config(clipped_double=clipped), *judges).targets(item, torch.Generator()).item()


def test_T35_one_argmax_two_judges():
    assert target_of(True) == pytest.approx(0.355, abs=1e-6), "0.445 would be the smaller of two maxima"
    assert target_of(False) == pytest.approx(0.490, abs=1e-6)


def test_bounds_of_targets():
    """Targets stay within 0 and 1 and nothing follows the end."""
    assert target_of(True, reward=-0.05, discount=0.0) == 0.0 and target_of(True, reward=1.0) == 1.0
    assert target_of(True, reward=0.3, discount=0.0) == pytest.approx(0.3)


def test_T36_cross_entropy():
    """T36: cross entropy and its gradient at the logit."""
    learn = made().learn(0)
    model = learn.model
    with torch.no_grad():  # a net that gives 0.4 everywhere
        model.params.zero_()
        model.net.out.bias.fill_(float(torch.logit(torch.tensor(0.4))))
    items = {**transitions(1), "target": np.array([0.355], np.float32)}
    (minibatch,) = learn.minibatches(batch_of(items), learn.sums(batch_of(items)), Progress(), np.random.default_rng(0))
    _, metrics = learn.gradients(minibatch, "all")
    assert metrics["loss"] == pytest.approx(0.65476574, abs=1e-6)
    assert metrics["excess_loss"] == pytest.approx(0.65476574 - 0.65048701, abs=1e-6)
    assert metrics["td_error"] == pytest.approx(0.045, abs=1e-6)
    bias = model.net.out.bias
    assert bias.grad is not None and bias.grad.item() == pytest.approx(0.045, abs=1e-6), "the gradient at the logit is Q - y"


# ---------------------------------------------------------------------------------------------- two target nets
def test_lagged_copy():
    """The lagged copy is the vector of some updates ago."""
    lag, history = Lag(6, 2), [torch.zeros(1)]
    copies = [LaggedCopy(lag, history[0]), LaggedCopy(lag, history[0])]
    for update in range(1, 41):
        history.append(torch.full((1,), float(update)))
        copies[0].follow(history[-1], torch.tensor([float(update)]))
        copies[1].follow(history[-1], torch.tensor([float(update)]), torch.tensor(True))
        ages = [update - copy.state["lagged"].item() for copy in copies]
        assert ages[0] == ages[1]
        assert ages[0] == update if update < 8 else 6 <= ages[0] < 8, "never younger than the lag, as a periodic copy would be"


def test_skipped_update_moves_no_copy():
    copy = LaggedCopy(Lag(2, 1), torch.zeros(1))
    before = {name: tensor.clone() for name, tensor in copy.state.items()}
    copy.follow(torch.ones(1), torch.tensor([1.0]), torch.tensor(False))
    assert all(torch.equal(copy.state[name], tensor) for name, tensor in before.items())


def updated(learn, updates, seed=0):
    rng = np.random.default_rng(seed)
    for number in range(updates):
        batch = batch_of(transitions(16, number))
        for minibatch in learn.minibatches(batch, learn.sums(batch), Progress(), rng):
            gradient, _ = learn.gradients(minibatch, "all")
            learn.apply(gradient, "all")
    return learn


def test_polyak_then_lag():
    learn = made(target_tau=0.1, lag_updates=4, lag_snapshot_updates=2).learn(0)
    targets = [learn.state["target"].clone()]
    for number in range(12):
        before = learn.state["target"].clone()
        updated(learn, 1, number)
        assert torch.allclose(learn.state["target"], torch.lerp(before, learn.state["params"], 0.1), atol=1e-6)
        targets.append(learn.state["target"].clone())
    assert torch.equal(learn.state["lagged"], targets[8]), "after 12 updates, the snapshot of 4 updates ago"
    assert not torch.equal(learn.state["lagged"], learn.state["target"])


def test_nets_of_policy_and_updaters():
    """The policy acts with the first target net and updaters hold both."""
    algorithm = made(target_tau=0.1)
    learn = updated(algorithm.learn(0), 30)
    published = learn.published(Progress(0, 30))
    assert {name: np.shape(leaf) for name, leaf in published.items() if name != "norm"} == {
        name: field.shape for name, field in algorithm.published_layout().fields.items() if name != "norm"}
    policy, updater = algorithm.policy(), algorithm.relabeller()
    policy.load(published)
    updater.load(published)
    assert torch.equal(policy.model.params, learn.state["target"]) and torch.equal(updater.first.params, learn.state["target"])
    assert torch.equal(updater.second.params, learn.state["lagged"])


def test_targets_of_an_updater():
    """An updater gives the targets that the learner would compute itself."""
    algorithm = made(target_tau=0.1)
    learn = updated(algorithm.learn(0), 30)
    updater, items = algorithm.relabeller(), transitions(32, 99, terminal=slice(0, 4))
    updater.load(learn.published(Progress()))
    labelled, priority = updater.relabel(items, torch.Generator().manual_seed(5))
    own = learn._targets.targets(map_tree(torch.from_numpy, items), torch.Generator().manual_seed(5))
    assert np.array_equal(labelled["target"], own.numpy()) and (priority == 1).all()
    assert np.array_equal(labelled["target"][:4], items["reward"][:4].clip(0, 1)), "no bootstrap where the episode has ended"
    assert set(labelled) | {"key", "label_version", "weights_version", "time"} == set(algorithm.relabelled.layout.fields)


def test_checkpoint_bit_for_bit():
    """Everything comes back from a checkpoint bit for bit."""
    learn, other = updated(made().learn(0), 25), made().learn(1)
    for name, tensor in other.state.items():
        tensor.copy_(learn.state[name])
    one, two = (updated(each, 25, 3).state for each in (learn, other))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(other._second.params, other.state["lagged"])


def test_state_in_shared_memory():
    """A state that moved into shared memory is still the one that judges."""
    learn = made().learn(0)
    arrays = {name: tensor.numpy().copy() for name, tensor in learn.state.items()}
    learn.bind(arrays)
    updated(learn, 25)
    assert np.array_equal(arrays["lagged"], learn._second.params.numpy()) and arrays["updates"][0] == 25


# ---------------------------------------------------------------------------------------------- acting
def view(seats=4):
    return StepView(np.zeros((seats, 5), np.float32), np.ones(seats, bool))


def test_best_actions():
    """Actions are the best ones within bounds and binary ones are on or off."""
    policy, rng = made(binary=(2,)).policy(), torch.Generator().manual_seed(0)
    action, _, extras = policy.act(view(), {}, None, rng)
    assert action.shape == (4, 3) and action.dtype == np.float32 and (np.abs(action) <= 1).all() and not extras
    assert np.isin(action[:, 2], (-1, 1)).all()


def test_bounds_of_any_size_and_shape():
    low, high = np.array([[-2.0, 0.0]], np.float32), np.array([[2.0, 10.0]], np.float32)
    spec = envs.describe(GRASP)
    spec = EnvSpec(**{**vars(spec), "action_space": gym.spaces.Box(low, high)})
    algorithm = qtopt.QTOpt(qtopt.Config(**SMALL), spec, NET, 4)
    action, _, _ = algorithm.policy().act(view(), {}, np.ones(4, np.float32), torch.Generator().manual_seed(0))
    assert action.shape == (4, 1, 2) and (action >= low).all() and (action <= high).all() and action[..., 1].max() > 2
    unit = algorithm.policy().model.unit(torch.from_numpy(action))
    assert unit.shape == (4, 1, 2) and unit.abs().max() <= 1


@pytest.mark.parametrize(("options", "words"), [
    ({"cem_elites": 65}, "--algorithm.cem-elites 65 is more than --algorithm.cem-samples 64"),
    ({"lag_updates": 10, "lag_snapshot_updates": 11}, "--algorithm.lag-snapshot-updates 11 is more than"),
    ({"binary": (3,)}, "--algorithm.binary 3 is not in an action of 3 numbers"),
])
def test_wrong_values_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        made(qtopt.Config(**options))


@pytest.mark.parametrize(("env", "words"), [("CartPole-v1", "it searches among continuous actions")])
def test_unfit_environments_are_refused(env, words):
    with pytest.raises(ConfigError, match=words):
        algorithms.make("qtopt", envs.describe(env), NET, 4)


def test_what_cannot_work():
    """Unbounded actions and nets with a memory are refused."""
    spec = envs.describe(GRASP)
    free = EnvSpec(**{**vars(spec), "action_space": gym.spaces.Box(-np.inf, np.inf, (2,))})
    with pytest.raises(ConfigError, match="needs bounded actions"):
        qtopt.QTOpt(qtopt.Config(), free, NET, 4).policy()
    with pytest.raises(ConfigError, match="has no memory"):
        algorithms.make("qtopt", spec, NetConfig(recurrent="lstm"), 4).policy()
