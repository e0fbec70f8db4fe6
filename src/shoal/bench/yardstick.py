"""The composed limit beside the runs of a suite: its grid once per workload, its best cells again after every run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from shoal.bench import limits
from shoal.bench.cases import CASES, Case
from shoal.bench.ledger import Ledger
from shoal.bench.probe import prepared
from shoal.bench.suite import Job

__all__ = ["Yardstick"]


class Yardstick:
    """Keeps the probes' processes and the limits known so far."""

    def __init__(self, ledger: Ledger, say: Callable[[str], None]) -> None:
        self._ledger, self._say, self._probes = ledger, say, limits.Probes()
        self._scenes = {case.scene.env: case.scene for case in CASES}

    def __enter__(self) -> Yardstick:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._probes.__exit__(kind, error, trace)

    def beside(self, job: Job) -> dict[str, Any] | None:
        """The limit of the job's workload, measured now; None where no grid is known for its environment, or where its parts
        cannot be run alone, which is said: a row without an efficiency is better than none."""
        scene = self._scenes.get(job.case.env)
        if not job.case.limit or job.case.preset is None or scene is None:
            return None
        case = Case(job.case.name, scene, job.case.preset, dict(job.case.overrides))
        try:
            known = self._known(case, job.case.limit_seconds)
            now = limits.measure(case, self._probes, known=known, seconds=job.case.limit_seconds)
        except (RuntimeError, AttributeError, OSError) as error:
            self._say(f"  {case.name}: its limit could not be measured: {error}")
            self.__exit__(None, None, None)  # a probe has ended: the next limit gets new ones
            self._probes = limits.Probes()
            return None
        return {"env_steps_per_second": now.env_steps_per_second, "passes": now.passes, "cores": len(os.sched_getaffinity(0)),
                "gpu": now.gpu, **{part: getattr(now, part).frames_per_second for part in ("e", "i", "l")}}

    def _known(self, case: Case, seconds: float) -> limits.Limit:
        """The whole grid, from the ledger where it has been measured before; e is that of the environment, whoever needs it: of one
        that is made with the same arguments."""
        workload = json.dumps(case.arguments(), sort_keys=True)
        pairs = list(prepared(workload).plan.experiment.envs.kwargs)
        known = {name: one for name, one in self._ledger.limits().items() if one.get("env_kwargs", []) == pairs}
        if workload in known:
            return _read(known[workload])
        same = next((_read(one) for one in known.values() if one["env"] == case.scene.env), None)
        self._say(f"  {case.name}: the grid of its limit")
        found = limits.measure(case, self._probes, same_env=same, seconds=seconds)
        self._ledger.append("limit", {"workload": workload, "env": case.scene.env, "env_kwargs": pairs, "name": case.name,
                                      **found.record()})
        return found


def _read(record: dict[str, Any]) -> limits.Limit:
    def cell(one: dict[str, Any]) -> limits.Cell:
        return limits.Cell(**{**one, "layout": limits.Layout(**one["layout"])})

    return limits.Limit(*(cell(record[part]) for part in ("e", "i", "l")), record["passes"], [cell(one) for one in record["grid"]],
                        record.get("gpu", False))
