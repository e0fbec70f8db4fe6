"""T40 of specs/value.md, the projection against a plain loop, and properties."""

import math

import numpy as np
import pytest
import torch

from shoal.ops import c51


def t(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def project(support, probabilities, reward, discount):
    return c51.project(support, c51.moved(support, reward, discount), probabilities)


def literal(support, probabilities, reward, discount):
    """The paper's algorithm 1 for one transition: every atom's probability goes to the two atoms around its place."""
    low, high, width = support[0], support[-1], support[1] - support[0]
    spread = [0.0] * len(support)
    for z, p in zip(support, probabilities, strict=True):
        place = (min(max(reward + discount * z, low), high) - low) / width
        if abs(place - round(place)) < 1e-9:  # on an atom
            spread[round(place)] += p
        else:
            spread[math.floor(place)] += p * (math.ceil(place) - place)
            spread[math.ceil(place)] += p * (place - math.floor(place))
    return spread


def test_T40_projection():
    got = project(t(0, 1, 2), t(0.2, 0.5, 0.3), t(0.5)[0], t(1)[0])
    torch.testing.assert_close(got, t(0.10, 0.35, 0.55), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("reward", "discount", "want"), [
    (0.0, 1.0, [0.2, 0.5, 0.3]),    # on the atoms
    (1.0, 1.0, [0.0, 0.2, 0.8]),    # on the atoms, the last is clipped
    (-1.0, 1.0, [0.7, 0.3, 0.0]),   # the first is clipped
    (9.0, 1.0, [0.0, 0.0, 1.0]),    # all of it above
    (-9.0, 1.0, [1.0, 0.0, 0.0]),   # all of it below
    (1.0, 0.0, [0.0, 1.0, 0.0]),    # terminated: the reward alone
    (0.75, 0.0, [0.25, 0.75, 0.0]),
    (0.0, 0.5, [0.45, 0.55, 0.0]),  # discounted: 0, 0.5, 1
])
def test_projection_by_hand(reward, discount, want):
    got = project(t(0, 1, 2), t(0.2, 0.5, 0.3), t(reward)[0], t(discount)[0])
    torch.testing.assert_close(got, t(*want), rtol=0, atol=1e-12)


@pytest.mark.parametrize("atoms", [2, 11, 51])
def test_projection_literal(atoms):
    rng, support = np.random.default_rng(atoms), np.linspace(-10, 10, atoms)
    cases = [(float(r), float(d)) for r in (0, 0.4, -0.4, 1, -1, 3.3, -3.3, 10, -10, 25, -25, 0.123)
             for d in (0, 0.99, 0.99**3, 0.5, 1)]
    probabilities = rng.dirichlet(np.ones(atoms), len(cases))
    reward, discount = (torch.tensor(column, dtype=torch.float64) for column in zip(*cases, strict=True))
    got = project(torch.from_numpy(support), torch.from_numpy(probabilities), reward, discount)
    for row, p, (r, d) in zip(got, probabilities, cases, strict=True):
        np.testing.assert_allclose(row, literal(support, p, r, d), atol=1e-9)
    rough = project(torch.linspace(-10, 10, atoms), torch.from_numpy(probabilities).float(), reward.float(), discount.float())
    np.testing.assert_allclose(rough, got, atol=2e-5)


def test_projection_keeps_mass_and_mean():
    """A projection keeps the mass and inside the support the mean."""
    g = torch.Generator().manual_seed(0)
    support = torch.linspace(-4, 4, 21, dtype=torch.float64)
    p = torch.rand(3, 50, 21, generator=g, dtype=torch.float64).softmax(-1)
    reward, discount = torch.rand(2, 3, 50, generator=g, dtype=torch.float64) * 0.5
    got = project(support, p, reward, discount)
    assert got.shape == (3, 50, 21) and bool((got >= 0).all())
    torch.testing.assert_close(got.sum(-1), torch.ones_like(reward))
    torch.testing.assert_close((got * support).sum(-1), reward + discount * (p * support).sum(-1))


def test_what_is_not_finite_stays_so():
    assert bool(project(t(0, 1, 2), t(0.2, 0.5, 0.3), t(math.nan)[0], t(1)[0]).isnan().all())


def test_means_and_divergences():
    support, p, m = t(-1, 0, 2), t(0.5, 0.3, 0.2), t(0.0, 0.25, 0.75)
    logits = (p.log() + 5).requires_grad_()
    assert float(c51.expected(logits, support).detach()) == pytest.approx(-0.5 + 0.4)
    found = c51.divergence(m, logits)
    want = 0.25 * math.log(0.25 / 0.3) + 0.75 * math.log(0.75 / 0.2)
    assert float(found.detach()) == pytest.approx(want)
    found.backward()
    torch.testing.assert_close(logits.grad, p - m)  # that of the cross-entropy
    assert float(c51.divergence(p, logits).detach()) == pytest.approx(0, abs=1e-12)
