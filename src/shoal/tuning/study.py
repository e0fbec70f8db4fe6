"""The folder of a study.

    study.json          what it is: preset, environment, ranges, rules, budgets
    members/03/         a run directory like any other: `shoal eval`, `shoal play`, `shoal resume` work there
    members/03.json     its record: values, steps, fitness, and a copy that is under way
    lineage.jsonl       every start, slice and copy: following the parents rebuilds a schedule

Every file but the last is replaced by a rename. A copy is written down before it begins and can be done twice, so a member is never
half a copy: when the study is resumed, the copy is done again.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from shoal.coordination.population.exploit import ExploitRule, Fitness
from shoal.coordination.population.priors import Prior, parse_prior
from shoal.errors import CheckpointError, ConfigError
from shoal.experiment.checkpoints import read_json, write_json
from shoal.experiment.references import modules_of
from shoal.experiment.run import Run, load
from shoal.experiment.rundir import RunDir
from shoal.experiment.values import fit_type
from shoal.telemetry.outputs import read_lines
from shoal.tuning.member_run import copy_checkpoint, set_values
from shoal.tuning.searches import SearchRule

__all__ = ["MOST_MEMBERS", "Member", "Study", "StudySettings", "check_bounds"]

MOST_MEMBERS = 10_000
BOUNDS = {"population": (1, MOST_MEMBERS), "workers": (1, MOST_MEMBERS), "resample": (0, 1), "points": (1, 1000),
          "reduction": (2, 1000), "seed": (0, 2**53 - 1 - MOST_MEMBERS), "every_env_steps": (1, 10**15),
          "max_env_steps": (1, 10**15)}
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
START_AGAIN = "restore it, or start the study again"

Record = TypeVar("Record", "StudySettings", "Member")


def check_bounds(values: Mapping[str, Any]) -> None:
    """Refuse numbers with which a study would not begin, or not end."""
    for name, (least, most) in BOUNDS.items():
        if (value := values.get(name)) is not None and not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g} is not possible; give a number from {least} to {most:,}")


@dataclass(frozen=True)
class StudySettings:
    """What a study is."""

    preset: str
    env: str
    vary: dict[str, str]
    """By the name of a value the range that it is searched in."""
    population: int
    every_env_steps: int
    max_env_steps: int
    until_return: float | None = None
    search: SearchRule = "population"
    exploit: ExploitRule = "truncation"
    resample: float = 0.0
    """Probability that exploring draws a value anew instead of perturbing it."""
    points: int = 3
    """Grid search: values of each range."""
    reduction: int = 3
    """Halving: one of this many continues to the next rung, which is this much longer."""
    seed: int = 0
    workers: int | None = None
    """Members that train at the same time; none: as many as there are cores."""
    cluster: str | None = None
    """The Ray cluster that members train on: an address, auto, or local; none: processes of this machine."""
    options: tuple[str, ...] = ()
    """Of every member's `shoal train`."""

    @property
    def priors(self) -> dict[str, Prior]:
        return {name: parse_prior(text) for name, text in self.vary.items()}


@dataclass(frozen=True)
class Member:
    """What is known of a member; the newest record replaces the one before."""

    number: int
    values: dict[str, Any]
    env_steps: int = 0
    fitness: float | None = None
    std: float = 0.0
    episodes: int = 0
    ancestor: int = -1
    """Whose parameters it began with, through all copies."""
    stopped_by: str = ""
    rungs: list[float | None] = field(default_factory=list)
    """Halving: its fitness at the end of each rung."""
    failures: list[str] = field(default_factory=list)
    """How its slices failed since the study was started or resumed; the last one of them is why it does not train."""
    failed: bool = False
    copying: dict[str, Any] = field(default_factory=dict)
    """The parent and the values of a copy that is under way."""

    @property
    def known(self) -> Fitness | None:
        return None if self.fitness is None else Fitness(self.fitness, self.std, self.episodes)


