"""A suite is a TOML file with a list of cases; a case times its actors and seeds is a list of jobs.

    title = "..."
    [defaults]                     # of every case
    seeds = [1, 2, 3]
    [quick]                        # `--suite quick`: replaces these values in every case
    max_seconds = 6.0
    [[case]]
    preset = "impala"              # shoal ...
    env = "CartPole-v1"
    actors = [1, 2, 4, 8]
    until_return = 475.0
    max_env_steps = 400_000
    [[case]]
    peer = "sb3"                   # ... or somebody else on the same environment, with an order for its driver
    env = "CartPole-v1"
    order = { epochs = 1 }

Jobs are ordered by seed first: everybody's first seed, then everybody's second, so that a slow minute hits all of them.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from shoal.errors import ConfigError

__all__ = ["VARIANTS", "Job", "Suite", "SuiteCase", "load_suite", "suite_names"]

VARIANTS = ("full", "quick")


@dataclass(frozen=True)
class SuiteCase:
    """One line of a suite. What is run is a preset of shoal's, a peer, or a replay buffer with a workload."""

    name: str
    preset: str | None = None
    peer: str | None = None
    workload: str | None = None
    """small, frames or sequences: see bench/replay_workloads.py."""
    env: str = ""
    runtime: str = "local"
    actors: tuple[int | str, ...] = ()
    """How many; the preset's own number where none is given. Several make a curve."""
    seeds: tuple[int, ...] = (1, 2, 3)
    until_return: float | None = None
    """The threshold: training ends there, and a run that does not get there is a miss."""
    max_env_steps: int | None = None
    max_seconds: float | None = None
    warm_seconds: float = 0.0
    """The rate of env steps is taken from here to the end."""
    limit: bool = False
    """Measure the composed limit beside every run."""
    limit_seconds: float = 0.75
    """How long each cell of the limit's grid is looked at."""
    kill: tuple[str, ...] = ()
    """Processes to kill on the way, one after the other, as `ps` shows them: "actor 1"."""
    kill_every: int = 8000
    """Env steps before the first death and between two."""
    size: int = 0
    """Of a replay buffer."""
    who: tuple[str, ...] = ()
    """Whose replay buffers: shoal inline, shoal ipc, cpprb, ..."""
    expert: str = ""
    """Who gives 20 demonstrations to learn from, as `shoal data record` would call it; nobody where it is empty."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values of the experiment, dotted, as for `shoal train`."""
    order: Mapping[str, Any] = field(default_factory=dict)
    """What a peer's driver is told."""
    gpu: bool = False
    """It makes sense on a GPU only; without one it is a row that says so."""
    quick: bool = True
    """Whether --suite quick has it too."""

    @property
    def alone(self) -> bool:
        """Whether it measures speed: nothing may run beside it."""
        return bool(self.limit or self.warm_seconds or self.workload or self.peer)

    def check(self, where: str) -> None:
        given = [name for name in ("preset", "peer", "workload") if getattr(self, name)]
        if len(given) != 1:
            raise ConfigError(f"{where} has {' and '.join(given) or 'none of preset, peer and workload'}; give exactly one of them")
        if given != ["workload"] and not self.env:
            raise ConfigError(f"{where} names no environment; add env = \"CartPole-v1\"")
        if given == ["workload"] and not (self.size and self.who):
            raise ConfigError(f"{where} has a workload; add size = 100_000 and who = [\"shoal inline\"]")
        if given != ["workload"] and not (self.max_env_steps or self.max_seconds):
            raise ConfigError(f"{where} would never end; add max_env_steps or max_seconds")
        if not self.seeds:
            raise ConfigError(f"{where} has no seeds; add seeds = [1]")


