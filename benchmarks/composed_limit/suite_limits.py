"""The composed limit beside the runs of a suite: its grid once per workload, its best cells again after every run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from benchmarks.composed_limit import limits
from benchmarks.composed_limit.probe import prepared
from benchmarks.composed_limit.scenes import SCENES, Workload
from shoal.bench.results_folder import ResultsFolder
from shoal.bench.suite import Job, SuiteCase
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.experiment.config import Plan

__all__ = ["SuiteLimits", "check_limit"]


def check_limit(case: SuiteCase, plan: Plan) -> None:
    """Refuse a case whose limit is not known how to measure."""
    if case.env not in SCENES:
        raise ConfigError(f"limit=true is not possible: the parts of a limit are known for {' and '.join(sorted(SCENES))}; write "
                          "limit = false")
    if plan.algorithm.from_replay and (plan.experiment.replay.samples_per_insert is None or plan.architecture.needs_relabel):
        raise ConfigError(f"limit=true is not possible: {plan.names.algorithm} learns from replay, and how many updates go with an "
                          "env step is not given by --replay.samples-per-insert alone; write limit = false")


class SuiteLimits:
    """Keeps the probes' processes and the limits known so far."""

    def __init__(self, results: ResultsFolder, say: Callable[[str], None]) -> None:
        self._results, self._say, self._probes = results, say, limits.Probes()

    def __enter__(self) -> SuiteLimits:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._probes.__exit__(kind, error, trace)

    def measure(self, job: Job) -> dict[str, Any] | None:
        """The limit of the job's workload, measured now. None where no grid is known for its environment, or where its parts
        cannot be run alone, which is said: a row without an efficiency is better than none."""
        scene = SCENES.get(job.case.env)
        if not job.case.limit or job.case.preset is None or scene is None:
            return None
        workload = Workload(job.case.name, scene, job.case.preset, dict(job.case.overrides))
        try:
            known = self._known(workload, job.case.limit_seconds)
            now = limits.measure_again(workload, self._probes, known, job.case.limit_seconds)
        except (RuntimeError, AttributeError, OSError) as error:
            self._say(f"  {workload.name}: its limit could not be measured: {error}")
            self.__exit__(None, None, None)  # a probe has ended: the next limit gets new ones
            self._probes = limits.Probes()
            return None
        return {"env_steps_per_second": now.env_steps_per_second, "passes": now.passes, "cores": len(os.sched_getaffinity(0)),
                "gpu": now.gpu, **{name: cell.frames_per_second for name, cell in now.parts().items()},
                **({} if now.n is None else {"items_per_env_step": now.items_per_env_step})}

    def _known(self, workload: Workload, seconds: float) -> limits.ComposedLimit:
        """The whole grid, from the results where it has been measured before. Workloads in an environment that is made with the
        same arguments share its e."""
        kwargs = list(prepared(workload.key()).plan.experiment.envs.kwargs)
        known = {name: one for name, one in self._results.limits().items() if one.get("env_kwargs", []) == kwargs}
        if workload.key() in known:
            return limits.ComposedLimit.read(known[workload.key()])
        same = next((limits.ComposedLimit.read(one) for one in known.values() if one["env"] == workload.scene.env), None)
        self._say(f"  {workload.name}: the grid of its limit")
        found = limits.measure(workload, self._probes, same_env=same, seconds=seconds)
        self._results.append("limit", {"workload": workload.key(), "env": workload.scene.env, "env_kwargs": kwargs,
                                       "name": workload.name, **found.record()})
        return found
