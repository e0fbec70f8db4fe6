"""PPO and value-clip rows of policy.md section 14, normalisation of 3e, and the masked-row property of 6e."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.ops import losses

PPO_ROWS = [
    # ratio, advantage, PPO objective (blocked), Sample Factory objective (blocked)
    (0.7, 2.0, (1.4, False), (1.4, False)),
    (0.7, -2.0, (-1.6, True), (-1.8182, True)),
    (0.9, -2.0, (-1.8, False), (-1.8182, True)),
    (1.1 - 1e-9, 2.0, (2.2, False), (2.2, False)),
    (1.3, 2.0, (2.4, True), (2.2, True)),
    (1.3, -2.0, (-2.6, False), (-2.6, False)),
]


@pytest.mark.parametrize("ratio, advantage, ppo, sf", PPO_ROWS)
def test_ppo_golden(ratio, advantage, ppo, sf):
    for (want, blocked), (lower, upper) in ((ppo, (0.8, 1.2)), (sf, (1 / 1.1, 1.1))):
        x = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
        loss = losses.ppo_clip_loss(x, torch.tensor(advantage, dtype=torch.float64), lower, upper)
        assert -loss.item() == pytest.approx(want, abs=5e-5)
        loss.backward()
        assert float(x.grad) == pytest.approx(0 if blocked else -advantage)


def test_value_clip_golden():
    one = torch.tensor
    loss = losses.value_loss(one(1.6), one(2.0), one(1.0), 0.2)
    assert float(2 * loss) == pytest.approx(0.64)
    assert float(2 * losses.value_loss(one(1.6), one(2.0))) == pytest.approx(0.16)
    with pytest.raises(ValueError, match="old_v_tm1"):
        losses.value_loss(one(1.6), one(2.0), clip=0.2)


@pytest.mark.parametrize(
    "ddof, want", [(0, [0.4472, -1.3416, 1.3416, -0.4472]), (1, [0.3873, -1.1619, 1.1619, -0.3873])]
)
def test_normalised_advantages_golden(ddof, want):
    x = torch.tensor([1.0, -1.0, 2.0, 0.0])
    got = losses.normalise(x, *losses.masked_mean_std(x, ddof=ddof))
    torch.testing.assert_close(got, torch.tensor(want), atol=5e-5, rtol=0)
    assert abs(float(got.mean())) < 1e-6
    assert torch.equal(losses.normalise(torch.ones(3), 1.0, 0.0), torch.zeros(3))


def test_policy_gradient_alone():
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage = torch.tensor([3.0, -1.0], requires_grad=True)
    losses.masked_sum(losses.policy_gradient_loss(log_prob, advantage)).backward()
    assert log_prob.grad.tolist() == [-3.0, 1.0]
    assert advantage.grad is None


def test_reduction():
    """Doubling B doubles the summed gradient and leaves the mean's unchanged."""
    grads = {}
    for B in (4, 8):
        for reduce in (losses.masked_sum, losses.masked_mean):
            w = torch.tensor(1.0, requires_grad=True)
            reduce(losses.policy_gradient_loss(w * torch.ones(5, B), torch.ones(5, B))).backward()
            grads[reduce.__name__, B] = float(w.grad)
    assert grads["masked_sum", 8] == 2 * grads["masked_sum", 4]
    assert grads["masked_mean", 8] == pytest.approx(grads["masked_mean", 4])


def test_on_policy_ratio_is_one():
    log_prob = torch.randn(5, 3)
    ratio = losses.importance_ratio(log_prob, log_prob)
    assert torch.equal(ratio, torch.ones(5, 3))
    assert float(losses.clip_fraction(ratio, 0.8, 1.2)) == 0
    assert torch.equal(losses.approx_kl(log_prob, log_prob), torch.zeros(5, 3))
    clamped = losses.importance_ratio(torch.tensor([9.0, -9.0]), torch.zeros(2), 0.05, 20.0)
    torch.testing.assert_close(clamped, torch.tensor([20.0, 0.05]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8))
def test_approx_kl(logs):
    x = torch.tensor(logs, dtype=torch.float64)
    got = losses.approx_kl(x, torch.zeros_like(x))
    torch.testing.assert_close(got, (x.exp() - 1) - x)
    assert bool((got >= 0).all())


def test_explained_variance():
    target = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert float(losses.explained_variance(target, target)) == 1
    assert float(losses.explained_variance(torch.full((4,), 2.5), target)) == pytest.approx(0)
    assert torch.isnan(losses.explained_variance(target, torch.ones(4)))
    valid = torch.tensor([1, 1, 1, 0])
    assert float(losses.explained_variance(torch.tensor([1.0, 2.0, 3.0, 99.0]), target, valid)) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 5), st.integers(0, 2**31))
def test_masked_rows_change_nothing(T, B, extra, seed):
    """policy.md 6e: rows with valid = 0 change neither loss, statistics nor any gradient."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(T, n, generator=g, dtype=torch.float64)  # noqa: E731
    old, log_prob, advantage, v, target = (draw(B) for _ in range(5))
    junk = [draw(extra) * 1e3 for _ in range(5)]
    valid = torch.cat([torch.ones(T, B), torch.zeros(T, extra)], 1)
    results = []
    for padded in (False, True):
        p, o, a, value, y = (
            torch.cat([x, j], 1) if padded else x
            for x, j in zip((log_prob, old, advantage, v, target), junk, strict=True)
        )
        mask = valid if padded else None
        p, value = p.clone().requires_grad_(True), value.clone().requires_grad_(True)
        a = losses.normalise(a, *losses.masked_mean_std(a, mask))
        ratio = losses.importance_ratio(p, o, 0.05, 20.0)
        loss = losses.masked_mean(losses.ppo_clip_loss(ratio, a, 1 / 1.1, 1.1), mask)
        loss = loss + losses.masked_sum(losses.value_loss(value, y, y + 0.1, 1.0), mask)
        loss.backward()
        results.append((loss.detach(), p.grad[:, :B], value.grad[:, :B]))
        if padded:
            assert not p.grad[:, B:].any() and not value.grad[:, B:].any()
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_masked_mean_of_nothing():
    assert float(losses.masked_mean(torch.tensor([torch.nan]), torch.tensor([False]))) == 0
