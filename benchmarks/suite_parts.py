"""What `shoal bench` takes from this folder; src/shoal/bench/checkout.py says what each function does (protocol Benchmarks)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from benchmarks.html_report import page
from benchmarks.kills import check_kill, kill_victims
from benchmarks.model_curve import observed

if TYPE_CHECKING:
    from benchmarks.composed_limit.suite_limits import SuiteLimits
    from shoal.bench.results_folder import ResultsFolder
    from shoal.bench.suite import SuiteCase
    from shoal.experiment.config import Plan

__all__ = ["check_kill", "check_limit", "fit_order", "kill_victims", "limits", "observed", "page", "runner_of"]


def runner_of(case: SuiteCase) -> ModuleType:
    if case.peer:
        from benchmarks.peers import cases as peers

        return peers
    from benchmarks.replay_buffers import cases as workloads

    return workloads


def fit_order(case: SuiteCase, own: Mapping[str, Any]) -> dict[str, Any]:
    from benchmarks.peers import cases

    return cases.fit_order(case, own)


def check_limit(case: SuiteCase, plan: Plan) -> None:
    from benchmarks.composed_limit.suite_limits import check_limit

    check_limit(case, plan)


def limits(results: ResultsFolder, say: Callable[[str], None]) -> SuiteLimits:
    from benchmarks.composed_limit.suite_limits import SuiteLimits

    return SuiteLimits(results, say)
