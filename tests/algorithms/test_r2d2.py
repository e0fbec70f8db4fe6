"""r2d2: windows against literal transcriptions, burn-in, stored states; T30 of specs/value.md."""

import numpy as np
import pytest
import torch

from shoal import envs
from shoal.acting import Progress
from shoal.algorithms import r2d2
from shoal.nets import NetConfig
from shoal.ops import priorities, value
from shoal.slots import map_tree
from tests.algorithms.q_learning import LOOKING_BACK, LSTM, WINDOW, made, shake, tensors
from tests.algorithms.replay_loop import Actor, batch_of, gradient, greedy_return, train


# ---------------------------------------------------------------------------------------------- gradients of r2d2
def literal_window(config, learn, item, gamma, n):
    """(loss, priority) of one window, step by step with the acting side of the net, from its state."""

    def walk(net):
        state = {name: torch.from_numpy(x)[None] for name, x in item["state"].items()}
        if config.state == "zero":
            state = map_tree(torch.zeros_like, state)
        out = []
        for s in range(len(item["first"])):
            look = (torch.as_tensor(item["prev_action"][s])[None], torch.as_tensor(item["prev_reward"][s])[None])
            previous = look if "prev_action" in item else ()
            q, state, _ = net.step(torch.from_numpy(item["observation"][s])[None], torch.as_tensor(item["first"][s])[None], state,
                                   *previous)  # fmt: skip
            out.append(q[0])
        return torch.stack(out)

    l, m = config.burn_in, config.length  # noqa: E741
    online, target = walk(learn.model.net), walk(learn.target.net)
    errors = []
    end = l + int(item["valid"][l:].sum())
    for s in range(l, end):
        total, product, k = 0.0, 1.0, s
        while True:
            total += product * item["reward"][k]
            product *= gamma * item["discount"][k]
            k += 1
            if k - s == n or k == end:
                break
        legal = item["action_mask"][k] if "action_mask" in item else np.ones(online.shape[1], bool)
        chosen = online if config.double else target
        best = max(np.flatnonzero(legal), key=lambda a: float(chosen[k, a]))
        worth = target[k, best]
        goal = value.rescale(total + product * value.unrescale(worth)) if config.rescale else total + product * worth
        errors.append(float(goal - online[s, item["action"][s]]))
    sizes = np.abs(errors)
    assert len(sizes) <= m
    return sum(e * e / 2 for e in errors), config.eta * sizes.max() + (1 - config.eta) * sizes.mean()


@pytest.mark.parametrize(
    ("config", "toy"),
    [
        (r2d2.Config(**WINDOW), {}),
        (r2d2.Config(**WINDOW, state="zero", double=False, rescale=False, n_step=2), {}),
        (r2d2.Config(burn_in=0, length=3, stride=3, dueling=False, n_step=1), {"masked": True}),
        (r2d2.Config(burn_in=4, length=2, stride=1, n_step=3, state="zero"), {"masked": True}),
        (r2d2.Config(burn_in=2, length=5, stride=2, n_step=3), {}),  # an episode that is truncated after 6 steps is padded
    ],
)
def test_errors_of_windows(config, toy):
    """The errors of windows are those of acting through them."""
    _, learn, items, _ = made(r2d2.R2D2, config, LOOKING_BACK, **toy)
    shake(learn)
    _, metrics = gradient(learn, batch_of(items))
    one_by_one = [
        literal_window(config, learn, map_tree(lambda x: x[i], items), config.gamma, config.n_step)  # noqa: B023
        for i in range(len(items["valid"]))
    ]
    assert not items["valid"].all()  # some are padded
    if config.length == 5:
        assert ((items["discount"][:, -2] == 1) & ~items["valid"][:, -1]).any()
    assert metrics["loss"] == pytest.approx(np.mean([loss for loss, _ in one_by_one]), rel=1e-4)
    np.testing.assert_allclose(learn.priorities, [p + priorities.FLOOR for _, p in one_by_one], rtol=1e-4)


