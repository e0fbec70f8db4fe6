"""CURL as a part of dqn and sac: one step with both gradients, keys without any, what is cropped, what is refused."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal import algorithms, cli, envs
from shoal.acting import Progress
from shoal.algorithms import curl
from shoal.algorithms.common.contrast import ENCODER
from shoal.errors import ConfigError
from shoal.learning import DeviceLearn, EncodedLearn, ReplayLearn
from shoal.nets import NetConfig
from shoal.ops import contrast as ops
from shoal.slots import map_tree
from tests.algorithms.replay_loop import Actor, batch_of

NET = NetConfig(hidden=(16,), activation="relu")
CATCH = "shoal/PixelCatch-v0"
RAINBOW = curl.CURLDiscreteOptions(atoms=11, noisy_sigma=0.1, n_step=3, dueling=True, dueling_hidden=8, importance=0.5)


class Drawing(gym.Env):
    """A point that is pushed about, drawn as two frames with their channels last."""

    observation_space, action_space = gym.spaces.Box(0, 255, (14, 14, 2), np.uint8), gym.spaces.Box(-2.0, 2.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.age = self.np_random.uniform(-1, 1, 2), 0
        return self.drawn(self.at), {}

    def step(self, action):
        before, self.age = self.at, self.age + 1
        self.at = np.clip(self.at + 0.2 * np.asarray(action), -1, 1)
        return self.drawn(before), -float(np.abs(self.at).sum()), self.age >= 8, False, {}

    def drawn(self, before):
        frames = np.zeros((14, 14, 2), np.uint8)
        for frame, (x, y) in enumerate((before, self.at)):
            frames[int(6 + 4 * x), int(6 + 4 * y), frame] = 255
        return frames


def made(config=None, env=CATCH, steps=40):
    algorithm = algorithms.make(config or curl.Config(code_size=8), envs.describe(env), NET, 4)
    learn, actor = algorithm.learn(3), Actor(algorithm, envs.make(env, 4), 5)
    actor.policy.load(learn.published(Progress()))
    actor.play(steps)
    return algorithm, learn, batch_of(actor.items()[0])


def minibatch_of(learn, batch, seed=0):
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(seed))
    return minibatch


def updated(learn, batch, count=1):
    for seed in range(count):
        minibatch = minibatch_of(learn, batch, seed)
        for phase in learn.phases:
            gradient, metrics = learn.gradients(minibatch, phase)
            assert len(gradient) == learn.span(phase).stop - learn.span(phase).start and learn.apply(gradient, phase)
    return metrics


CASES = {"dqn": (curl.Config(code_size=8), CATCH), "rainbow": (curl.Config(code_size=8, crop_all=False, projection=(12, 6),
         logit_scale=0.1, dqn=RAINBOW), CATCH), "sac": (curl.Config(code_size=8), Drawing)}


@pytest.fixture(params=CASES)
def case(request):
    return made(*CASES[request.param])


def test_gradient_of_both_losses(case):
    """The encoder's gradient is that of both losses together."""
    algorithm, learn, batch = case
    updated(learn, batch)  # so that key encoder and encoder differ
    minibatch, main = minibatch_of(learn, batch), learn.phases[0]
    parts = list(learn.model.representation.parameters())
    total = learn.loss(minibatch, main).loss + algorithm.contrast.loss(learn.model, learn.target, minibatch).loss
    want = torch.autograd.grad(total, parts, allow_unused=True)
    gradients = {phase: learn.gradients(minibatch, phase)[0].copy() for phase in learn.phases}
    start = 0
    for part, one in zip(parts, want, strict=True):
        flat = one if part.dim() != 4 else one.permute(0, 2, 3, 1)  # channels-last in the vector
        np.testing.assert_allclose(gradients[ENCODER][start : start + part.numel()], flat.reshape(-1).numpy(), rtol=1e-4, atol=1e-6)
        start += part.numel()
    assert start == len(gradients[ENCODER]) and np.abs(gradients[ENCODER]).max() > 1e-4


def test_keys_follow_by_momentum(case):
    """Keys have no gradient and follow by their momentum."""
    _, learn, batch = case
    span = learn.span(ENCODER)
    before = learn.state["target"][span].clone()
    updated(learn, batch, 2)
    assert all(p.grad is None for p in learn.target.representation.parameters())
    if "critic" in learn.phases:  # the paper's: every second update
        want = before.lerp(learn.state["params"][span], 0.05)
        torch.testing.assert_close(learn.state["target"][span], want, rtol=0, atol=1e-6)
    assert (learn.state["target"][span] != before).any()


