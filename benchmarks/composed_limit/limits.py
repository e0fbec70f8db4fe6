"""The composed limit of a workload: how fast these cores could be if only the work itself took time.

    limit = 1 / (1/e + 1/i + r/l)            one kind of processor does everything, so the times of a frame add up
    limit = min(e, 1 / (1/i + r/l))          with a GPU: environments and the GPU work side by side

With replay a step also costs an insert, and r items have to be drawn for it before they are learned from:

    limit = 1 / (1/e + 1/i + q/n + r (1/s + 1/l))              with a GPU min(1 / (1/e + q/n + r/s), 1 / (1/i + r/l))

where n, s and l are items/s into the table, out of it (with their new priorities) and through updates of the workload's own batch
size, q the items that an env step adds, and r = q x --replay.samples-per-insert, so r / batch size are the updates per env step.

e is env steps/s of the fastest back-end with random actions, made with the workload's own arguments (--envs.kwargs), i the
frames/s of the policy, l those of the learner (forward, backward, optimiser) on data in memory, r the passes over the data. Each
is measured alone with all cores, as the best over a grid of batch sizes and of layouts (P processes of t threads with
P x t = cores), and the grid is kept: a bad batch size must not be able to lower the limit. Where the workload computes on a GPU
(--device, as a run would take it), i and l are measured there, by one process. efficiency = env steps/s / limit, both from the
same run.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.composed_limit.scenes import Workload
from shoal.bench.parent_death import tied_to_parent

__all__ = ["PARTS", "Cell", "ComposedLimit", "CoreLayout", "Probes", "cells", "composed", "layouts", "measure", "measure_again"]

PARTS = {"env": "e", "act": "i", "learn": "l"}
REPLAY_PARTS = {"insert": "n", "sample": "s"}
CHECKOUT = Path(__file__).resolve().parents[2]
WARM_SECONDS = 0.25
SECONDS = 0.75
GPU_FRAMES, GPU_LEARN_FRAMES = (1024, 4096), (8192,)  # beside those of the case: a GPU wants more at once


def composed(e: float, i: float, l: float, r: float = 1.0, gpu: bool = False, *,  # noqa: E741  the issue's names
             n: float = math.inf, s: float = math.inf, q: float = 1.0) -> float:
    """Frames/s that the parts allow together; a part that costs nothing is infinite."""
    stepping, computing = 1 / e + q / n + r / s, 1 / i + r / l
    return 1 / max(stepping, computing) if gpu else 1 / (stepping + computing)


@dataclass(frozen=True)
class CoreLayout:
    """How the cores are used: `processes` of `threads` each."""

    processes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.threads}"


def layouts(cores: int) -> list[CoreLayout]:
    """All cores, from many processes of one thread to one process of many."""
    threads = [2**k for k in range(cores.bit_length()) if 2**k < cores] + [cores]
    return [CoreLayout(cores // t, t) for t in threads]


@dataclass(frozen=True)
class Cell:
    """One place in the grid and, once measured, its rate."""

    what: str  # a key of PARTS or REPLAY_PARTS
    batch: int
    layout: CoreLayout
    backend: str = ""
    frames_per_second: float = 0.0

    def __str__(self) -> str:
        where = f" {self.backend}" if self.backend else ""
        return f"{(PARTS | REPLAY_PARTS)[self.what]}{where} batch {self.batch}, {self.layout}: {self.frames_per_second:,.0f}/s"


@dataclass(frozen=True)
class ComposedLimit:
    """The limit of one workload, with the grid it is the best of."""

    e: Cell
    i: Cell
    l: Cell  # noqa: E741
    passes: float
    grid: list[Cell] = field(default_factory=list)
    gpu: bool = False
    """Whether i and l are those of a GPU."""
    n: Cell | None = None
    """With replay: items into the table."""
    s: Cell | None = None
    """With replay: items out of the table."""
    items_per_env_step: float = 1.0

    @property
    def env_steps_per_second(self) -> float:
        n, s = (math.inf if cell is None else cell.frames_per_second for cell in (self.n, self.s))
        return composed(self.e.frames_per_second, self.i.frames_per_second, self.l.frames_per_second, self.passes, self.gpu,
                        n=n, s=s, q=self.items_per_env_step)

    @property
    def formula(self) -> str:
        if self.n is not None:
            q, r = f"{self.items_per_env_step:g}", f"{self.passes:g}"
            return f"min(1 / (1/e + {q}/n + {r}/s), 1 / (1/i + {r}/l))" if self.gpu else \
                f"1 / (1/e + 1/i + {q}/n + {r}/s + {r}/l)"
        return f"min(e, 1 / (1/i + {self.passes}/l))" if self.gpu else f"1 / (1/e + 1/i + {self.passes}/l)"

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> ComposedLimit:
        """From what `record` made."""
        def cell(one: Mapping[str, Any]) -> Cell:
            return Cell(**{**one, "layout": CoreLayout(**one["layout"])})

        n, s = (cell(record[name]) if record.get(name) else None for name in REPLAY_PARTS.values())
        return cls(cell(record["e"]), cell(record["i"]), cell(record["l"]), record["passes"], [cell(one) for one in record["grid"]],
                   record.get("gpu", False), n, s, record.get("items_per_env_step", 1.0))

    def parts(self) -> dict[str, Cell]:
        """The best cells by their letters."""
        cells = {"e": self.e, "i": self.i, "l": self.l, "n": self.n, "s": self.s}
        return {name: cell for name, cell in cells.items() if cell is not None}

    def record(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"env_steps_per_second": self.env_steps_per_second, "passes": self.passes, "gpu": self.gpu,
                **{name: asdict(cell) for name, cell in self.parts().items()},
                **({} if self.n is None else {"items_per_env_step": self.items_per_env_step}),
                "grid": [asdict(cell) for cell in self.grid]}


class Probes:
    """The probe processes, kept waiting between measurements: a layout's are started when it is first needed."""

    def __init__(self) -> None:
        self._teams: dict[CoreLayout, list[subprocess.Popen[str]]] = {}

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for probe in self._all():
            assert probe.stdin is not None
            probe.stdin.close()
        for probe in self._all():
            try:
                probe.wait(5)
            except subprocess.TimeoutExpired:
                probe.kill()
                probe.wait()
            assert probe.stdout is not None
            probe.stdout.close()

    def _all(self) -> Iterator[subprocess.Popen[str]]:
        for team in self._teams.values():
            yield from team

    def rate(self, workload: Workload, cell: Cell, seconds: float = SECONDS) -> float:
        """Frames/s of all processes of the cell's layout together."""
        order = {"workload": workload.key(), "what": cell.what, "batch": cell.batch, "backend": cell.backend,
                 "warm_seconds": min(WARM_SECONDS, seconds), "seconds": seconds}
        team = self._team(cell.layout)
        for probe in team:
            _tell(probe, json.dumps(order))
        for probe in team:
            _hear(probe, cell)
        for probe in team:
            _tell(probe, "go")
        return sum(float(_hear(probe, cell)) for probe in team)

    def _team(self, layout: CoreLayout) -> list[subprocess.Popen[str]]:
        if layout not in self._teams:
            env = {**os.environ, **{name: str(layout.threads) for name in
                                    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")},
                   "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])}
            command = tied_to_parent([sys.executable, "-m", "benchmarks.composed_limit.probe"])
            self._teams[layout] = [subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                    start_new_session=True)  # Ctrl-C is not for them
                                   for _ in range(layout.processes)]
        return self._teams[layout]


def _tell(probe: subprocess.Popen[str], line: str) -> None:
    assert probe.stdin is not None
    probe.stdin.write(line + "\n")
    probe.stdin.flush()


def _hear(probe: subprocess.Popen[str], cell: Cell) -> str:
    assert probe.stdout is not None
    line = probe.stdout.readline()
    if not line:
        raise RuntimeError(f"the probe of {cell} ended with exit code {probe.wait()}; its error is above")
    return line


def cells(workload: Workload, cores: int, gpu: bool = False) -> list[Cell]:
    """The whole grid of a workload."""
    grid = workload.scene.grid
    out: list[Cell] = []
    for layout in layouts(cores):
        out += [Cell("env", batch, layout, backend) for backend in grid.backends for batch in grid.envs]
    for layout in [CoreLayout(1, 1)] if gpu else layouts(cores):
        out += [Cell("act", batch, layout) for batch in grid.frames + GPU_FRAMES * gpu]
        out += [Cell("learn", batch, layout) for batch in grid.learn_frames + GPU_LEARN_FRAMES * gpu]
    return out


def replay_cells(workload: Workload, cores: int, gpu: bool, replay: Any) -> list[Cell]:
    """The grid of a workload with these options of replay: how many items are learned from at once is a value of the algorithm."""
    out = [cell for cell in cells(workload, cores, gpu) if cell.what != "learn"]
    out += [Cell("learn", replay.batch_size, layout) for layout in ([CoreLayout(1, 1)] if gpu else layouts(cores))]
    for layout in layouts(cores):
        out += [Cell("insert", replay.insert_batch, layout), Cell("sample", replay.batch_size, layout)]
    return out


def with_able_backends(workload: Workload, kwargs: tuple[str, ...], say: Callable[[str], None]) -> Workload:
    """The workload with only those back-ends that can make its environment with its own arguments (--envs.kwargs)."""
    from benchmarks.composed_limit.probe import refusal

    scene, backends = workload.scene, workload.scene.grid.backends
    refused = {backend: words for backend in backends if kwargs and (words := refusal(scene.env, backend, kwargs))}
    for backend, words in refused.items():
        say(f"  {backend} cannot make {scene.env} with {' '.join(kwargs)}: {words}")
    if len(refused) == len(backends):
        raise RuntimeError(f"no back-end of the limit ({', '.join(backends)}) can make {scene.env} with {' '.join(kwargs)}: "
                           f"{'; '.join(refused.values())}")
    left = tuple(backend for backend in backends if backend not in refused)
    return replace(workload, scene=replace(scene, grid=replace(scene.grid, backends=left)))


def measure_again(workload: Workload, probes: Probes, known: ComposedLimit, seconds: float = SECONDS) -> ComposedLimit:
    """A known limit, measured now at its best cells only."""
    now = {name: replace(cell, frames_per_second=probes.rate(workload, cell, seconds)) for name, cell in known.parts().items()}
    return replace(known, grid=[], **now)


def measure(workload: Workload, probes: Probes, *, same_env: ComposedLimit | None = None, seconds: float = SECONDS,
            say: Callable[[str], None] = lambda text: None) -> ComposedLimit:
    """The limit of a workload, over the whole grid.

    `same_env` is the limit of another workload in the same environment, made with the same arguments: its e is this one's.
    """
    from benchmarks.composed_limit.probe import passes, prepared
    from benchmarks.composed_limit.replay_parts import items_per_env_step

    started, ready = time.monotonic(), prepared(workload.key())
    gpu, experiment = ready.hardware().on_gpu, ready.plan.experiment
    replay = experiment.replay if ready.algorithm.from_replay else None
    workload = with_able_backends(workload, ready.plan.experiment.envs.kwargs, say)
    grid = [] if same_env is None else [cell for cell in same_env.grid if cell.what == "env"]
    cores = len(os.sched_getaffinity(0))
    for cell in cells(workload, cores, gpu) if replay is None else replay_cells(workload, cores, gpu, replay):
        if same_env is None or cell.what != "env":
            grid.append(replace(cell, frames_per_second=probes.rate(workload, cell, seconds)))
            say(f"  {grid[-1]}")
    best = {name: max((cell for cell in grid if cell.what == what), key=lambda cell: cell.frames_per_second)
            for what, name in (PARTS if replay is None else PARTS | REPLAY_PARTS).items()}
    items = 1.0 if replay is None else items_per_env_step(experiment)
    limit = ComposedLimit(**best, passes=passes(experiment, replay), grid=grid, gpu=gpu, items_per_env_step=items)
    say(f"  limit of {workload.name}: {limit.env_steps_per_second:,.0f} env steps/s = {limit.formula}, "
        f"found in {time.monotonic() - started:.0f} s")
    return limit
