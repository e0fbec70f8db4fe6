"""The cross-entropy method: hand-worked steps, bounds, random numbers of each state's own, binary numbers, how near it comes."""

import pytest
import torch

from shoal.ops.cem import cem, cem_draw, cem_refit


def rows(*numbers):
    """One state, actions of one number."""
    return torch.tensor(numbers).view(1, -1, 1)


def test_T33_mean_and_deviation():
    """T33: the best draws give mean and deviation."""
    draws = rows(-1.0, -0.5, 0.0, 0.5, 0.8, 1.0)
    mean, std = cem_refit(draws, -(draws - 0.7).square().squeeze(2), 2)
    assert mean.item() == pytest.approx(0.65) and std.item() == pytest.approx(0.21213203, abs=1e-6), "the divisor is M - 1"


def test_T34_next_iteration():
    """T34: the next iteration is drawn around them and clipped."""
    noise = rows(-1.5, -0.5, 0.0, 0.5, 1.0, 2.0)
    draws = cem_draw(torch.tensor([[0.65]]), torch.tensor([[0.21213203]]), noise)
    expected = [0.33180195, 0.54393398, 0.65, 0.75606602, 0.86213203, 1.0]
    assert draws.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    values = -(draws - 0.7).square().squeeze(2)
    mean, std = cem_refit(draws, values, 2)
    assert (mean.item(), std.item()) == pytest.approx((0.70303301, 0.075), abs=1e-6)
    assert draws[0, values.argmax(), 0].item() == pytest.approx(0.65)


def test_clipped_before_evaluation():
    """Actions are clipped before they are evaluated."""
    seen = []

    def score(unit):
        seen.append(unit)
        return unit.sum(2)  # the best lies outside of the box

    best, value = cem(score, 5, 2, generator=torch.Generator().manual_seed(0))
    assert all(unit.abs().max() <= 1 for unit in seen) and len(seen) == 2
    assert torch.equal(best, torch.ones(5, 2)) and torch.equal(value, torch.full((5,), 2.0))


def test_states_share_no_random_numbers():
    seen = []

    def score(unit):
        seen.append(unit)
        return -unit.square().sum(2)

    cem(score, 8, 2, generator=torch.Generator().manual_seed(0))
    for unit in seen:
        inner = unit[..., 0].masked_fill(unit[..., 0].abs() == 1, torch.nan)  # bounds may coincide
        flat = inner[~inner.isnan()]
        assert len(flat.unique()) == len(flat), "a number was drawn for two states"


def test_optimum_of_each_state():
    """Quadratics around random points of [-0.8, 0.8]^3: the mean gap of 64/6/2 is below that of the best of 64, and of 16."""
    generator = torch.Generator().manual_seed(1)
    goal = torch.rand(300, 1, 3, generator=generator) * 1.6 - 0.8
    gaps = {}
    for name, options in {"64/6/2": {}, "64": {"iterations": 1}, "16": {"iterations": 1, "samples": 16}}.items():
        best, value = cem(lambda unit: -(unit - goal).square().sum(2), 300, 3, generator=generator, **options)
        assert torch.allclose(value, -(best - goal[:, 0]).square().sum(1))
        gaps[name] = -value.mean().item()
    assert gaps["64/6/2"] < 0.04 and 2 * gaps["64/6/2"] < gaps["64"] < gaps["16"]


def test_binary_numbers():
    """Binary numbers are on or off and follow the frequency among the best."""
    binary = torch.tensor([False, True])
    mean, std = torch.tensor([[0.0, 0.5]]), torch.tensor([[1.0, 0.3]])
    noise, chance = torch.zeros(1, 3, 2), torch.tensor([0.0, 0.7499, 0.75]).view(1, 3, 1).expand(1, 3, 2)
    draws = cem_draw(mean, std, noise, binary, chance)
    assert draws[0, :, 1].tolist() == [1.0, 1.0, -1.0], "1 with the probability (1 + 0.5) / 2"
    assert draws[0, :, 0].tolist() == [0.0, 0.0, 0.0]
    mean, _ = cem_refit(draws, torch.tensor([[3.0, 2.0, 1.0]]), 3)
    assert (1 + mean[0, 1].item()) / 2 == pytest.approx(2 / 3), "two of three of the best were on"
    best, _ = cem(lambda unit: unit[..., 1] - (unit[..., 0] - 0.3).abs(), 50, 2, binary=binary,
                  generator=torch.Generator().manual_seed(2))
    assert (best[:, 1] == 1).all() and (best[:, 0] - 0.3).abs().mean() < 0.05


def test_same_generator_same_actions():
    """The same generator gives the same actions."""
    one, other = (cem(lambda unit: unit.sum(2), 4, 3, generator=torch.Generator().manual_seed(3))[0] for _ in range(2))
    assert torch.equal(one, other)
