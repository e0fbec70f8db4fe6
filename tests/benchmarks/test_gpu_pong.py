"""Whole programs on Pong: which cases there are, and what a turn is held against."""

from __future__ import annotations

import contextlib

import pytest

from benchmarks import gpu_pong
from benchmarks.gpu_pong import turn


def test_unknown_case(capsys):
    """A case that gpu_pong does not know is refused."""
    with pytest.raises(SystemExit) as ended:
        gpu_pong.main(["--only", "seed,nonsense"])
    assert ended.value.code == 2 and "--only has 'nonsense'; there are seed, seed resnet" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "rates", "limit"), [
    ("seed", None, 1000), ("impala", None, 500), ("seed resnet", {"i": 800.0, "l": 800.0}, 400),
    ("seed resnet", {"i": 8000.0, "l": 8000.0}, 1000)])
def test_the_limit_of_a_turn(name, rates, limit):
    """e is 1000 and i on the cores too; where there is a GPU it works beside the environments."""
    class Held:
        stopped = contextlib.nullcontext
        rate = staticmethod(lambda seconds: 200.0)

    class Probes:
        rate = staticmethod(lambda workload, cell, seconds: 1000.0)

    class Gpu:
        rates = staticmethod(lambda seconds: dict(rates))

    case = next(case for case in gpu_pong.CASES if case.name == name)
    row = turn(case, Held(), Probes(), Gpu() if rates else None, "", 1.0)
    assert row["limit"] == limit and row["share"] == round(200 / limit, 3)
