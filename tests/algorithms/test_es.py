"""ES: perturbed copies act like single nets, updates follow the published code, limits grow, bad values are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.acting import Progress, StepView
from shoal.algorithms import es
from shoal.algorithms.evolution.noise import NoiseTable, draw_indices
from shoal.errors import ConfigError
from shoal.nets import NetConfig, build_policy
from shoal.nets.batched import BatchedPolicy, DensePass
from shoal.nets.flat import flatten
from shoal.nets.virtual_norm import add_virtual_norm, statistics_of
from shoal.population import Evolves

SMALL = {"population": 6, "noise_size": 50_000}


def made(env="CartPole-v1", net=None, seats=6, **values):
    return algorithms.make(es.Config(**{**SMALL, **values}), envs.describe(env), net or NetConfig(hidden=(8,)), seats)


def progress(iteration):
    return Progress(learner_steps=iteration)


def update(learn, scores, decisions=None, iteration=0):
    sums = np.concatenate([scores, np.ones(len(scores)) if decisions is None else decisions])
    (minibatch,) = learn.minibatches({}, sums, progress(iteration), np.random.default_rng(0))
    gradient, metrics = learn.gradients(minibatch, "all")
    return gradient.copy(), metrics


@pytest.mark.parametrize(("space", "net"), [
    ("CartPole-v1", NetConfig(hidden=(16, 8))), ("CartPole-v1", NetConfig(hidden=())), ("FrozenLake-v1", NetConfig(hidden=(4,))),
    ("shoal/PixelCatch-v0", NetConfig(torso="small_conv")), ("shoal/PixelCatch-v0", NetConfig(torso="mlp", hidden=(8,))),
], ids=["mlp", "linear", "discrete", "conv", "flat"])
def test_batched_pass(space, net):
    """A batched pass gives each row its own net."""
    spec = envs.describe(space)
    copies = BatchedPolicy(build_policy(spec.observation_space, 3, net, seed=1), rows=5)
    env = envs.make(space, 5)
    observation = torch.from_numpy(np.array(env.reset(3).observation))
    env.close()
    copies.params.normal_(generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = copies(observation)
        single = build_policy(spec.observation_space, 3, net, seed=1)
        flat = flatten(single)
        for row in range(5):
            flat.copy_(copies.params[row])
            torch.testing.assert_close(together[row : row + 1], single(observation[row : row + 1]), rtol=1e-4, atol=1e-4)
    assert isinstance(copies._pass, DensePass) == (net.torso != "small_conv")


def test_virtual_norm():
    """By hand: a layer 2x + 7 over the reference 1, 3 has the mean 11 and the deviation 2; then 5 becomes (17 - 11) / 2 + 7."""
    layer = torch.nn.Linear(1, 1)
    cnns = torch.nn.ModuleList([torch.nn.Sequential(layer)])
    norms = add_virtual_norm(cnns, "torso.cnns")
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.fill_(7.0)
        found = statistics_of(norms, lambda: cnns[0](torch.tensor([[1.0], [3.0]])))
        (norm,) = norms.values()
        norm.mean.copy_(found["torso.cnns.0.0.mean"])
        norm.scale.copy_(found["torso.cnns.0.0.scale"])
        assert found["torso.cnns.0.0.mean"].item() == 11.0 and found["torso.cnns.0.0.scale"].item() == pytest.approx(0.5, rel=1e-5)
        for batch in ([[5.0]], [[5.0], [-40.0]]):  # what else is in the batch does not matter
            assert cnns[0](torch.tensor(batch))[0].item() == pytest.approx(10.0, rel=1e-5)


def test_members_are_normalised():
    """Each member by the statistics of the reference batch in its own net; a policy with its parameters acts in the same way."""
    spec = envs.describe("shoal/Catch-v0", observation="pixels")
    algorithm = es.ES(es.Config(**SMALL, reference_batch=16, sigma=0.1), spec, NetConfig(), 6)
    learn, members, policy = algorithm.learn(0), algorithm.members(0, 6), algorithm.policy()
    pixels = np.random.default_rng(0).integers(0, 2, (22, 1, 10, 5), np.uint8) * 255
    assert learn.reference_wanted == 16
    learn.refer_to(pixels[:16])
    assert learn.reference_wanted == 0
    published = learn.published(progress(0))
    members.load(published)
    members.perturb(0, np.array([0, 1, 2, 3, 3, 5]))
    with torch.inference_mode():
        together = members.copies(torch.from_numpy(pixels[16:]))
        for row in range(6):
            policy.load({**published, "params": members.copies.params[row].numpy()})
            alone = policy.model.net(torch.from_numpy(pixels[16 + row : 17 + row]))
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)
            cnn, seen = policy.model.net.torso.cnns[0], []
            cnn.dense.register_forward_hook(lambda layer, given, y, seen=seen: seen.append(y - layer.layer.bias))
            cnn(policy.reference)
            assert seen[0].mean(0).abs().max() < 1e-4 and seen[0].std(0, correction=0).sub(1).abs().max() < 0.02


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_members_are_mirrored(env):
    """Members are the parameters plus and minus their noise."""
    algorithm = made(env, sigma=0.5)
    learn, members, policy = algorithm.learn(3), algorithm.members(3, 6), algorithm.policy()
    published = learn.published(progress(4))
    members.load(published)
    members.perturb(4, np.arange(6))
    table, rng = learn.table, torch.Generator()
    slices = [table.slice(int(index)) for index in draw_indices(3, 4, np.arange(3), table)]
    view = StepView(np.random.default_rng(0).standard_normal((6, *algorithm.plan.spec.observation_space.shape)).astype(np.float32),
                    np.zeros(6, bool))
    actions = members.act(view, rng)
    for number in range(6):
        sign = 1 if number % 2 == 0 else -1
        policy.load({**published, "params": (learn.model.params + sign * 0.5 * slices[number // 2]).numpy()})
        np.testing.assert_allclose(policy.act(view, {}, None, rng)[0][number], actions[number], rtol=1e-4, atol=1e-5)


def test_gradient_of_the_published_code():
    """The gradient is that of the published code."""
    learn = made(weight_decay=0.005).learn(2)
    scores = np.array([10.0, -3, 5, 7, 0, 1])
    gradient, metrics = update(learn, scores, iteration=3)
    ranks = (np.argsort(np.argsort(scores)) / 5 - 0.5).reshape(-1, 2)
    noise = np.stack([learn.table.slice(int(i)).numpy() for i in draw_indices(2, 3, np.arange(3), learn.table)])
    expected = -((ranks[:, 0] - ranks[:, 1]) @ noise) / 6 + 0.005 * learn.model.params.numpy()
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    assert metrics["population_best"] == 10 and set(metrics) <= {metric.name for metric in made().metrics}


def test_weight_decay_pulls_towards_zero():
    learn = made(weight_decay=0.1, optimiser="sgd", lr=1.0, shaping="raw").learn(2)
    before = learn.model.params.clone()
    learn.apply(update(learn, np.zeros(6))[0], "all")
    torch.testing.assert_close(learn.model.params, 0.9 * before)


def test_momentum():
    """Momentum keeps a share of the last direction."""
    learn = made(optimiser="sgd", momentum=0.9, lr=1.0, weight_decay=0.0).learn(2)
    before = learn.model.params.clone()
    learn.anneal(progress(0))
    gradient = np.ones(learn.model.params.numel(), np.float32)
    learn.apply(gradient, "all")
    learn.apply(gradient, "all")
    torch.testing.assert_close(before - learn.model.params, torch.full_like(before, 0.1 + 0.19))
    assert learn.apply(gradient * np.nan, "all") is False and float(learn.state["velocity"][0]) == pytest.approx(0.19)


def test_episode_limit_grows():
    """The episode limit grows when enough members reach it."""
    learn = made(episode_limit=10, limit_share=0.5, limit_growth=1.5).learn(0)
    update(learn, np.zeros(6), np.array([10, 10, 3, 3, 3, 3]))
    assert learn.longest_episode == 10
    update(learn, np.zeros(6), np.array([10, 10, 10, 3, 3, 3]))
    assert learn.longest_episode == 15
    update(unlimited := made().learn(0), np.zeros(6), np.full(6, 500))
    assert unlimited.longest_episode == 500


def test_the_whole_state_is_saved_and_bound():
    one, other = (made(optimiser="sgd", momentum=0.5).learn(seed) for seed in (1, 2))
    arrays = {name: tensor.numpy().copy() for name, tensor in one.state.items()}
    other.bind(arrays)
    other.apply(np.ones(other.model.params.numel(), np.float32), "all")
    np.testing.assert_array_equal(arrays["params"], other.published(progress(0))["params"])
    assert arrays["velocity"].any()


def test_the_noise_is_one_file_that_all_map():
    first, second = NoiseTable(1000, 10), NoiseTable(1000, 10)
    assert first.fingerprint == second.fingerprint and float(first.values.std()) == pytest.approx(1, abs=0.1)
    many = draw_indices(1, 2, np.arange(10_000), first)
    np.testing.assert_array_equal(draw_indices(1, 2, np.array([3, 1, 7]), second), many[[3, 1, 7]])  # whoever asks for how many
    assert many.max() == 990


def test_noise_table_without_a_folder(monkeypatch, tmp_path):
    """A table in a folder that cannot be written is private."""
    (tmp_path / "file").write_text("")
    shared = NoiseTable(1000, 10).fingerprint
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file" / "below"))
    assert NoiseTable(1000, 10).fingerprint == shared


@pytest.mark.parametrize(("values", "words"), [
    ({"population": 5}, "population 5 is odd"), ({"momentum": 0.5}, "--algorithm.optimiser sgd"), ({"sigma": 0}, "sigma is 0"),
    ({"limit_growth": 1}, "limit-growth is 1"),
])
def test_values_that_clash_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        made(**values)


def test_what_cannot_be_played_is_refused():
    with pytest.raises(ConfigError, match="noise-size 10 is less"):
        made(noise_size=10).learn(0)
    with pytest.raises(ConfigError, match="has no memory"):
        made(net=NetConfig(recurrent="lstm")).policy()
    with pytest.raises(ConfigError, match="reference-batch 8 normalises convolutional layers"):
        made(reference_batch=8).policy()
    with pytest.raises(ConfigError, match="2 agents"):
        es.ES(es.Config(), replace(envs.describe("CartPole-v1"), seats_per_env=2), NetConfig(), 4)
    assert isinstance(made(), Evolves)
