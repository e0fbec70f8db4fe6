"""The learner's limit on a CPU: frames of the batch it was given, the best of two bare loops, a real program beside it."""

from __future__ import annotations

import itertools
import json
import signal

import gymnasium as gym
import numpy as np
import pytest

from benchmarks import learner_limit, work_rate
from benchmarks.learner_limit import BareLoop, UpdateLoop
from benchmarks.synthetic import algorithm_of
from shoal.device.placement import Hardware

IMAGES = gym.spaces.Box(0, 255, (4, 10, 10), np.uint8)


@pytest.mark.parametrize(("unroll", "seats", "slots"), [(3, 2, 2), (5, 4, 1)])
@pytest.mark.parametrize("graphs", [False, True])
def test_frames_are_those_of_the_batch(unroll, seats, slots, graphs, monkeypatch):
    """A clock that goes on by a second whenever it is read: eight updates in three seconds."""
    loop = UpdateLoop(algorithm_of("small_conv", unroll, seats, IMAGES), Hardware(), slots, graphs)
    monkeypatch.setattr(work_rate.time, "perf_counter", itertools.count(0.0).__next__)
    assert loop.rate(2.0) == pytest.approx(8 * unroll * seats * slots / 3)


def test_the_faster_bare_loop_counts(monkeypatch):
    bare, made = BareLoop(algorithm_of("small_conv", 3, 2, IMAGES), Hardware(), 1), []
    for name, rate in (("bare_eager", 40.0), ("bare_graphs", 70.0)):
        monkeypatch.setattr(bare._loops[name], "rate", lambda seconds, rate=rate: made.append(seconds) or rate)
    assert bare.rates(2.0) == {"bare_eager": 40.0, "bare_graphs": 70.0, "bare": 70.0} and made == [1.0, 1.0]


def test_one_bare_loop_without_graphs(monkeypatch):
    """A learner that cannot be captured has one bare loop."""
    from shoal.algorithms import vtrace

    monkeypatch.setattr(vtrace.VTraceObjective, "captures", False)
    assert set(BareLoop(algorithm_of("small_conv", 3, 2, IMAGES), Hardware(), 1).rates(0.01)) == {"bare_eager", "bare"}


def test_program_against_the_best_loop(monkeypatch, capsys):
    """Really: producers and a learner in processes of their own, which are stopped for the bare loops."""
    for name, value in {"UNROLL": 3, "SEATS": 2, "PRODUCERS": 1, "SETTLE_SECONDS": 0.1}.items():
        monkeypatch.setattr(learner_limit, name, value)
    before = signal.getsignal(signal.SIGTERM)
    try:
        learner_limit.main(["--device", "cpu", "--batch", "16", "--turns", "2", "--seconds", "0.3"])
    finally:
        signal.signal(signal.SIGTERM, before)
    line = json.loads(capsys.readouterr().out)
    assert line["frames_per_batch"] == 16 and len(line["turns"]) == 2
    for row in line["turns"]:
        assert row["bare"] == max(row["bare_eager"], row["bare_graphs"]) > 0
        assert row["share"] == pytest.approx(row["program"] / row["bare"], rel=0.02) and row["program"] > 0
    assert line["bare_frames_per_second"] == max(line["bare_eager_frames_per_second"], line["bare_graphs_frames_per_second"])