def test_gradient_of_windows():
    """Along random directions, with a target that does not follow: targets and burn-in are constants of the loss."""
    config = r2d2.Config(burn_in=0, length=4, stride=2, n_step=2, double=False)
    _, learn, items, _ = made(r2d2.R2D2, config, LSTM, steps=30)
    shake(learn)
    grad, _ = gradient(learn, batch_of(items))
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = torch.randn(learn.model.params.shape, generator=g)
        direction /= direction.norm()
        losses = []
        for sign in (1, -1):
            learn.model.params.add_(direction, alpha=sign * 1e-2)
            losses.append(gradient(learn, batch_of(items))[1]["loss"])
            learn.model.params.add_(direction, alpha=-sign * 1e-2)
        slope = (losses[0] - losses[1]) / 2e-2
        assert slope == pytest.approx(float(grad @ direction.numpy()), rel=0.02, abs=2e-3)


def test_no_gradient_through_burn_in():
    """No gradient flows through burn-in, state or target."""
    config = r2d2.Config(**WINDOW)
    algorithm, learn, items, _ = made(r2d2.R2D2, config, LSTM)
    errors, parts = r2d2.WindowErrors(config), tensors(items)
    parts["observation"].requires_grad_()
    for leaf in parts["state"].values():
        leaf.requires_grad_()
    judged = errors(learn.model, learn.target, parts)
    judged.loss.sum().backward()
    seen = parts["observation"].grad.abs().sum(-1)
    assert float(seen[:, : config.burn_in].sum()) == 0
    assert float(seen[:, config.burn_in : -1].sum()) > 0
    assert float(seen[:, -1].sum()) == 0  # only to bootstrap from
    assert all(leaf.grad is None for leaf in parts["state"].values())
    assert all(parameter.grad is None for parameter in learn.target.net.parameters())
    assert not judged.target.requires_grad and not judged.priority.requires_grad
    del algorithm


def test_burn_in_matters_to_both_nets():
    config = r2d2.Config(**WINDOW)
    _, learn, items, _ = made(r2d2.R2D2, config, LSTM)
    late = map_tree(lambda x: x[items["valid"][:, 0]], items)  # windows with a whole burn-in
    errors, parts, other = r2d2.WindowErrors(config), tensors(late), tensors(late)
    other["observation"][:, : config.burn_in] += 1
    for model in (learn.model, learn.target):
        assert float((errors.unroll(model, parts).q - errors.unroll(model, other).q).detach().abs().max()) > 1e-3


