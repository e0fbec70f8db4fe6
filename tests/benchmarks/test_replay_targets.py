"""The targets of the replay buffers: judged by medians of a suite's runs, worked by hand."""

from __future__ import annotations

from benchmarks.replay_targets import FRAMES, SMALL, SMALL_1M, SMALL_10K, TARGETS, main, target_table
from shoal.bench.suite import load_suite
from tests.bench.rows import results_with, row


def runs(case, who, *rates):
    return [row(f"{case}, {who}", seed, rates=found) for seed, found in enumerate(rates)]


def measured():
    return [*runs(SMALL_10K, "shoal inline", {"sample+update": 900.0}, {"sample+update": 500.0}, {"sample+update": 600.0}),
            *runs(SMALL, "shoal inline", *({"sample+update": n, "append_batch": 100.0} for n in (300.0, 500.0, 400.0))),
            *runs(SMALL, "cpprb", {"sample+update": 200.0, "insert": 125.0}),
            *runs(SMALL_1M, "shoal inline", {"sample+update": 500.0})]


def test_targets_are_judged_by_medians(tmp_path, capsys):
    results = results_with(tmp_path, measured())
    text = target_table(results.groups())
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert [SMALL, "sample+update", "400", "cpprb 200", "2.00", ">= 1", "met"] in lines
    assert [SMALL, "append_batch", "100", "cpprb 125", "0.80", ">= 1", "NOT MET"] in lines
    assert ["small records", "cost of sample+update, 1M / 10k", "500", "10k: 600", "1.20", "<= 1.5", "met"] in lines
    assert [FRAMES, "TCP writer", "-", "reverb -", "-", ">= 1", "not measured"] in lines
    assert ["small records", "cost of insert, 1M / 10k", "-", "10k: -", "-", "<= 1.5", "not measured"] in lines
    assert len(lines) == 2 + len(TARGETS) + 3  # a head and its rule, and no target left out
    assert main(str(tmp_path)) == 1 and text in capsys.readouterr().out


def test_targets_name_measured_buffers():
    """Every target is about a buffer that the suite measures."""
    measured = {(case.name, who) for case in load_suite("replay").cases for who in case.who}
    assert {(case, side[0]) for case, _, ours, theirs, _ in TARGETS for side in (ours, theirs)} <= measured
    assert {(SMALL_10K, "shoal inline"), (SMALL_1M, "shoal inline")} <= measured
