"""What `shoal bench` takes from a checkout of the repository, because the installed package does not have it: benchmarks/.

    peer = "..."           another library
    workload = "..."       a replay buffer alone, shoal's or another library's
    env = "benchmarks..."  an environment that the peers are measured in
    kill = ["..."]         a run whose processes are killed
    limit = true           the composed limit beside every run

and report.html. Outside a checkout the first four are rows that say so; limits and the report are left out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from shoal.bench.machine import ROOT

if TYPE_CHECKING:
    from shoal.bench.child_processes import ChildProcesses
    from shoal.bench.results_folder import ResultsFolder
    from shoal.bench.suite import Job, SuiteCase
    from shoal.experiment.config import Plan
    from shoal.experiment.prepare import Prepared

__all__ = ["Benchmarks", "LimitMeter", "benchmarks", "missing_checkout"]

PLACE = "benchmarks"


class CaseRunner(Protocol):
    """Checks and runs the cases of peers, or those of replay workloads."""

    def check(self, case: SuiteCase) -> None:
        """Refuse a case that makes no sense."""

    def run(self, job: Job, children: ChildProcesses, kept: Path | None) -> dict[str, Any]:
        """One row: columns, or an error. What a failed run wrote is put into `kept`."""


class LimitMeter(Protocol):
    def measure(self, job: Job) -> dict[str, Any] | None:
        """The composed limit of the job's workload, measured now; None where it cannot be."""


class Benchmarks(Protocol):
    """The module benchmarks/suite_parts.py."""

    def runner_of(self, case: SuiteCase) -> CaseRunner: ...

    def fit_order(self, case: SuiteCase, own: Mapping[str, Any]) -> dict[str, Any]:
        """A peer's order without those keys of [defaults] that its driver does not take; `own` is what the case itself says."""

    def check_limit(self, case: SuiteCase, plan: Plan) -> None:
        """Refuse `limit = true` where the parts of the limit are not known."""

    def check_kill(self, kill: Sequence[str], ready: Prepared, auto: bool) -> None:
        """Refuse to kill a process that will not exist."""

    def kill_victims(self, pid: int, victims: Sequence[str], metrics: Path, every: int, kills: list[dict[str, Any]],
                     over: threading.Event) -> None:
        """SIGKILL each victim below `pid` in turn, and note it in `kills`."""

    def observed(self, summary: Mapping[str, Any], architecture: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the report's model of scaling is calibrated with."""

    def limits(self, results: ResultsFolder, say: Callable[[str], None]) -> AbstractContextManager[LimitMeter]: ...

    def page(self, title: str, where: str, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
        """report.html."""


def benchmarks() -> Benchmarks | None:
    """The parts in benchmarks/: of the folder that the command is run in, or of the checkout that this package is part of. None
    where there is neither."""
    if (ROOT / PLACE / "suite_parts.py").exists() and str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    try:
        return cast(Benchmarks, import_module(f"{PLACE}.suite_parts"))
    except ModuleNotFoundError as error:
        if error.name in (PLACE, f"{PLACE}.suite_parts"):  # none at all, or a folder of that name that is not shoal's
            return None
        raise


def missing_checkout(case: SuiteCase) -> str | None:
    """Why the case cannot be run from here; None where it can."""
    what = ("peers" if case.peer else "replay workloads" if case.workload else "runs whose processes are killed" if case.kill
            else "the environments of peers" if case.env.startswith(f"{PLACE}.") else None)
    if what is None or benchmarks() is not None:
        return None
    return f"{what} are measured from a checkout of shoal: run it in the repository's root"
