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
    peer = "sb3"                   # ... or another library on the same environment, with options for its driver
    env = "CartPole-v1"
    order = { epochs = 1 }

[defaults] and [quick] give a case only what it can take: a peer takes no `overrides`, a preset no `order`, a driver no key that it
does not read. A value in the case itself that does not apply to it is refused, like everything else that makes no sense
(suite_checks.py), before anything is run.

Jobs are ordered by seed first: the first seed of every case, then the second, so that a slow minute of the machine hits all cases.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from shoal.bench import checkout
from shoal.errors import ConfigError

__all__ = ["VARIANTS", "Job", "Suite", "SuiteCase", "load_suite", "suite_names"]

VARIANTS = ("full", "quick")
EVERY_KIND = frozenset({"name", "seeds", "max_seconds", "gpu", "quick"})
KINDS = {
    "preset": frozenset({"preset", "env", "runtime", "actors", "until_return", "max_env_steps", "warm_seconds", "limit",
                         "limit_seconds", "kill", "kill_every", "expert", "overrides"}),
    "peer": frozenset({"peer", "env", "until_return", "warm_seconds", "order"}),
    "workload": frozenset({"workload", "size", "who"}),
}
"""What a case may have beside EVERY_KIND, by what it runs."""
TABLES = {"overrides": '{ "algorithm.lr" = 1e-3 }', "order": "{ epochs = 1 }"}
"""Values that are tables themselves, with an example: the case's override those of [defaults] key by key."""


@dataclass(frozen=True)
class SuiteCase:
    """One line of a suite. What is run is a preset of shoal's, a peer, or a replay buffer with a workload."""

    name: str
    preset: str | None = None
    peer: str | None = None
    workload: str | None = None
    """small, frames or sequences: see benchmarks/replay_buffers/workloads.py."""
    env: str = ""
    runtime: str = "local"
    actors: tuple[int | str, ...] = ()
    """Numbers of actors; the preset's own where none is given. Several make a curve."""
    seeds: tuple[int, ...] = (1, 2, 3)
    until_return: float | None = None
    """The threshold: training ends there, and a run that does not reach it is a miss."""
    max_env_steps: int | None = None
    max_seconds: float | None = None
    warm_seconds: float = 0.0
    """The rate of env steps is taken from here to the end."""
    limit: bool = False
    """Measure the composed limit beside every run."""
    limit_seconds: float = 0.75
    """How long each cell of the limit's grid is measured."""
    kill: tuple[str, ...] = ()
    """Processes to kill on the way, one after the other, as `ps` shows them: "actor 1"."""
    kill_every: int = 8000
    """Env steps before the first death and between two."""
    size: int = 0
    """Of a replay buffer."""
    who: tuple[str, ...] = ()
    """Which replay buffers: shoal inline, shoal ipc, cpprb, ..."""
    expert: str = ""
    """Records 20 demonstrations to learn from, as the SOURCE of `shoal data record`; empty: none."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values of the experiment, dotted, as for `shoal train`."""
    order: Mapping[str, Any] = field(default_factory=dict)
    """Options of a peer's driver."""
    gpu: bool = False
    """It needs a GPU; without one it is skipped, and its row says so."""
    quick: bool = True
    """Whether --suite quick has it too."""

    @property
    def alone(self) -> bool:
        """Whether it measures speed: nothing may run beside it."""
        return bool(self.limit or self.warm_seconds or self.workload or self.peer)


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
        actors = f", {self.actors} actor{'' if self.actors == 1 else 's'}" if len(self.case.actors) > 1 else ""
        return self.case.name + actors + (f", {self.who}" if self.who else "")

    @property
    def settings_hash(self) -> str:
        """Changes with every value of the case but its seeds."""
        about = json.dumps({**asdict(self.case), "actors": self.actors, "seeds": None, "quick": None}, sort_keys=True)
        return hashlib.sha1(about.encode()).hexdigest()[:8]

    @property
    def key(self) -> str:
        """Names the run. A case that was edited has another key, so it is run again."""
        return f"{self.group}, seed {self.seed} #{self.settings_hash}"

    def arguments(self) -> dict[str, Any]:
        """What shoal.train is called with."""
        case = self.case
        budgets = ("max_seconds",) if case.overrides.get("offline") else ("max_env_steps", "max_seconds")
        goals = {name: getattr(case, name) for name in ("until_return", *budgets)}
        given = {"actors": self.actors, **{name: value for name, value in goals.items() if value is not None}}
        return {"preset": case.preset, "env": case.env, "runtime": case.runtime, "seed": self.seed, "console.mode": "none",
                "tensorboard": False, **{name: value for name, value in given.items() if value is not None}, **case.overrides}


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    cases: tuple[SuiteCase, ...]

    def settings_hashes(self) -> dict[str, str]:
        """Group -> the hash of its settings."""
        return {job.group: job.settings_hash for job in self.jobs()}

    def jobs(self) -> list[Job]:
        rounds = max((len(case.seeds) for case in self.cases), default=0)
        return [Job(case, case.seeds[turn], actors, who) for turn in range(rounds) for case in self.cases if turn < len(case.seeds)
                for actors in case.actors or (None,) for who in case.who or (None,)]


