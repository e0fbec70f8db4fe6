"""dqn with atoms and noisy layers: gradients against literal transcriptions, priorities, whose noise is whose."""

import numpy as np
import pytest
import torch

from shoal import cli, envs
from shoal.acting import Progress, StepView
from shoal.algorithms import dqn
from shoal.device.batched_inference import BatchedInference
from shoal.device.placement import Hardware
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from shoal.ops import priorities
from shoal.slots import map_tree
from tests.algorithms.replay_loop import batch_of, gradient, greedy_return, train
from tests.algorithms.test_q_learning import made, shake, truncated
from tests.algorithms.toys import toy_spec
from tests.ops.test_c51 import literal

SMALL = NetConfig(hidden=(16,))
ATOMS = {"atoms": 11, "value_min": -3.0, "value_max": 5.0}
NOISY = {"noisy_sigma": 0.5, "epsilon": 0.0, "epsilon_final": 0.0}


def literal_transition(config, learn, item, noise):
    """KL of one transition by the book, with the three sets of noise."""
    item = map_tree(lambda x: torch.from_numpy(np.asarray(x))[None], item)
    net, target, following = learn.model.net, learn.target.net, item["next_observation"]
    support = torch.linspace(config.value_min, config.value_max, config.atoms, dtype=torch.float64)
    with torch.no_grad():
        p = target.logits(following, noise[2])[0].double().softmax(-1)
        judge = (net.logits(following, noise[1])[0].double().softmax(-1) if config.double else p) @ support
    legal = item["next_action_mask"][0] if "next_action_mask" in item else torch.ones(len(judge), dtype=torch.bool)
    best = max((a for a in range(len(judge)) if legal[a]), key=lambda a: judge[a])
    goal = literal(support.tolist(), p[best].tolist(), float(item["reward"]), float(item["discount"]))
    log_p = net.logits(item["observation"], noise[0])[0, int(item["action"])].double().log_softmax(-1)
    return sum(m * (np.log(m) - log_p[j]) for j, m in enumerate(goal) if m > 0)


@pytest.mark.parametrize(("options", "toy"), [
    (ATOMS, {}),
    ({**ATOMS, "double": False, "dueling": True}, {"masked": True}),
    ({**ATOMS, **NOISY, "dueling": True, "n_step": 3, "importance": 1.0}, {"masked": True}),
    ({**ATOMS, **NOISY, "double": False}, {"observations": "dict"}),
])
def test_gradient_of_the_mean_divergence(options, toy):
    """The gradient is that of the weighted mean divergence."""
    config = dqn.Config(**options)
    _, learn, items, _ = made(dqn.DQN, config, SMALL, steps=30, **toy)
    shake(learn)
    count = len(items["reward"])
    assert (items["discount"] == 0).any() and len(set(items["discount"].tolist())) >= (4 if config.n_step == 3 else 2)
    probability = np.random.default_rng(0).random(count) + 0.1
    batch = batch_of(items, probability / probability.sum(), 500)
    grad, metrics = gradient(learn, batch, Progress(learner_steps=7))
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), Progress(learner_steps=7), np.random.default_rng(0))
    noise = minibatch.noise if config.noisy_sigma else [None] * 3
    losses = [literal_transition(config, learn, map_tree(lambda x: x[i], items), noise) for i in range(count)]  # noqa: B023
    weight = (500 * probability / probability.sum()) ** -config.importance
    total = sum(w * loss for w, loss in zip((weight / weight.max()).tolist(), losses, strict=True)) / count
    want = torch.autograd.grad(total, list(learn.model.net.parameters()))
    for parameter, part in zip(learn.model.net.parameters(), want, strict=True):
        parameter.grad.copy_(part)
    np.testing.assert_allclose(grad, learn.model.grad.numpy(), rtol=1e-3, atol=1e-5)
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    np.testing.assert_allclose(learn.priorities, [float(loss.detach()) + priorities.FLOOR for loss in losses], rtol=1e-3, atol=1e-5)
    assert 0 < metrics["returns_clipped"] < 1 and metrics["td_error"] == pytest.approx(learn.priorities.mean(), rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"n_step": 3, "dueling": True, "reward_clip": 1.0}])