class Study:
    """A study on disk."""

    def __init__(self, path: Path, trust: bool = False) -> None:
        """`trust`: modules that its runs name may be imported, also from outside the installed environment."""
        self.path, self.trust = path, trust

    def __repr__(self) -> str:
        try:
            settings, known = self.settings, [member.fitness for member in self.members() if member.fitness is not None]
        except (CheckpointError, ConfigError):
            return f"<Study {self.path}, which cannot be read>"
        best = f"best fitness {max(known):,.6g}" if known else "none evaluated yet"
        what = f"{settings.preset} on {settings.env}, {settings.search} search, {settings.population} members"
        return f"<Study {self.path}: {what}, {best}>"

    @classmethod
    def create(cls, path: Path, settings: StudySettings) -> Study:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"--study {path} is not empty; continue it with `shoal tune resume {path}`, or give another folder")
        return cls._made(path, settings)

    @classmethod
    def create_default(cls, path: Path, settings: StudySettings) -> Study:
        """At `path`, or with -2, -3, ... behind it where another study has begun in the same second."""
        first = path
        for number in itertools.count(2):
            try:
                path.mkdir(parents=True)  # only one of two that try at once
                break
            except FileExistsError:
                path = first.with_name(f"{first.name}-{number}")
        return cls._made(path, settings)

    @classmethod
    def _made(cls, path: Path, settings: StudySettings) -> Study:
        (path / "members").mkdir(parents=True)
        write_json(path / "study.json", asdict(settings))
        return cls(path, trust=True)  # who starts a study has named what it imports

    @classmethod
    def open(cls, path: Path, trust: bool = False) -> Study:
        if not (path / "study.json").is_file():
            raise ConfigError(f"{path} has no study in it (no study.json); start one with `shoal tune PRESET ENV ...`")
        return cls(path, trust)

    @property
    def settings(self) -> StudySettings:
        path = self.path / "study.json"
        settings = typed(StudySettings, path)
        if any(not isinstance(text, str) for text in settings.vary.values()):
            raise CheckpointError(f"{path} is damaged: a range is not text; {START_AGAIN}")
        check_bounds(asdict(settings))
        return settings

    # ------------------------------------------------------------------ members
    def run(self, number: int) -> RunDir:
        return RunDir(self.path / "members" / f"{number:02d}")

    def log_file(self, number: int) -> Path:
        """What a member has printed."""
        return self.path / "members" / f"{number:02d}.log"

    def restore(self, number: int) -> None:
        """Undo the arrival of a run directory that was cut short between two renames."""
        run = self.run(number).path
        old = run.with_name(f"{run.name}.old")
        if old.exists() and not run.exists():
            old.rename(run)

    def members(self) -> list[Member]:
        """Those that have begun, by number."""
        names = set(self.settings.vary)
        paths = (self.path / "members").glob("[0-9]*.json")
        return sorted((_checked(typed(Member, path), names, path) for path in paths), key=lambda member: member.number)

    def save(self, member: Member) -> Member:
        write_json(self.path / "members" / f"{member.number:02d}.json", asdict(member))
        return member

    def measured(self, member: Member) -> Member:
        """The record of a member that has just trained: its newest version's fresh episodes, and nothing from before a copy."""
        run = self.run(member.number)
        summary, last = run.summary(), run.last_snapshot()
        fitness = summary.get("eval_return")
        return replace(member, env_steps=int(summary.get("env_steps", 0)), fitness=None if fitness is None else float(fitness),
                       std=float(last.get("eval_std") or 0.0), episodes=int(summary.get("eval_episodes") or 0),
                       stopped_by=str(summary.get("stopped_by") or ""))

    @property
    def best(self) -> Run:
        """The run of the fittest member."""
        known = [member for member in self.members() if member.fitness is not None]
        if not known:
            raise CheckpointError(f"{self.path} has no member with a known fitness yet; continue: `shoal tune resume {self.path}`")
        return load(self.run(max(known, key=lambda member: member.fitness or 0.0).number).path, trust=self.trust)

    def modules(self) -> list[str]:
        """Modules that its members import: those that study.json and the members' runs name."""
        settings = self.settings
        words = [settings.env, *(word for word in settings.options if IMPORT_PATH.fullmatch(word))]
        configs = [{"env": {"id": word}} for word in words]
        configs += [self.run(member.number).config() for member in self.members() if self.run(member.number).config_file.is_file()]
        return sorted({module for config in configs for module in modules_of(config)})

    # ------------------------------------------------------------------ copies
    def begin_copy(self, member: Member, parent: Member, values: Mapping[str, Any]) -> Member:
        """Write down that a member takes over its parent's state, and continues with these values."""
        return self.save(replace(member, copying={"parent": parent.number, "values": dict(values), "ancestor": parent.ancestor}))

    def finish_copy(self, member: Member) -> Member:
        """Do what `begin_copy` has written down: take over all that is in the parent's newest checkpoint, optimiser state too."""
        parent, values = int(member.copying["parent"]), dict(member.copying["values"])
        taken = copy_checkpoint(self.run(parent), self.run(member.number))
        set_values(self.run(member.number), values)
        of_parent = next(one.values for one in self.members() if one.number == parent)
        self.log("copy", member.number, parent=parent, before=member.values, after=values, fitness=member.fitness,
                 env_steps=member.env_steps, parent_env_steps=taken, parent_values=of_parent)
        return self.save(replace(member, values=values, copying={}, failed=False, fitness=None, std=0.0, episodes=0,
                                 ancestor=int(member.copying["ancestor"])))

    # ------------------------------------------------------------------ lineage
    def log(self, event: str, member: int, **more: Any) -> None:
        with (self.path / "lineage.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "event": event, "member": member, **more}) + "\n")

    def lineage(self) -> list[dict[str, Any]]:
        """Lines that cannot be used are passed over."""
        settings = self.settings
        return [row for row in read_lines(self.path / "lineage.jsonl") if _usable(row, settings)]

    def schedule(self, number: int) -> list[dict[str, Any]]:
        """What this member's parameters were trained with, from the first step on: its own slices since its last copy, before them
        its parent's until then, and so on. A parent goes on training: what it had made of a slice when it was copied counts too."""
        found: list[dict[str, Any]] = []
        who, taken = number, None
        for row in reversed(self.lineage()):
            if row["member"] != who:
                continue
            if taken is not None and not (row["event"] == "slice" and row["env_steps"] >= taken["env_steps"]):
                found.append(taken)
            taken = None
            if row["event"] == "copy":
                who = int(row["parent"])
                if "parent_env_steps" in row:
                    taken = {"member": who, "env_steps": row["parent_env_steps"], "values": row["parent_values"]}
            elif row["event"] == "slice":
                found.append({"member": who, "env_steps": row["env_steps"], "values": row["values"]})
        return list(reversed(found))


def typed(kind: type[Record], path: Path) -> Record:
    """A record of the study's folder; CheckpointError for anything else."""
    found, hints = read_json(path), get_type_hints(kind)
    try:
        for name, value in found.items():
            if get_origin(hints.get(name)) in (dict, list) and not isinstance(value, get_origin(hints[name])):
                raise TypeError(f"{name} is {value!r}")
        return kind(**{name: fit_type(hints.get(name, Any), value, name) for name, value in found.items()})
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; {START_AGAIN}") from None


def _checked(member: Member, names: set[str], path: Path) -> Member:
    """The record of a member, if it is one of this study."""
    copying = member.copying
    if f"{member.number:02d}" != path.stem or set(member.values) != names or not all(map(_known, member.rungs)) or (
            copying and not (isinstance(copying.get("parent"), int) and isinstance(copying.get("ancestor"), int)
                             and isinstance(copying.get("values"), dict) and set(copying["values"]) == names)):
        raise CheckpointError(f"{path} is damaged: it is not the record of this member; {START_AGAIN}")
    return member


def _usable(row: Mapping[str, Any], settings: StudySettings) -> bool:
    """Whether a line of lineage.jsonl is one."""
    who = range(settings.population)
    if row.get("event") == "copy":
        known = "parent_env_steps" not in row or (isinstance(row["parent_env_steps"], int)
                                                  and _within(row.get("parent_values"), settings))
        return row.get("member") in who and row.get("parent") in who and isinstance(row.get("env_steps"), int) and known
    if row.get("member") not in who or not _within(row.get("values"), settings):
        return False
    return row.get("event") == "start" or (row.get("event") == "slice" and isinstance(row.get("env_steps"), int)
                                           and "fitness" in row and _known(row["fitness"]))


def _within(values: object, settings: StudySettings) -> bool:
    """Whether these are values of a member, within their ranges."""
    if not isinstance(values, dict) or set(values) != set(settings.vary):
        return False
    try:
        return all(prior.holds(values[name]) for name, prior in settings.priors.items())
    except ConfigError:  # a range of study.json is damaged
        return False


def _known(fitness: object) -> bool:
    """A number, or none."""
    return fitness is None or isinstance(fitness, int | float)