def suite_names() -> list[str]:
    folder = files("shoal") / "bench" / "suites"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_suite(name: str, variant: str = "full") -> Suite:
    """A suite of shoal's by its name, or one by the path of its file."""
    from shoal.experiment.suggestions import closest

    if variant not in VARIANTS:
        raise ConfigError(f"--suite {variant} is not possible: give {' or '.join(VARIANTS)}")
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"there is no file {name}; give the name of a suite ({', '.join(suite_names())}) or the path of one")
        text = _text(path)
    elif name in suite_names():
        text = (files("shoal") / "bench" / "suites" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        raise ConfigError(f"there is no suite {name!r}{closest(name, suite_names(), 'there are')}")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the suite {name} is not valid TOML: {error}") from None
    return parse_suite(Path(name).stem, table, variant)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the suite {path} is not UTF-8 text ({error}); save it as UTF-8, which TOML requires") from None
    except OSError as error:
        raise ConfigError(f"the suite {path} cannot be read: {error.strerror}") from None


def parse_suite(name: str, table: Mapping[str, Any], variant: str = "full") -> Suite:
    """A suite from its tables. Both variants are checked, whichever is asked for, so an error in [quick] is found at once too."""
    unknown = set(table) - {"title", "defaults", "quick", "case"}
    if unknown:
        raise ConfigError(f"suite {name} has {', '.join(sorted(unknown))}; there may be title, [defaults], [quick] and [[case]]")
    title = table.get("title", name)
    if not isinstance(title, str):
        raise ConfigError(f"suite {name}: title={title!r} is not possible: give text")
    defaults, quick = (_fitted(f"suite {name}, [{part}]", table.get(part, {})) for part in ("defaults", "quick"))
    cases: dict[str, list[SuiteCase]] = {variant: [] for variant in VARIANTS}
    for number, entry in enumerate(_entries(name, table.get("case", [])), 1):
        where = f"suite {name}, case {number}"
        own = _fitted(where, entry)
        cases["full"].append(_case(where, defaults, own, {}))
        if cases["full"][-1].quick:
            cases["quick"].append(_case(f"{where} with [quick]", defaults, own, quick))
    if not cases["full"]:
        raise ConfigError(f"suite {name} has no [[case]]")
    for one in cases.values():
        _check_groups(Suite(name, title, tuple(one)))
    if not cases[variant]:
        raise ConfigError(f"suite {name} has no case for --suite {variant}: all of them say quick = false")
    return Suite(name, title, tuple(cases[variant]))


def _check_groups(suite: Suite) -> None:
    """Rows are identified by group and seed, so two cases with the same group would hide each other."""
    names = [case.name for case in suite.cases]
    groups = [group for case in suite.cases for group in dict.fromkeys(job.group for job in Suite("", "", (case,)).jobs())]
    for what, found in (("two cases called", names), ("two cases whose runs are called", groups)):
        twice = sorted({one for one in found if found.count(one) > 1})
        if twice:
            raise ConfigError(f"suite {suite.name} has {what} {twice[0]!r}; give one of them another name = \"...\"")


def _entries(name: str, given: Any) -> list[Mapping[str, Any]]:
    if isinstance(given, Mapping):
        raise ConfigError(f"suite {name} has [case]; write [[case]], with two brackets, above each case")
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise ConfigError(f"suite {name}: case={given!r} is not possible: write [[case]] above each case, and its values below")
    return given


def _fitted(where: str, table: Any) -> dict[str, Any]:
    """The values of one table of the file, each as its field wants it."""
    from shoal.experiment.suggestions import closest
    from shoal.experiment.values import fit_type

    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is {table!r}; write it as a table, with its values below")
    hints = get_type_hints(SuiteCase)
    given: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            raise ConfigError(f"{where} has {key!r}{closest(key, hints, 'there are')}")
        if key in TABLES and not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {key}={value!r} is not possible: write {key} = {TABLES[key]}")
        several = key in ("actors", "seeds", "kill", "who")
        given[key] = fit_type(hints[key], [value] if several and not isinstance(value, list) else value, f"{where}: {key}")
    return given


def _case(where: str, defaults: Mapping[str, Any], own: Mapping[str, Any], more: Mapping[str, Any]) -> SuiteCase:
    """The case's own values over the defaults, and those of [quick] over both."""
    from shoal.bench.suite_checks import check

    kinds = [kind for kind in KINDS if own.get(kind)] or [kind for kind in KINDS if defaults.get(kind)]
    if len(kinds) != 1:
        raise ConfigError(f"{where} has {' and '.join(kinds) or 'none of preset, peer and workload'}; give exactly one of them")
    takes, usual = EVERY_KIND | KINDS[kinds[0]], SuiteCase("")
    for key, value in own.items():
        if key not in takes and value != getattr(usual, key):
            able = " or ".join(f"a {kind}" for kind in KINDS if key in KINDS[kind])
            raise ConfigError(f"{where}: {key}={value!r} does not apply to a {kinds[0]}, but to {able}; leave it out")
    given = {key: value for table in (defaults, own, more) for key, value in table.items() if key in takes}
    given |= {key: {**defaults.get(key, {}), **own.get(key, {}), **more.get(key, {})} for key in TABLES if key in takes}
    if "name" not in given:
        what = given.get("preset") or given.get("peer") or f"{given['workload']} {given.get('size')}"
        given["name"] = f"{what} {given['env']}" if given.get("env") else what
    case = SuiteCase(**given)
    if case.peer and (found := checkout.benchmarks()):
        case = replace(case, order=found.fit_order(case, own.get("order", {})))
    check(case, f"{where} ({case.name})")
    return case