@dataclass(frozen=True)
class Job:
    """One run: a case with one number of actors and one seed."""

    case: SuiteCase
    seed: int
    actors: int | str | None = None
    who: str | None = None

    @property
    def group(self) -> str:
        """Runs of the same group differ in their seed only."""
        actors = f", {self.actors} actors" if len(self.case.actors) > 1 else ""
        return self.case.name + actors + (f", {self.who}" if self.who else "")

    @property
    def key(self) -> str:
        """Names what is run, to the last value: a case that was edited is run again."""
        about = json.dumps({**asdict(self.case), "actors": self.actors, "seeds": None, "quick": None}, sort_keys=True)
        return f"{self.group}, seed {self.seed} #{hashlib.sha1(about.encode()).hexdigest()[:8]}"

    def arguments(self) -> dict[str, Any]:
        """What shoal.train is called with."""
        case = self.case
        goals = {name: getattr(case, name) for name in ("until_return", "max_env_steps", "max_seconds")}
        given = {"actors": self.actors, **{name: value for name, value in goals.items() if value is not None}}
        return {"preset": case.preset, "env": case.env, "runtime": case.runtime, "seed": self.seed, "console.mode": "none",
                "tensorboard": False, **{name: value for name, value in given.items() if value is not None}, **case.overrides}


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    cases: tuple[SuiteCase, ...]

    def jobs(self) -> list[Job]:
        rounds = max((len(case.seeds) for case in self.cases), default=0)
        return [Job(case, case.seeds[turn], actors, who) for turn in range(rounds) for case in self.cases if turn < len(case.seeds)
                for actors in case.actors or (None,) for who in case.who or (None,)]


def suite_names() -> list[str]:
    folder = files("shoal") / "bench" / "suites"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_suite(name: str, variant: str = "full") -> Suite:
    """A suite of shoal's by its name, or one by the path of its file."""
    from shoal.experiment.presets import closest

    if variant not in VARIANTS:
        raise ConfigError(f"--suite {variant} is not possible: give {' or '.join(VARIANTS)}")
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"there is no file {name}; give the name of a suite ({', '.join(suite_names())}) or the path of one")
        text = path.read_text(encoding="utf-8")
    elif name in suite_names():
        text = (files("shoal") / "bench" / "suites" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        raise ConfigError(f"there is no suite {name!r}{closest(name, suite_names(), 'there are')}")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the suite {name} is no TOML: {error}") from None
    return parse_suite(Path(name).stem, table, variant)


def parse_suite(name: str, table: Mapping[str, Any], variant: str = "full") -> Suite:
    unknown = set(table) - {"title", "defaults", "quick", "case"}
    if unknown:
        raise ConfigError(f"suite {name} has {', '.join(sorted(unknown))}; there may be title, [defaults], [quick] and [[case]]")
    defaults, quick = dict(table.get("defaults", {})), dict(table.get("quick", {}))
    cases = []
    for number, values in enumerate(table.get("case", []), 1):
        merged = {**defaults, **values, **(quick if variant == "quick" else {})}
        merged["overrides"] = {**defaults.get("overrides", {}), **values.get("overrides", {})}
        case = _case(f"suite {name}, case {number}", merged)
        if variant == "full" or case.quick:
            cases.append(case)
    names = [case.name for case in cases]
    twice = sorted({one for one in names if names.count(one) > 1})
    if twice:
        raise ConfigError(f"suite {name} has two cases called {twice[0]!r}; give one of them another name = \"...\"")
    if not cases:
        raise ConfigError(f"suite {name} has no [[case]]")
    return Suite(name, str(table.get("title", name)), tuple(cases))


def _case(where: str, values: Mapping[str, Any]) -> SuiteCase:
    from shoal.experiment.presets import closest
    from shoal.experiment.values import fit_type

    hints = get_type_hints(SuiteCase)
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{where} has {key!r}{closest(key, hints, 'there are')}")
        several = key in ("actors", "seeds", "kill", "who")
        given[key] = fit_type(hints[key], [value] if several and not isinstance(value, list) else value, f"{where}: {key}")
    if "name" not in given:
        what = given.get("preset") or given.get("peer") or f"{given.get('workload')} {given.get('size')}"
        given["name"] = f"{what} {given['env']}" if given.get("env") else what
    case = SuiteCase(**given)
    case.check(f"{where} ({case.name})")
    return case

