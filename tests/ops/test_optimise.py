"""E1 of policy.md, T15 and T17 of value.md, and equality with torch.optim over many steps."""

from __future__ import annotations

import pytest
import torch

from shoal.ops import optimise


def one(x):
    return torch.tensor([x], dtype=torch.float32)


def test_rmsprop_golden():
    params, square = one(0.0), one(0.0)
    optimise.rmsprop_(params, one(2.0), square, lr=7e-4, decay=0.99, eps=0.1)
    assert float(square) == pytest.approx(0.04)
    assert float(-params) == pytest.approx(0.00374166, abs=5e-9)  # outside it would be 0.00466667


def test_T15_centred_rmsprop():
    params, square, mean = one(0.0), one(0.0), one(0.0)
    optimise.rmsprop_(params, one(1.0), square, lr=2.5e-4, decay=0.95, eps=0.01, mean=mean)
    assert float(-params) == pytest.approx(1.0425721e-3, abs=1e-9)  # torch's placement gives 1.0967561e-3


def test_centred_rmsprop_rounding():
    params, square, mean = one(0.0), one(0.0), one(0.0)
    for _ in range(2000):
        optimise.rmsprop_(params, one(0.1), square, lr=1e-3, decay=0.9, eps=1e-10, mean=mean)
    assert bool(torch.isfinite(params).all())


@pytest.mark.parametrize("n", [1, 1000, 30_001])
@pytest.mark.parametrize("fused", [True, False])
def test_adam_equals_torch(n, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(optimise, "_FUSED_DEVICES", ())
    g = torch.Generator().manual_seed(n)
    params = torch.randn(n, generator=g)
    refs = [torch.nn.Parameter(params.clone()) for _ in range(2)]
    m, v, count = torch.zeros(n), torch.zeros(n), torch.zeros(())
    plain = torch.optim.Adam(refs[:1], lr=1e-3, betas=(0.9, 0.99), eps=1e-5)
    same_kernel = torch.optim.Adam(refs[1:], lr=1e-3, betas=(0.9, 0.99), eps=1e-5, fused=True)
    for step in range(300):
        grad = torch.randn(n, generator=g) * (1 + step % 7)
        lr = 1e-3 * (1 - step / 300)
        for ref, optimiser in zip(refs, (plain, same_kernel), strict=True):
            optimiser.param_groups[0]["lr"] = lr
            ref.grad = grad.clone()
            optimiser.step()
        optimise.adam_(params, grad, m, v, count, lr, 0.9, 0.99, 1e-5)
    assert float(count) == 300
    torch.testing.assert_close(params, refs[0].detach(), atol=1e-7, rtol=1.2e-7)  # one rounding
    if fused:
        assert torch.equal(params, refs[1].detach())


def test_adam_in_place():
    params, grad = torch.randn(8), torch.randn(8)
    m, v, count = torch.zeros(8), torch.zeros(8), torch.zeros(1)
    where, before = params.data_ptr(), grad.clone()
    optimise.adam_(params, grad, m, v, count, 1e-3)
    assert params.data_ptr() == where and torch.equal(grad, before)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torch(momentum):
    params = torch.randn(100)
    ref = torch.nn.Parameter(params.clone())
    optimiser = torch.optim.SGD([ref], lr=0.1, momentum=momentum)
    velocity = torch.zeros(100) if momentum else None
    for _ in range(20):
        ref.grad = torch.randn(100)
        optimiser.step()
        optimise.sgd_(params, ref.grad, 0.1, velocity, momentum)
    torch.testing.assert_close(params, ref.detach())


def test_clip_by_global_norm():
    grad = torch.tensor([3.0, 4.0])
    assert float(optimise.clip_by_global_norm_(grad, 10.0)) == 5
    assert grad.tolist() == [3.0, 4.0]
    assert float(optimise.clip_by_global_norm_(grad, 0.5)) == 5
    torch.testing.assert_close(grad, torch.tensor([0.3, 0.4]))
    assert float(optimise.clip_by_global_norm_(torch.zeros(3), 0.5)) == 0
    assert not torch.isfinite(optimise.clip_by_global_norm_(torch.tensor([torch.nan]), 0.5))


def test_T17_adagrad():
    params, square, steps = one(0.0), one(0.0), []
    for gradient in (2.0, 1.0, -3.0):
        before = float(params)
        optimise.adagrad_(params, one(gradient), square, lr=0.1)
        steps.append(float(params) - before)
    assert steps == pytest.approx([-0.1, -0.04472136, 0.08017837], abs=1e-7)
    params, square = one(0.0), one(0.1)
    optimise.adagrad_(params, one(2.0), square, lr=0.1)
    assert float(params) == pytest.approx(-0.09877296, abs=1e-7)
