"""Against torch.distributions, closed forms, frequencies, and value.md T22."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as td

from shoal.ops import distributions as dist


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("A", [1, 2, 6, 15, 16, 40])
@pytest.mark.parametrize("lead", [(7,), (3, 5)])
def test_categorical_against_torch(A, lead):
    logits, other = torch.randn(*lead, A), torch.randn(*lead, A)
    action = torch.randint(A, lead)
    ref = td.Categorical(logits=logits)
    torch.testing.assert_close(dist.categorical_log_prob(logits, action), ref.log_prob(action))
    torch.testing.assert_close(dist.categorical_entropy(logits), ref.entropy())
    want = td.kl_divergence(ref, td.Categorical(logits=other))
    torch.testing.assert_close(dist.categorical_kl(logits, other), want, atol=1e-6, rtol=1e-5)
    assert torch.equal(dist.categorical_mode(logits), logits.argmax(-1))
    torch.testing.assert_close(dist.log_softmax(logits), torch.log_softmax(logits, -1))


def test_log_softmax_gradient_on_both_paths():
    for A in (5, 20):
        x = torch.randn(4, 3, A, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(dist.log_softmax, (x,))
    assert dist.log_softmax(torch.zeros(4)).shape == (4,)


def frequencies(actions, A):
    return torch.bincount(actions.reshape(-1), minlength=A) / actions.numel()


@pytest.mark.parametrize("B", [8, 1024])
def test_categorical_sampling(B):
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = p.log().expand(B, 4)
    g = seeded()
    draws = torch.stack([dist.categorical_sample(logits, g) for _ in range(40_000 // B)])
    assert float((frequencies(draws, 4) - p).abs().max()) < 0.012
    again = torch.stack([dist.categorical_sample(logits, h) for h in [seeded()] for _ in range(3)])
    assert torch.equal(draws[:3], again)
    state = torch.get_rng_state()
    dist.categorical_sample(logits, g)
    assert torch.equal(state, torch.get_rng_state())  # the global generator is never touched


def test_masked_actions_do_not_exist():
    logits = torch.randn(4096, 5, requires_grad=True)
    mask = torch.rand(4096, 5, generator=seeded()) < 0.4
    mask[:, 2] |= ~mask.any(-1)
    masked = dist.mask_logits(logits, mask)
    g = seeded(1)
    for _ in range(5):
        action = dist.categorical_sample(masked, g)
        assert bool(mask.gather(1, action[:, None]).all())
    assert bool(mask.gather(1, dist.categorical_mode(masked)[:, None]).all())
    want = torch.stack(
        [td.Categorical(logits=row[keep]).entropy() for row, keep in zip(logits[:64], mask, strict=False)]
    )
    torch.testing.assert_close(dist.categorical_entropy(masked)[:64], want)
    loss = dist.categorical_entropy(masked).sum() + dist.categorical_log_prob(masked, action).sum()
    loss.backward()
    assert bool(torch.isfinite(logits.grad).all())
    assert not logits.grad[~mask].any()
    assert not dist.categorical_kl(masked, masked).isnan().any()


def test_single_legal_action(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))
    mask = torch.tensor([[False, True, False]])
    logits = dist.mask_logits(torch.tensor([[50.0, -50.0, 50.0]]), mask)
    assert dist.categorical_sample(logits).tolist() == [1]
    assert float(dist.categorical_entropy(logits)) == 0


def test_mix_uniform_by_hand():
    logits = torch.tensor([[0.8, 0.2, 0.5], [0.8, 0.2, 0.5], [0.8, 0.2, 0.5]]).log()
    mask = torch.tensor([[True, True, False]]).expand(3, 3)
    mixed = dist.mix_uniform(dist.mask_logits(logits, mask), torch.tensor([0.0, 0.3, 1.0]))
    want = torch.tensor([[0.8, 0.2, 0.0], [0.7 * 0.8 + 0.15, 0.7 * 0.2 + 0.15, 0.0], [0.5, 0.5, 0.0]])
    torch.testing.assert_close(mixed.exp(), want)
    torch.testing.assert_close(dist.mix_uniform(logits, torch.tensor([0.0, 0.3, 1.0]), mask), mixed)
    torch.testing.assert_close(dist.mix_uniform(logits, 0.3, mask)[1], mixed[1])
    # The result is a set of logits: normalising it changes nothing.
    torch.testing.assert_close(dist.log_softmax(mixed)[mask], mixed[mask])
    assert float(dist.mix_uniform(torch.tensor([[0.0, -200.0]]), torch.tensor([0.0]))[0, 1]) == -200.0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(0, 2**31), st.floats(0, 1))
def test_mix_uniform_is_its_formula(A, seed, m):
    logits = torch.randn(3, A, generator=seeded(seed), dtype=torch.float64)
    mask = torch.rand(3, A, generator=seeded(seed + 1)) < 0.7
    mask[:, 0] |= ~mask.any(-1)
    p = torch.softmax(logits.masked_fill(~mask, -math.inf), -1)
    want = (1 - m) * p + m * mask / mask.sum(-1, keepdim=True)
    torch.testing.assert_close(dist.mix_uniform(logits, torch.full((3,), m).double(), mask).exp(), want)


@pytest.mark.parametrize("nvec", [(3, 3), (2, 5, 4)])
def test_multi_categorical_is_a_product(nvec):
    logits, other = torch.randn(2, 6, sum(nvec)), torch.randn(2, 6, sum(nvec))
    action = dist.multi_categorical_sample(logits, nvec, seeded())
    assert action.shape == (2, 6, len(nvec))
    assert bool((action < torch.tensor(nvec)).all())
    parts, others = logits.split(list(nvec), -1), other.split(list(nvec), -1)
    refs = [td.Categorical(logits=part) for part in parts]
    want = sum(ref.log_prob(action[..., i]) for i, ref in enumerate(refs))
    torch.testing.assert_close(dist.multi_categorical_log_prob(logits, nvec, action), want)
    torch.testing.assert_close(dist.multi_categorical_entropy(logits, nvec), sum(ref.entropy() for ref in refs))
    kl = sum(td.kl_divergence(p, td.Categorical(logits=q)) for p, q in zip(refs, others, strict=True))
    torch.testing.assert_close(dist.multi_categorical_kl(logits, other, nvec), kl, atol=1e-5, rtol=1e-5)
    assert dist.multi_categorical_mode(logits, nvec)[..., 1].equal(parts[1].argmax(-1))


@pytest.mark.parametrize("state_dependent", [False, True])
def test_gaussian_against_torch(state_dependent):
    mean, other = torch.randn(5, 3), torch.randn(5, 3)
    log_std = torch.randn(5, 3) if state_dependent else torch.randn(3)
    other_log_std = torch.randn(3)
    action = dist.gaussian_sample(mean, log_std, seeded())
    ref = td.Independent(td.Normal(mean, log_std.exp().expand(5, 3)), 1)
    torch.testing.assert_close(dist.gaussian_log_prob(mean, log_std, action), ref.log_prob(action))
    torch.testing.assert_close(dist.gaussian_entropy(mean, log_std), ref.entropy())
    second = td.Independent(td.Normal(other, other_log_std.exp().expand(5, 3)), 1)
    torch.testing.assert_close(dist.gaussian_kl(mean, log_std, other, other_log_std), td.kl_divergence(ref, second))
    assert torch.equal(dist.gaussian_sample(mean, log_std, seeded()), action)
    many = dist.gaussian_sample(torch.full((20_000, 1), 2.0), torch.tensor([0.5]).log(), seeded())
    assert abs(float(many.mean()) - 2) < 0.02 and abs(float(many.std()) - 0.5) < 0.02


def test_tanh_gaussian_golden():
    """value.md T22: m 0, sigma 1, u 0.5."""
    mean, log_std, u = torch.zeros(1).double(), torch.zeros(1).double(), torch.tensor([0.5]).double()
    action = torch.tanh(u)
    assert float(action) == pytest.approx(0.46211716, abs=1e-8)
    assert float(dist.gaussian_log_prob(mean, log_std, u)) == pytest.approx(-1.04393853, abs=1e-8)
    assert float(dist.tanh_gaussian_log_prob(mean, log_std, action)) == pytest.approx(-0.80370952, abs=1e-8)


def test_tanh_gaussian_against_torch():
    mean, log_std = torch.randn(6, 2).double(), torch.full((2,), -0.5).double()
    u = dist.gaussian_sample(mean, log_std, seeded())
    ref = td.TransformedDistribution(td.Normal(mean, log_std.exp().expand(6, 2)), [td.TanhTransform()])
    want = ref.log_prob(torch.tanh(u)).sum(-1)
    torch.testing.assert_close(dist.tanh_gaussian_latent_log_prob(mean, log_std, u), want)
    torch.testing.assert_close(dist.tanh_gaussian_log_prob(mean, log_std, torch.tanh(u)), want)


def test_tanh_gaussian_at_the_edge():
    """Finite where tanh has rounded to 1, with and without the latent action."""
    far = torch.full((3, 2), 40.0, requires_grad=True)
    log_prob = dist.tanh_gaussian_latent_log_prob(far, torch.zeros(2), dist.gaussian_sample(far.detach(), torch.zeros(2), seeded()))
    log_prob.sum().backward()
    assert bool(torch.isfinite(log_prob).all()) and bool(torch.isfinite(far.grad).all())
    assert bool(torch.isfinite(dist.tanh_gaussian_log_prob(far.detach(), torch.zeros(2), torch.ones(3, 2))).all())


def test_tanh_gaussian_latent_density():
    """Literals: u = 10, mean 9.5, std 1. log N = -1.04393853, log slope = 2 (log 2 - 10 - log(1 + e^-20)) = -18.61370564."""
    mean, log_std, u = torch.full((1,), 9.5), torch.zeros(1), torch.full((1,), 10.0)
    assert float(dist.tanh_gaussian_latent_log_prob(mean, log_std, u)) == pytest.approx(-1.04393853 + 18.61370564, abs=1e-5)
    far = torch.tensor([300.0], requires_grad=True)
    log_prob = dist.tanh_gaussian_latent_log_prob(far, log_std, torch.full((1,), 301.0))
    log_prob.backward()
    assert float(far.grad) == pytest.approx(1.0), "the score of a Gaussian, however flat tanh is"
    rounded = dist.tanh_gaussian_log_prob(mean, log_std, torch.tanh(u))
    assert abs(float(rounded) - 17.56976711) > 1, "float32 holds tanh(10) as 1: the action alone does not tell its density"


def tanh_entropy_by_brute_force(mean, log_std):
    z = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
    u = mean + log_std.exp() * z
    weight = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    return log_std + 0.5 + 0.5 * math.log(2 * math.pi) + (weight * torch.log1p(-torch.tanh(u).square().clamp(max=1 - 1e-16))).sum()


@pytest.mark.parametrize(("mean", "log_std", "entropy", "slopes"), [
    (0.0, 0.0, 0.66980412, (0.0, -0.21141102)), (1.0, -1.0, -0.50777280, (-1.44063274, 0.87804325)),
    (0.3, 2.5, -14.19485539, (-0.03918442, -18.38104639))])
def test_tanh_gaussian_entropy_golden(mean, log_std, entropy, slopes):
    """Values and derivatives with respect to mean and log std, by 400,001 points in float64. 61 points give -0.0495 at 2.5."""
    values = torch.tensor([mean], requires_grad=True), torch.tensor([log_std], requires_grad=True)
    found = dist.tanh_gaussian_entropy(*values)
    assert float(found.detach()) == pytest.approx(entropy, rel=1e-6)
    for found_slope, slope in zip(torch.autograd.grad(found, values), slopes, strict=True):
        assert float(found_slope) == pytest.approx(slope, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("log_std", [-8.0, -2.0, -0.01, 0.01, 1.0])
@pytest.mark.parametrize("mean", [0.0, -0.7, 3.0])
def test_tanh_gaussian_entropy(mean, log_std):
    values = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (mean, log_std)]
    found, want = dist.tanh_gaussian_entropy(*values), tanh_entropy_by_brute_force(*values)
    torch.testing.assert_close(found.detach(), want.detach().reshape(()), rtol=0, atol=1e-7)
    for one, other in zip(torch.autograd.grad(found, values), torch.autograd.grad(want, values), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_tanh_gaussian_entropy_saturated():
    """Far out the slope is 4 e^-2u, so the entropy is that of the Gaussian plus 2 log 2 - 2 |mean|; any shape, shared std."""
    mean, log_std = torch.tensor([[40.0, -40.0], [90.0, 25.0]]), torch.tensor([0.3, -1.0])
    want = dist.gaussian_entropy(mean, log_std) + 4 * math.log(2) - 2 * mean.abs().sum(-1)
    torch.testing.assert_close(dist.tanh_gaussian_entropy(mean, log_std), want)