def test_actors_priority_is_the_learners(options):
    _, learn, items, found = made(dqn.DQN, dqn.Config(**ATOMS, **options), SMALL, masked=True)
    gradient(learn, batch_of(items))
    ended = truncated(items)
    np.testing.assert_allclose(learn.priorities[~ended], found[~ended], rtol=1e-3, atol=1e-4)
    assert 0 < ended.sum() < len(ended) / 2 and np.std(found) > 0.1


def test_priorities_with_the_actors_noise():
    """An actor's priorities are made with its own noise."""
    _, _, items, found = made(dqn.DQN, dqn.Config(**ATOMS, **NOISY), SMALL)
    assert len(found) == len(items["reward"]) and np.isfinite(found).all() and (found > 0).all() and np.std(found) > 0.1


# ---------------------------------------------------------------------------------------------- the learner's noise
def noise_of(learn, items, steps, rng=0):
    batch = batch_of(items)
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), Progress(learner_steps=steps), np.random.default_rng(rng))
    return minibatch.noise


def test_every_update_has_noise_of_its_own():
    algorithm, learn, items, _ = made(dqn.DQN, dqn.Config(**ATOMS, **NOISY, dueling=True), SMALL)
    noise = noise_of(learn, items, 5)
    assert noise.shape == (3, learn.model.net.noise_size)
    sets = [*noise, *noise_of(learn, items, 6), *noise_of(algorithm.learn(4), items, 5)]  # online, selection, target, thrice
    for i, one in enumerate(sets):
        for other in sets[:i]:
            assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.3
    values = torch.stack([noise_of(learn, items, steps) for steps in range(50)])
    assert float(values.mean()) == pytest.approx(0, abs=0.03) and float(values.std()) == pytest.approx(1, abs=0.03)
    assert torch.equal(noise, noise_of(learn, items, 5, rng=1))  # of the seed and the number of the update alone


