"""Student's distribution against printed tables."""

from statistics import NormalDist

import pytest

from shoal.ops.student import student_p, student_quantile


@pytest.mark.parametrize(("freedom", "confidence", "t"), [
    (1, 0.95, 12.706), (2, 0.99, 9.925), (5, 0.9, 2.015), (9, 0.95, 2.262), (19, 0.95, 2.093), (30, 0.99, 2.750)])
def test_table(freedom, confidence, t):
    assert student_quantile(confidence, freedom) == pytest.approx(t, abs=5e-4)
    assert student_p(student_quantile(confidence, freedom), freedom) == pytest.approx(1 - confidence)


def test_much_freedom_is_normal():
    assert student_quantile(0.95, 1e6) == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-4)
