"""T18 and T19 of specs/value.md: which gradients a parameter server refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.ops.gates import LossGate, judge, too_old


def test_T18_age():
    assert too_old(120, 95, 20)
    assert not too_old(120, 100, 20)


def test_T19_outliers():
    gate = LossGate(1.0, 1.25, 100)
    assert gate.limit() == pytest.approx(3.0)
    assert judge(gate, 2.9)[0] and judge(gate, -2.9)[0]
    assert not judge(gate, -10.0)[0]
    accepted, after = judge(gate, 10.0)
    assert not accepted
    assert after.mean == pytest.approx(1.02)
    assert math.sqrt(after.square - after.mean**2) == pytest.approx(0.53581713, abs=1e-7)
    assert after.limit() == pytest.approx(3.16326853, abs=1e-7)  # 5.1876 where the spike is not clamped


def test_warmup():
    gate = LossGate()
    for loss in [1.0] * 50 + [1e6] + [1.0] * 49:
        accepted, gate = judge(gate, loss)
        assert accepted
    assert gate.losses == 100


def test_loss_not_finite():
    for gate in (LossGate(), LossGate(1.0, 1.25, 500)):
        for bad in (math.nan, math.inf):
            assert judge(gate, bad) == (False, gate)


def test_ordinary_losses_pass():
    rng, gate, refused = np.random.default_rng(0), LossGate(), 0
    for loss in rng.normal(1.0, 0.2, 5000):
        accepted, gate = judge(gate, float(loss))
        refused += not accepted
    assert refused < 25
    assert gate.mean == pytest.approx(1.0, abs=0.1)