@pytest.mark.parametrize("options", [{**ATOMS, **NOISY, "dueling": True}, NOISY])
def test_two_learners_equal_one(options):
    """Two learners make the update of the joined batch."""
    algorithm, learn, items, _ = made(dqn.DQN, dqn.Config(**options), SMALL)
    other = algorithm.learn(3)
    shake(learn)
    shake(other)
    count, progress = len(items["reward"]), Progress(learner_steps=9)
    probability = np.random.default_rng(0).random(count) * 0.01 + 1e-4
    rows = slice(0, count // 4), slice(count // 4, count)
    parts = [batch_of(map_tree(lambda x: x[row], items), probability[row]) for row in rows]  # noqa: B023
    sums = sum(learn.sums(part, index, 2) for index, part in enumerate(parts))
    grads = []
    for index, (one, part) in enumerate(zip((learn, other), parts, strict=True)):
        (minibatch,) = one.minibatches(part, sums, progress, np.random.default_rng(index))
        grads.append(one.gradients(minibatch, "all")[0].copy())
    whole, _ = gradient(learn, batch_of(items, probability), progress)
    np.testing.assert_allclose(sum(grads) / 2, whole, rtol=1e-4, atol=1e-6)
    elsewhere, _ = gradient(learn, batch_of(items, probability), Progress(learner_steps=10))
    assert np.abs(elsewhere - whole).max() > 1e-3


# ---------------------------------------------------------------------------------------------- acting
def same_view(seats):
    return StepView(np.ones((seats, 3), np.float32), np.zeros(seats, bool))


@pytest.mark.parametrize("options", [{**ATOMS, **NOISY, "dueling": True}, NOISY])
def test_noise_of_every_seat(options):
    """Every seat acts with its own noise and an evaluation without."""
    algorithm = dqn.DQN(dqn.Config(**options), toy_spec(), SMALL, 4)
    learn, policy, seats = algorithm.learn(3), algorithm.policy(), 50
    policy.load(learn.published(Progress()))
    weights, rng = policy.model.params.clone(), torch.Generator().manual_seed(0)
    explore = algorithm.explore(0, 1, seats, Progress())
    _, _, first = policy.act(same_view(seats), {}, explore, rng)
    _, _, second = policy.act(same_view(seats), {}, explore, rng)
    _, _, again = policy.act(same_view(seats), {}, explore, torch.Generator().manual_seed(0))
    assert len(np.unique(first["q"][:, 0])) == seats  # the same observation, other noise
    assert not (first["q"] == second["q"]).any()
    np.testing.assert_array_equal(first["q"], again["q"])
    state = rng.get_state()
    _, _, calm = policy.act(same_view(seats), {}, None, rng)
    assert torch.equal(rng.get_state(), state) and len(np.unique(calm["q"][:, 0])) == 1
    with torch.no_grad():
        np.testing.assert_allclose(calm["q"], learn.model.net(torch.ones(seats, 3)), rtol=1e-6)
    assert torch.equal(policy.model.params, weights) and weights.numel() == algorithm.published_layout().fields["params"].shape[0]


def test_noise_of_a_server():
    """A server acts with noise for every row although epsilon is 0."""
    algorithm = dqn.DQN(dqn.Config(**ATOMS, **NOISY), toy_spec(), SMALL, 4)
    inference = BatchedInference(algorithm.policy(), Hardware(), torch.Generator().manual_seed(0))
    groups = [same_view(4), same_view(4)]
    for _ in range(2):
        action, _, extras = inference.act(groups, [{}, {}], np.zeros(8, np.float32))
        assert len(np.unique(extras["q"][:, 0])) == 8 and extras["logits"].shape == (8, 4, 11)
        np.testing.assert_array_equal(action, extras["q"].argmax(1))


# ---------------------------------------------------------------------------------------------- refusals, learning
@pytest.mark.parametrize(("words", "said"), [
    (["dqn", "--algorithm.atoms", "1"], "one atom is the same return for every action; give 2 or more"),
    (["dqn", "--algorithm.atoms", "-5"], "--algorithm.atoms is -5; it must be at least 0"),
    (["dqn", "--algorithm.atoms", "51", "--algorithm.rescale"], "turn one of the two off"),
    (["rainbow", "--algorithm.value-min", "10"], "--algorithm.value-min 10 is not below --algorithm.value-max 10"),
    (["dqn", "--algorithm.noisy-sigma", "-1"], "--algorithm.noisy-sigma is -1"),
    (["r2d2", "--algorithm.atoms", "51"], "there is no option --algorithm.atoms"),
])
def test_what_cannot_work(words, said, capsys):
    """What cannot work is refused before anything starts."""
    assert cli.main(["show", words[0], "shoal/Catch-v0", *words[1:]]) == 2
    assert said in capsys.readouterr().err


def test_bounds_without_atoms():
    """Bounds that atoms do not need are not checked."""
    dqn.Config(value_min=5.0, value_max=5.0).validate()
    with pytest.raises(ConfigError, match="value-min 5"):
        dqn.Config(atoms=51, value_min=5.0, value_max=5.0).validate()


LURE = dqn.Config(atoms=21, value_min=-0.5, value_max=1.5, dueling=True, noisy_sigma=0.5, epsilon=0.3, epsilon_final=0.3, n_step=3,
                  lr=2e-3, target_period_updates=20)


@pytest.mark.parametrize("flip", [False, True])
def test_it_leaves_the_lure(flip):
    """It must end with the reward at the end, and not if gradients are turned around."""
    algorithm = dqn.DQN(LURE, envs.describe("shoal/LureChain-v0", length=3), SMALL, 8)
    learn = train(algorithm, "shoal/LureChain-v0", 40 if flip else 150, length=3, flip=flip)
    got = greedy_return(algorithm, learn, "shoal/LureChain-v0", length=3)
    assert (got < 0.5) if flip else (got == pytest.approx(1.0))


def test_items_carry_no_q_values():
    """Items do not carry what only priorities need."""
    algorithm = dqn.DQN(dqn.Config(**ATOMS, **NOISY), toy_spec(), SMALL, 4)
    plain = dqn.DQN(dqn.Config(), toy_spec(), SMALL, 4)
    assert algorithm.record.layout.fields == plain.record.layout.fields
