"""Outside a checkout `shoal bench` runs presets; what only a checkout has is a row that says where to run it."""

from __future__ import annotations

import sys

import pytest

from shoal.bench import checkout
from shoal.bench.child_processes import ChildProcesses
from shoal.bench.jobs import run_job
from shoal.bench.suite import Job, load_suite


@pytest.fixture
def installed(monkeypatch):
    """As in a folder without `benchmarks`."""
    monkeypatch.setattr(checkout, "benchmarks", lambda: None)


@pytest.mark.parametrize("name", ["throughput", "learning", "scaling", "faults", "replay", "ray"])
def test_suites_are_read(installed, name):
    assert load_suite(name).cases


@pytest.mark.parametrize(("suite", "words"), [
    ("throughput", {"peers are measured", "the environments of peers are measured"}), ("replay", {"replay workloads are measured"}),
    ("faults", {"runs whose processes are killed are measured"}),
])
def test_rows_say_where_to_run_them(installed, suite, words):
    cases = [case for case in load_suite(suite).cases if checkout.missing_checkout(case)]
    rows = [run_job(Job(case, 1), ChildProcesses()) for case in cases if not case.gpu]
    assert {row["error"] for row in rows} == {f"{what} from a checkout of shoal: run it in the repository's root" for what in words}
    assert all(row["skipped"] for row in rows)


def test_folder_of_the_same_name(tmp_path, monkeypatch):
    """A folder of the same name is not a checkout."""
    assert checkout.benchmarks() is not None
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert checkout.benchmarks() is None