@pytest.mark.parametrize(("momentum", "same_as"), [(0.0, "params"), (1.0, "first")])
def test_keys_at_both_extremes(momentum, same_as):
    """Keys that are the query encoder and keys that never move."""
    _, learn, batch = made(curl.Config(code_size=8, key_momentum=momentum))
    span = learn.span(ENCODER)
    known = {"first": learn.state["target"][span].clone()}
    updated(learn, batch, 3)
    known["params"] = learn.state["params"][span]
    torch.testing.assert_close(learn.state["target"][span], known[same_as], rtol=0, atol=0)


def test_detached_encoder():
    """A detached encoder learns from contrast alone."""
    _, learn, batch = made(curl.Config(code_size=8, detached=True))
    alone = algorithms.make(curl.Config(code_size=8), envs.describe(CATCH), NET, 4).representation(3)
    for seed in range(3):
        minibatch = minibatch_of(learn, batch, seed)
        crops = {**map_tree(np.asarray, learn.contrasted(minibatch)), "weight": np.asarray(minibatch.weight)}
        for phase in learn.phases:
            learn.apply(learn.gradients(minibatch, phase)[0], phase)
        (same,) = alone.minibatches(crops, np.zeros(0), Progress(), np.random.default_rng(0))
        alone.apply(alone.gradients(same, ENCODER)[0], ENCODER)
    torch.testing.assert_close(alone.state["params"], learn.state["params"][learn.span(ENCODER)], rtol=0, atol=0)


def test_encoder_that_never_learns():
    """Without contrast a detached encoder stays as it began."""
    _, learn, batch = made(curl.Config(code_size=8, detached=True, contrast=0.0))
    first = learn.state["params"].clone()
    updated(learn, batch, 3)
    span = learn.span(ENCODER)
    assert torch.equal(learn.state["params"][span], first[span])
    assert not torch.equal(learn.state["params"][span.stop :], first[span.stop :])