def test_padding_changes_nothing():
    config = r2d2.Config(**WINDOW)
    _, learn, items, _ = made(r2d2.R2D2, config, LOOKING_BACK)
    grad, metrics = gradient(learn, batch_of(items))
    known = learn.priorities
    noise, spoilt = np.random.default_rng(0), map_tree(np.copy, items)
    for i, valid in enumerate(items["valid"]):
        real = np.flatnonzero(valid)
        before, after = np.arange(real[0]), np.arange(real[-1] + 2, len(valid) + 1)  # the row behind the last is bootstrapped from
        for rows in (before, after):
            spoilt["observation"][i, rows] = noise.normal(size=(len(rows), 3)) * 10
            spoilt["prev_reward"][i, rows] = 1
            spoilt["action"][i, rows[rows < len(valid)]] = 2
        spoilt["reward"][i, ~valid] = 100
    again, more = gradient(learn, batch_of(spoilt))
    np.testing.assert_allclose(again, grad, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(learn.priorities, known, rtol=1e-5)
    for name in ("loss", "q_mean", "q_max", "target_mean"):
        assert more[name] == pytest.approx(metrics[name], rel=1e-5), name


# ---------------------------------------------------------------------------------------------- actor and learner agree
def fresh_windows(name, config, net, **kwargs):
    algorithm = r2d2.R2D2(config, envs.describe(name, **kwargs), net, 4)
    learn = algorithm.learn(1)
    with torch.no_grad():
        learn.model.net.value_out.bias.fill_(1.0)  # differences are measured against the size of values
    learn.target.params.copy_(learn.model.params)
    actor = Actor(algorithm, envs.make(name, 4, **kwargs), 2)
    actor.policy.load(learn.published(Progress()))
    actor.play(120)
    return (learn, *actor.items())


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("shoal/TMaze-v0", {"length": 8}), ("shoal/CartPolePOMDP-v0", {}), ("shoal/TMaze-v0", {"max_episode_steps": 5})],
)
@pytest.mark.parametrize("burn_in", [0, 2])
def test_T30_q_values_of_the_actor(name, kwargs, burn_in):
    """T30: the learner sees the Q-values that the actor had."""
    config = r2d2.Config(burn_in=burn_in, length=4, stride=2, diagnose=True)
    learn, items, _ = fresh_windows(name, config, LOOKING_BACK, **kwargs)
    errors, parts = r2d2.WindowErrors(config), tensors(items)

    def gap(parts):
        with torch.no_grad():
            q = errors.unroll(learn.model, parts).q[:-1].transpose(0, 1)
        valid, stored = parts["valid"][:, burn_in:], parts["q"][:, burn_in:-1]
        delta = value.delta_q(q, stored, q.amax((1, 2))[:, None])
        return float((q - stored)[valid].abs().max()), float(delta[valid].max())

    difference, delta = gap(parts)
    assert difference < 1e-5 and delta < 1e-6
    later = parts["observation"][:, 0].clone(), parts["valid"][:, 0] & ~parts["first"][:, 0]
    if bool(later[1].any()):  # and it can fail: the state after the window's first observation
        parts["state"] = {name: torch.where(later[1][:, None], x[:, 1], x[:, 0]) for name, x in parts["states"].items()}
        assert gap(parts)[0] > 1e-3


def test_how_wrong_a_state_is():
    """With the actor's own weights: stored states are exact, burn-in brings zero ones nearer, and errors fade."""
    found = {}
    for state, burn_in in (("stored", 0), ("stored", 2), ("zero", 0), ("zero", 2)):
        config = r2d2.Config(burn_in=burn_in, length=4, stride=2, diagnose=True, state=state)
        learn, items, _ = fresh_windows("shoal/CartPolePOMDP-v0", config, LOOKING_BACK)
        later = map_tree(lambda x: x[~items["first"].any(1)], items)  # noqa: B023  # those that do not begin with an episode
        _, metrics = gradient(learn, batch_of(later))
        found[state, burn_in] = metrics["delta_q_first"], metrics["delta_q_last"]
    assert max(found["stored", 0] + found["stored", 2]) < 1e-6
    assert found["zero", 0][0] > found["zero", 2][0] > 1e-5
    assert found["zero", 0][0] > found["zero", 0][1]


@pytest.mark.parametrize("rescale", [True, False])
def test_actors_priority_is_the_learners(rescale):
    """The actor's priority is the learner's first of windows."""
    config = r2d2.Config(**WINDOW, rescale=rescale)
    learn, items, found = fresh_windows("shoal/TMaze-v0", config, LOOKING_BACK, length=8)
    gradient(learn, batch_of(items))
    np.testing.assert_allclose(learn.priorities, found, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_r2d2_remembers_the_cue():
    """Episodes of 5 steps in windows of 2 + 2: only the stored state can carry the cue to the junction."""
    net = NetConfig(hidden=(32,), recurrent="lstm", lstm_size=32, prev_action_reward=True)
    config = r2d2.Config(burn_in=2, length=2, stride=1, lr=2e-3, target_period_updates=50)
    algorithm = r2d2.R2D2(config, envs.describe("shoal/TMaze-v0", length=4), net, 8)
    learn = train(algorithm, "shoal/TMaze-v0", 3000, length=4, exponent=0.9)
    assert greedy_return(algorithm, learn, "shoal/TMaze-v0", length=4) > 0.9
