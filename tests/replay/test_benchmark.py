"""The benchmark's report: made from the rounds that were measured, with the ratios worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.bench import replay as bench


def scene(**runs: list[dict[str, Any]]) -> dict[str, Any]:
    named = {who.replace("_", " "): rounds for who, rounds in runs.items()}
    return {"date": "2026-01-02", "commit": "0123456789abcdef", "load": 0.25, "rounds": 3, "seconds": 1.0, "runs": named}


def results() -> dict[str, Any]:
    ours = [{"sample+update": n, "append_batch": 100.0} for n in (300.0, 500.0, 400.0)]
    theirs = [{"sample+update": 200.0, "insert": 125.0}] * 3
    broken = [{"error": "ImportError: does not load"}] * 3
    return {
        "machine": {"cores": 2, "cpu": "a processor"},
        "peers": {"cpprb": "cpprb 11.0.0", "torchrl": "torchrl 0.14.1"},
        "scenes": {
            "small 10k": scene(shoal_inline=[{"sample+update": 900.0}, {"sample+update": 500.0}, {"sample+update": 600.0}]),
            "small 100k": scene(shoal_inline=ours, cpprb=theirs, torchrl=broken),
            "small 1M": scene(shoal_inline=[{"sample+update": 500.0}] * 3),
        },
    }


def test_the_tables_hold_medians_ranges_errors_and_targets() -> None:
    text = bench.tables(results())
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert ["sample+update", "400 (300 - 500)", "200 (200 - 200)", "-"] in lines
    assert "- torchrl: ImportError: does not load" in text
    assert ["small 100k", "sample+update", "400", "cpprb 200", "2.00", ">= 1", "met"] in lines
    assert ["small 100k", "append_batch", "100", "cpprb 125", "0.80", ">= 1", "NOT MET"] in lines
    assert ["small", "cost of sample+update, 1M / 10k", "500", "10k: 600", "1.20", "<= 1.5", "met"] in lines
    assert ["frames 10k", "TCP writer", "-", "reverb -", "-", ">= 1", "not measured"] in lines
    assert ["small", "cost of insert, 1M / 10k", "-", "10k: -", "-", "<= 1.5", "not measured"] in lines
    assert sum(len(line) == 7 for line in lines) == 2 + len(bench.TARGETS) + 3  # a head and its rule, and no target left out


def test_the_report_goes_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench: begin -->\nold\n<!-- bench: end -->\nafter\n")
    monkeypatch.setattr(bench, "PAGE", page)
    bench.report({})
    assert page.read_text().startswith("before\n<!-- bench: begin -->\nNot measured yet") and "old" not in page.read_text()
    bench.report(results())
    assert bench.tables(results()) in page.read_text() and page.read_text().endswith("<!-- bench: end -->\nafter\n")


def test_every_target_is_about_a_scene_that_is_measured() -> None:
    measured = {bench.name_of(kind, size) for kind, size in bench.CASES}
    assert {target[0] for target in bench.TARGETS} <= measured
    assert {"small 10k", "small 100k", "small 1M", "frames 10k", "sequences 1k"} == measured