def test_two_learners_equal_one(case):
    """In every phase, the encoder's too: the mean of their gradients is that of one learner with both halves of the batch."""
    algorithm, one, batch = case
    two = [algorithm.learn(3) for _ in range(2)]
    for learn in two:
        learn.anneal(Progress())  # learning rates
    count = 2 * (len(batch["reward"]) // 2)
    batch = {name: part[:count] if len(part) > 1 else part for name, part in batch.items()}
    for seed in range(3):
        whole = minibatch_of(one, batch, seed)
        halves = [cut(whole, slice(k * count // 2, (k + 1) * count // 2)) for k in range(2)]
        for phase in one.phases:
            expected, metrics = one.gradients(whole, phase)
            told = sum(learn.told(half, phase, k, 2) for k, (learn, half) in enumerate(zip(two, halves, strict=True)))
            assert (told.size > 0) == (phase == "encoder") and told.nbytes <= one.told_bytes(count // 2, 2)
            if told.size:
                halves = [learn.with_told(half, told, k, 2) for k, (learn, half) in enumerate(zip(two, halves, strict=True))]
            found = [learn.gradients(half, phase) for learn, half in zip(two, halves, strict=True)]
            mean = np.mean([gradient for gradient, _ in found], 0)
            np.testing.assert_allclose(mean, expected, rtol=1e-3, atol=1e-5, err_msg=phase)
            if told.size:
                parts = [numbers["contrast_loss"] for _, numbers in found]
                assert np.mean(parts) == pytest.approx(metrics["contrast_loss"], rel=1e-4) and metrics["contrast_loss"] > 0.1
            for learn in (one, *two):
                learn.apply(expected.copy(), phase)


def cut(minibatch, rows):
    """The part of one of two learners."""
    items = {name: part[rows] for name, part in minibatch.items.items()}
    noise = getattr(minibatch, "noise", None)
    own = {} if noise is None or len(noise) != len(minibatch.weight) else {"noise": noise[rows]}
    return replace(minibatch, items=items, weight=minibatch.weight[rows], scale=2 * minibatch.scale, **own)


def test_a_learner_that_is_not_there():
    """Its place holds no keys: the others make the update of their own batch."""
    algorithm, one, batch = made()
    minibatch, other = minibatch_of(one, batch), algorithm.learn(3)
    for learn in (one, other):
        learn.gradients(minibatch, "head")
    alone = other.with_told(minibatch, other.told(minibatch, "encoder", 1, 3), 1, 3)
    expected, found = (learn.gradients(given, "encoder")[0] for learn, given in ((one, minibatch), (other, alone)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_crops_are_made_once():
    """Crops are made once and the query is the algorithm's own view."""
    algorithm, learn, batch = made()
    items = minibatch_of(learn, batch).items
    rng = np.random.default_rng(0)
    want = [ops.crop(batch[name], ops.random_offsets(rng, len(batch["reward"]), 28, 28, 24), 24)
            for name in ("observation", "observation", "next_observation")]
    for name, crop in zip(("observation", "key_view", "next_observation"), want, strict=True):
        assert np.array_equal(items[name].numpy(), crop)
    assert algorithm.contrast.compared(items)["query"] is items["observation"]
    assert not np.array_equal(want[0], want[1]), "anchor and key are cropped apart"
    _, rainbow, batch = made(CASES["rainbow"][0])
    items = minibatch_of(rainbow, batch).items
    assert items["observation"].shape[-1] == 28 and items["query"].shape[-1] == items["key_view"].shape[-1] == 24


def test_policies_see_the_centre(case):
    """Policies see the centre and get no comparison."""
    algorithm, learn, batch = case
    updated(learn, batch)
    policy = algorithm.policy()
    policy.load(learn.published(Progress()))
    size = learn.model.representation.compared_size
    assert size > 0 and torch.equal(policy.model.params, learn.state["params"][size : size + policy.model.params.numel()])
    images = torch.from_numpy(batch["observation"])
    side = algorithm.contrast.config.crop
    centre = ops.centre_crop(images.permute(0, 3, 1, 2), side).permute(0, 2, 3, 1) if images.shape[-1] == 2 \
        else ops.centre_crop(images, side)
    with torch.no_grad():
        torch.testing.assert_close(policy.model.see(images), learn.model.see(centre), rtol=0, atol=0)


def test_priorities_of_value_errors():
    _, learn, batch = made(CASES["rainbow"][0])
    minibatch = minibatch_of(learn, batch)
    learn.gradients(minibatch, "head")
    before = learn.priorities.copy()
    learn.gradients(minibatch, ENCODER)
    assert np.array_equal(learn.priorities, before)


def test_loss_that_is_not_finite():
    """A loss that is not finite leaves the encoder alone too."""
    _, learn, batch = made()
    batch["reward"][:] = np.nan
    minibatch, first = minibatch_of(learn, batch), learn.state["params"].clone()
    for phase in learn.phases:
        assert not learn.apply(learn.gradients(minibatch, phase)[0], phase)
    assert torch.equal(learn.state["params"], first)


def test_encoder_elsewhere():
    """A learn with its encoder elsewhere has the same parts and a gradient to share."""
    algorithm, learn, batch = made()
    apart = algorithm.apart(shared=True).learn(3)
    assert isinstance(apart, ReplayLearn) and isinstance(apart, DeviceLearn) and apart.phases == ("head",)
    encoded: EncodedLearn = apart
    assert torch.equal(apart.state["params"], learn.state["params"])
    gradient, _ = apart.gradients(minibatch_of(apart, batch), "head")
    want, _ = learn.gradients(minibatch_of(learn, batch), "head")
    assert np.array_equal(gradient, want) and np.abs(encoded.encoder_gradient).max() > 0
    alone = algorithm.representation(3)
    assert torch.equal(alone.state["params"], learn.state["params"][learn.span(ENCODER)])
    detached = algorithm.apart(shared=False).learn(3)
    detached.gradients(minibatch_of(detached, batch), "head")
    assert np.abs(detached.encoder_gradient).max() == 0


def test_contrast_is_learned():
    """On a fixed batch of different boards a crop is soon found again."""
    _, learn, batch = made(steps=20)
    _, different = np.unique(batch["observation"].reshape(len(batch["reward"]), -1), axis=0, return_index=True)
    batch = {name: value if name == "table_size" else map_tree(lambda x: x[different], value) for name, value in batch.items()}
    first, last = updated(learn, batch), updated(learn, batch, 150)
    assert last["contrast_loss"] < 0.7 * first["contrast_loss"] and last["contrast_accuracy"] > first["contrast_accuracy"]


@pytest.mark.parametrize(("options", "sentence"), [
    (["CartPole-v1"], "it learns from crops of one image"),
    ([CATCH, "--algorithm.crop", "29"], "--algorithm.crop 29 is larger than the images of shoal/PixelCatch-v0, which are 28 x 28"),
    ([CATCH, "--algorithm.crop", "4"], "--algorithm.crop 4 is smaller than the encoder can read"),
    ([CATCH, "--algorithm.dqn.atoms", "1"], "--algorithm.dqn.atoms is 1"),
    ([CATCH, "--algorithm.key-momentum", "1.5"], "--algorithm.key-momentum is 1.5; it must be at least 0 and at most 1"),
    ([CATCH, "--algorithm.dqn.lr", "0"], "--algorithm.dqn.lr is 0.0; it must be above 0"),
])
def test_what_cannot_work(options, sentence, tmp_path, monkeypatch, capsys):
    """What cannot work is refused with one sentence."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "curl", *options, "--console.mode", "none"]) == 2
    assert sentence in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_actions_of_other_kinds_are_refused():
    spec = replace(envs.describe(CATCH), action_space=gym.spaces.MultiDiscrete([2, 2]))
    with pytest.raises(ConfigError, match="it takes dqn for Discrete actions and sac for Box actions"):
        algorithms.make("curl", spec, NET, 4)
